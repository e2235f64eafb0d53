"""Visitors of an HTTP server that send no whole head, over real sockets."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from penstock.network.listener import Heads


class Echo(asyncio.Protocol):
    """Answers all that it gets with the same in upper case."""

    def connection_made(self, transport):
        self._transport = transport

    def data_received(self, data):
        self._transport.write(data.upper())


@asynccontextmanager
async def listening(heads):
    server = await asyncio.get_running_loop().create_server(heads.before(Echo), "127.0.0.1", 0)
    try:
        async with asyncio.timeout(60):
            yield lambda: asyncio.open_connection(*server.sockets[0].getsockname())
    finally:
        server.close()
        heads.close()


async def ended(reader):
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)


def test_a_head_that_comes_in_pieces_reaches_the_server_as_it_was_sent():
    async def play():
        async with listening(Heads()) as connect:
            reader, writer = await connect()
            for piece in (b"get / http/1.1\r", b"\n", b"a: b\r\n\r", b"\nbody"):
                writer.write(piece)
                await writer.drain()
            assert await reader.readuntil(b"BODY") == b"GET / HTTP/1.1\r\nA: B\r\n\r\nBODY"
            writer.write(b"more")
            assert await reader.readuntil(b"MORE")
            writer.close()

    asyncio.run(play())


def test_visitors_that_send_half_a_head_keep_nobody_out():
    async def play():
        heads = Heads(most=8)
        async with listening(heads) as connect:
            halves = [await connect() for _ in range(50)]
            for _, writer in halves:
                writer.write(b"GET / HTTP/1.1\r\n")
            for reader, _ in halves[:42]:
                await ended(reader)
            reader, writer = await connect()
            writer.write(b"get\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"GET\r\n\r\n"
            assert len(heads.open) <= 8
            writer.close()

    asyncio.run(play())


@pytest.mark.parametrize("bounds", [{"head_s": 0.05}, {"head_bytes": 100}])
def test_a_head_that_is_too_slow_or_too_long_is_hung_up_on(bounds):
    async def play():
        async with listening(Heads(**bounds)) as connect:
            reader, writer = await connect()
            writer.write(b"a: b\r\n" * 100)
            await ended(reader)
            writer.close()

    asyncio.run(play())
