"""Only processes of the store's own user speak to it, and nothing of anybody else is read."""

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from penstock.store.client.links import SocketLink
from penstock.store.client.store_client import StoreClient
from penstock.store.data.roots import SHARED_MEMORY, remove_root
from penstock.store.data.segments import Segments
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint
from penstock.store.service.wire import HELLO, MESSAGE, ClientMessage, Hello, calls_of
from tests.store.driver import make_spec
from tests.store.frames import frame

NOBODY = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0,
    reason="ONLY ROOT CAN BECOME ANOTHER USER: run as root to see that others are kept out; only modes are checked",
)
BECOME = f"import os, socket, sys; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
"""Modules first: Python itself may lie where only root may look."""
CALL = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.settimeout(20)
try:
    connection.connect(sys.argv[1])
    connection.sendall(bytes.fromhex(sys.argv[2]))
    connection.shutdown(socket.SHUT_WR)
    print("answered" if connection.recv(1) else "hung up")
except (PermissionError, ConnectionError) as error:
    print(type(error).__name__)
"""
SERVE = """
import socket, sys
door = socket.socket(socket.AF_UNIX)
door.bind(sys.argv[1])
door.listen()
print("listening", flush=True)
sys.stdin.read()
"""


def a_call() -> str:
    """What any client may say: its name, and what it wants."""
    calls = calls_of(Store)
    return (frame(Hello("client"), HELLO) + frame(ClientMessage(0, calls.request("close", ("who?",))), MESSAGE)).hex()


@pytest.fixture
def place() -> Iterator[Path]:
    """Where stores are in production: all users may look into what is above it."""
    place = Path(SHARED_MEMORY) / f"penstock-test-{uuid.uuid4().hex}"
    yield place
    remove_root(place)


def serve(place: Path, spill: Path, body: Callable[[Store, Endpoint], Awaitable[None]]) -> None:
    async def main() -> None:
        spec = make_spec()
        store = Store(spec, segments=Segments(str(place), str(spill), spec.shared_bytes))
        await asyncio.wait_for(body(store, await store.endpoint()), 30)
        await store.end()

    asyncio.run(main())


async def call(path: str, message: str, become: str = "") -> str:
    """What a process gets that says `message` to the socket."""
    command = [sys.executable, "-c", become + CALL, path, message]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_only_the_stores_user_may_enter_its_directories(place: Path, tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        assert Path(endpoint.path).parent == place
        for directory in (place, tmp_path / "disk"):
            assert directory.stat().st_mode & 0o777 == 0o700

    serve(place, tmp_path / "disk", body)
    assert not place.exists()
    assert not (tmp_path / "disk").exists()


@pytest.mark.real
def test_what_this_user_says_is_done(place: Path, tmp_path: Path) -> None:
    """Without this, the tests below could not fail."""

    async def body(store: Store, endpoint: Endpoint) -> None:
        assert await call(endpoint.path, a_call()) == "answered"
        assert (await store.describe())["closed"] == "who?"
        assert (await store.stats())["store/refused_connections"] == 0

    serve(place, tmp_path / "disk", body)


@pytest.mark.real
@needs_root
def test_another_user_does_not_get_to_the_socket(place: Path, tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        os.chmod(endpoint.path, 0o777)
        assert await call(endpoint.path, "", BECOME) == "PermissionError"

    serve(place, tmp_path / "disk", body)


@pytest.mark.real
@needs_root
def test_another_user_who_gets_to_the_socket_is_hung_up_on_and_counted(place: Path, tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        os.chmod(place, 0o755)
        os.chmod(endpoint.path, 0o777)
        said = await call(endpoint.path, a_call(), BECOME)
        assert said in ("hung up", "ConnectionResetError", "BrokenPipeError")
        assert (await store.describe())["closed"] is None
        assert (await store.stats())["store/refused_connections"] == 1

    serve(place, tmp_path / "disk", body)


@pytest.mark.real
@needs_root
def test_a_client_does_not_listen_to_a_store_of_another_user(place: Path) -> None:
    place.mkdir()
    os.chmod(place, 0o777)
    path = str(place / "socket")
    command = [sys.executable, "-c", BECOME + SERVE, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "listening\n"
        assert asyncio.run(SocketLink.connect(Endpoint("", path, ()), "client")) is None  # type: ignore[arg-type]
        other.communicate()


def test_a_directory_may_have_any_name_that_the_disk_takes(tmp_path: Path) -> None:
    """A socket's own name has 108 bytes."""

    async def body(store: Store, endpoint: Endpoint) -> None:
        assert len(endpoint.path) > 200
        client = StoreClient(Store(make_spec()))
        link = await SocketLink.connect(endpoint, client.name)
        assert link is not None
        assert (await link.call("spec")).group_size == 2

    serve(tmp_path / ("long" * 50), tmp_path / "disk", body)
