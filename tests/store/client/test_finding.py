"""A store is found through its actor's handle, or it is said why not. The actor is a stand-in, so that Ray may fail at
will."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayTaskError

from penstock.conf.errors import StoreDied
from penstock.network.connection import Address, new_token
from penstock.network.host import free_address
from penstock.store.client.links import SocketLink, TcpLink, endpoint_of
from penstock.store.client.store_client import StoreClient
from penstock.store.errors import StoreError, StoreUnreachable
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint
from tests.fakes.actors import FakeHandle
from tests.store.visitors import linked, serve, unseen


def actor(*answers: Any) -> FakeHandle:
    """The handle of a store's actor that answers one after the other of these, and the last one for ever."""
    left = list(answers)
    return FakeHandle(endpoint=lambda: left.pop(0) if len(left) > 1 else left[0])


def test_it_is_asked_again_until_it_answers_and_called_by_the_nearest_way(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        gone = ActorUnavailableError("the connection broke", None)
        for node, seen, link in (("", endpoint, SocketLink), ("", unseen(endpoint), TcpLink), ("b", endpoint, TcpLink)):
            handle = actor(gone, seen)
            client = StoreClient(handle, node or endpoint.node or "here")
            assert isinstance(await linked(client), link)
            assert len(handle.calls) == 2

    serve(tmp_path, body, node="here")


def test_it_is_not_asked_for_ever() -> None:
    handle = actor(ActorUnavailableError("the connection broke", None))
    with pytest.raises(StoreUnreachable, match=r"through Ray for 0.5 s: .*the connection broke"):
        asyncio.run(endpoint_of(handle, patience_s=0.5))
    assert len(handle.calls) > 1


@pytest.mark.parametrize("death", [ActorDiedError(), OutOfMemoryError("ended by Ray's memory monitor")])
def test_a_dead_one_is_not_asked_again(death: Exception) -> None:
    handle = actor(death)
    with pytest.raises(StoreDied, match="the store's process is gone"):
        asyncio.run(endpoint_of(handle))
    assert len(handle.calls) == 1


def test_one_that_cannot_listen_says_why() -> None:
    error = RayTaskError("endpoint", "traceback", StoreError("no port"))
    with pytest.raises(StoreError, match="no port"):
        asyncio.run(endpoint_of(actor(error)))


def test_a_port_where_nobody_listens_is_named_with_what_to_look_at() -> None:
    host, port = free_address("127.0.0.1").split(":")
    endpoint = Endpoint("", "/not/here", ("", ""), Address(host, int(port)), new_token())
    with pytest.raises(StoreUnreachable, match=rf"at 127.0.0.1:{port}: .*refused.*firewall.*cluster.ports"):
        asyncio.run(StoreClient(endpoint).stats())


def test_a_store_of_another_run_is_a_stranger(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        other = Endpoint("", "/not/here", ("", ""), endpoint.address, new_token())
        with pytest.raises(StoreUnreachable, match="is it of the same run"):
            await StoreClient(other).stats()
        assert (await store.stats())["store/refused_connections"] >= 1

    serve(tmp_path, body)


def test_an_endpoints_token_is_not_shown(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        assert len(endpoint.token) == 32
        assert repr(endpoint.token) not in repr(endpoint)

    serve(tmp_path, body)
