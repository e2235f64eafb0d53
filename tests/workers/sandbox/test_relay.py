"""Commands of a workspace that reach one address outside, and nothing else."""

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from penstock.conf.errors import ConfigError, WorkspaceError
from penstock.workers.sandbox import relay
from tests.processes import GONE_S
from tests.workers.sandbox.conftest import Room

pytestmark = pytest.mark.real

ASKS = """
import hashlib, socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(b"x" * int(sys.argv[2]))
    connection.shutdown(socket.SHUT_WR)
    heard = b"".join(iter(lambda: connection.recv(1 << 20), b""))
print(len(heard), hashlib.sha256(heard).hexdigest())
"""
ASKS_AT_ONCE = """
import socket, sys, threading
def ask(number):
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
        connection.sendall(b"%d" % number)
        connection.shutdown(socket.SHUT_WR)
        heard.append(connection.recv(9))
heard = []
threads = [threading.Thread(target=ask, args=[number]) for number in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(sorted(heard))
"""
HOLDS = """
import socket, sys, time
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
connection.send(b"x")
open("held", "w").close()
time.sleep(600)
"""


class Echo:
    """Sends back what it gets, and counts connections."""

    port = num_now = most = num = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num += 1
        self.num_now += 1
        self.most = max(self.most, self.num_now)
        heard = await reader.read()
        await asyncio.sleep(0.05)
        self.num_now -= 1
        writer.write(heard)
        await writer.drain()
        writer.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


@asynccontextmanager
async def echo() -> AsyncIterator[Echo]:
    made = Echo()
    async with await asyncio.start_server(made, "127.0.0.1", 0) as server:
        made.port = server.sockets[0].getsockname()[1]
        yield made


def test_a_command_reaches_the_address_and_later_ones_do_not(room: Room, ws):
    async def main() -> None:
        async with echo() as server:
            await ws.write("asks.py", ASKS)
            command = f"python3 asks.py {server.port} 3000000"
            expected = f"3000000 {hashlib.sha256(b'x' * 3000000).hexdigest()}\n"
            assert (await ws.run(command, reach=server.url)).stdout == expected
            for later in (ws.run(command), ws.shell().run(command), ws.check(command)):
                assert "Connection refused" in (await later).stderr
            ws.worker.rest()
            assert (await ws.run(command, reach=server.url)).stdout == expected
            assert server.num == 2

    room.do(main())


def test_a_command_has_a_bounded_number_of_connections(room: Room, ws, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relay, "MAX_CONNECTIONS", 2)

    async def main() -> None:
        async with echo() as server:
            await ws.write("asks.py", ASKS_AT_ONCE)
            outcome = await ws.run(f"python3 asks.py {server.port}", reach=server.url)
            assert outcome.stdout == f"{[b'%d' % number for number in range(6)]}\n", outcome.stderr
            assert server.num == 6
            assert server.most <= 2

    room.do(main())


def test_what_a_command_leaves_open_ends_with_it(room: Room, ws):
    async def main() -> None:
        begun, ended = asyncio.Semaphore(0), asyncio.Semaphore(0)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await reader.readexactly(1) == b"x"
            begun.release()
            with suppress(ConnectionError):
                await reader.read()
            ended.release()
            writer.close()

        async with asyncio.timeout(GONE_S), await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await ws.write("holds.py", HOLDS)
            cancelled = asyncio.create_task(ws.run(f"python3 holds.py {port}", reach=f"http://127.0.0.1:{port}"))
            await begun.acquire()
            cancelled.cancel()
            await ended.acquire()
            await asyncio.wait([cancelled])
            command = f"rm held; python3 holds.py {port} & until [ -e held ]; do sleep 0.02; done"
            assert (await ws.run(command, reach=f"http://127.0.0.1:{port}")).is_success
            await ended.acquire()

    room.do(main())


def test_requests_that_are_cancelled_at_any_moment_leave_no_socket(room: Room, ws):
    async def main() -> None:
        async with echo() as server:
            for number in range(16):
                if number % 4 == 0:
                    ws.worker.rest()
                running = asyncio.create_task(ws.run(f"echo {number}", reach=server.url))
                await asyncio.sleep(number * 0.005)
                running.cancel()
                await asyncio.wait([running])
            await ws.write("asks.py", ASKS)
            assert (await ws.run(f"python3 asks.py {server.port} 1", reach=server.url)).stdout.startswith("1 ")

    room.do(main())


def test_what_cannot_be_reached_is_named(room: Room, ws):
    with pytest.raises(ConfigError, match="reach='gateway' is no URL"):
        room.do(ws.run("true", reach="gateway"))
    with pytest.raises(WorkspaceError, match=r"port 80: .*Permission denied"):
        room.do(ws.run("true", reach="http://127.0.0.1:80"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    room.do(ws.write("asks.py", ASKS))
    outcome = room.do(ws.run(f"python3 asks.py {port} 1", reach=f"http://127.0.0.1:{port}"))
    assert any(word in outcome.stderr for word in ("reset by peer", "not connected")) or outcome.stdout.startswith("0 ")
