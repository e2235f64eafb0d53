"""This machine is asked directly, and all others as their user has set it."""

import os
import urllib.request

import httpx
import pytest
import requests

from penstock.network.host import LOOPBACK, bypass_proxy, names_loopback, no_proxy_variables, own_names
from penstock.workers.runtime.serving import ServingActor

PROXY = "http://proxy.example:3128"


@pytest.fixture(autouse=True)
def proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, PROXY)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("ALL_PROXY", raising=False)


def by_proxy(host: str) -> list[bool]:
    """Whether each kind of client would ask a host by way of the proxy."""
    url = f"http://{host}:8000/v1"
    plain = host.strip("[]")
    with httpx.Client() as client:
        of_httpx = "Proxy" in repr(vars(client._transport_for_url(httpx.URL(url))))
    of_requests = bool(requests.utils.get_environ_proxies(url))
    return [of_httpx, of_requests, not urllib.request.proxy_bypass(plain)]


def test_this_machine_is_asked_directly_by_every_kind_of_client() -> None:
    assert any(by_proxy("127.0.0.1"))
    bypass_proxy("10.1.2.3")
    for host in ("127.0.0.1", "localhost", "10.1.2.3"):
        assert by_proxy(host) == [False] * 3, host
    assert by_proxy("hub.example") == [True] * 3
    assert os.environ["HTTPS_PROXY"] == PROXY


def test_what_the_user_has_set_for_others_stays() -> None:
    found = no_proxy_variables({"NO_PROXY": "hub.example, .corp", "no_proxy": "other.example"}, ["10.1.2.3"])
    assert found["NO_PROXY"] == found["no_proxy"]
    assert found["NO_PROXY"].split(",") == ["other.example", "hub.example", ".corp", *own_names(), "10.1.2.3"]
    assert no_proxy_variables(found, ["10.1.2.3"]) == found
    assert no_proxy_variables({"no_proxy": "*"}) == {"NO_PROXY": "*", "no_proxy": "*"}
    assert own_names()[: len(LOOPBACK)] == [*LOOPBACK]


def test_actors_ask_this_machine_directly_for_a_judge_may_be_on_it() -> None:
    ServingActor("Reward-0")
    assert by_proxy("localhost") == [False] * 3


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1:8000", "[::1]", "[::1]:8000"])
def test_a_host_is_loopback_with_its_port_or_without(host: str) -> None:
    assert names_loopback(host)


@pytest.mark.parametrize("host", ["", "example.org", "localhost.example.org", "127.0.0.1.example.org:80", "[::2]:80"])
def test_another_host_is_not_loopback(host: str) -> None:
    assert not names_loopback(host)
