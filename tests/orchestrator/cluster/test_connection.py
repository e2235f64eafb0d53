"""What RAY_ADDRESS may be: anything else is refused in one line before a run makes anything."""

import asyncio
import io
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from penstock.conf.errors import ConfigError, ResourceError
from penstock.orchestrator.cluster import ray_connection
from penstock.orchestrator.cluster.ray_cluster import check_resources, is_elsewhere
from penstock.orchestrator.cluster.ray_connection import check_token, cluster_address, reach
from penstock.orchestrator.configuration import validate
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from penstock.orchestrator.run_directory.run_directory import RunDirectory

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First frame of a server of gRPC."""
MALFORMED = {
    "ray://head:10001": r"of Ray Client, .*`ray job submit --address=http://head:8265 .*set RAY_ADDRESS=head:6379",
    "http://head:8265": r"of Ray's dashboard\. .*`ray job submit --address=http://head:8265 .*RAY_ADDRESS=head:6379",
    "https://ray.example.com": r"`ray job submit --address=https://ray.example.com --",
    "head": r"RAY_ADDRESS=head: must be HOST:PORT, such as head:6379",
    "head:": "such as head:6379",
    "head:six": "must be HOST:PORT",
    "head:99999": "must be HOST:PORT",
    "head:6379/": "such as head:6379",
    "[::1": "must be HOST:PORT",
    "module://head:6379": "such as head:6379",
}


@pytest.fixture(autouse=True)
def _nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*_: object, **__: object) -> RunDirectory:
        raise AssertionError("a run directory was made")

    monkeypatch.setattr(RunDirectory, "create", create)


@contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """Address of a server that answers each connection with the same bytes. None: it closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with closing(server.accept()[0]) as connected:
                connected.recv(100)
                if answer is not None:
                    connected.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def dashboard() -> Iterator[str]:
    """Address of a server of the library that Ray's dashboard is made with."""
    loop, served = asyncio.new_event_loop(), web.AppRunner(web.Application())

    async def start() -> Any:
        await served.setup()
        await web.TCPSite(served, "127.0.0.1", 0).start()
        return served.addresses[0][1]

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(served.cleanup(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)


@pytest.mark.parametrize(("address", "message"), MALFORMED.items())
def test_an_address_of_another_form_is_refused_with_the_one_to_use(address: str, message: str) -> None:
    with pytest.raises(ResourceError, match=message):
        reach(address)


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "http://127.0.0.1:8265", "127.0.0.1", "127.0.0.1:1"])
def test_run_and_validate_refuse_an_address_in_the_same_words(
    small_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(validate, "trials", lambda run: ())  # they start processes
    config, screen = load_config([*small_run, "rollout.engine=hf", f"output_dir={tmp_path / 'runs'}"]), io.StringIO()
    with pytest.raises(ResourceError) as refused:
        run(config, quiet=True)
    assert validate.validate_run(config, Console(file=screen, width=400)) == 2
    assert f"✗ resources: {refused.value}" in screen.getvalue()
    assert not (tmp_path / "runs").exists()


def test_a_dashboard_is_not_taken_for_a_cluster(dashboard: str) -> None:
    with pytest.raises(ResourceError, match=rf"{dashboard}: a web server answers there.* RAY_ADDRESS=127.0.0.1:6379"):
        reach(dashboard)


@pytest.mark.parametrize("answer", [SETTINGS, None])
def test_a_server_of_grpc_or_tls_may_be_a_cluster(answer: bytes | None) -> None:
    with answering(answer) as address:
        reach(address)


def test_a_port_that_is_silent_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection, "KNOCK_S", 0.01)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(ResourceError, match=r"no Ray cluster answers there \(timed out\)"),
    ):
        reach(f"127.0.0.1:{server.getsockname()[1]}")


def test_auto_without_a_cluster_on_this_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda directory: None)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ResourceError, match=r"RAY_ADDRESS=auto: no Ray cluster answers there \(Could not find any"):
        reach("auto")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RAY_AUTH_MODE": "tokens"}, "RAY_AUTH_MODE=tokens: unknown; did you mean 'token'"),
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere"}, "RAY_AUTH_TOKEN_PATH=/nowhere: there is no such file"),
        ({"RAY_AUTH_MODE": "Token", "RAY_AUTH_TOKEN_PATH": "/"}, "RAY_AUTH_TOKEN_PATH=/: there is no such file"),
        ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN_PATH": "/nowhere"}, None),
        ({"RAY_AUTH_TOKEN": "a" * 64, "RAY_AUTH_TOKEN_PATH": "/nowhere"}, None),
    ],
)
def test_authentication_that_ray_would_not_make_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str | None
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ResourceError, match=message) if message else nullcontext():
        check_token()
    with pytest.raises(ResourceError, match=message or "no Ray cluster answers"):
        reach("127.0.0.1:1")


@pytest.mark.parametrize("value", ["", " ", "local"])
def test_local_and_an_empty_value_mean_a_ray_of_the_runs_own(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", value)
    assert cluster_address() is None
    assert not is_elsewhere()


def test_a_temporary_directory_that_ray_cannot_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, small_run: list[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", "/" + "a" * 60)
    with pytest.raises(ResourceError, match="Set RAY_TMPDIR to a directory of at most 39 bytes"):
        check_resources([], load_config(small_run))
    monkeypatch.setenv("RAY_TMPDIR", os.devnull)
    with pytest.raises(ConfigError, match=r"RAY_TMPDIR: cannot make /dev/null \(Not a directory\)\. Set RAY_TMPDIR to"):
        check_resources([], load_config(small_run))
