"""A relay: what connects to one port inside a workspace is connected with one address outside, and nothing else is.

    command ─▶ 127.0.0.1:PORT, in an empty network ─▶ listener ─▶ relay, in the worker's process ─▶ the address

A socket belongs to the network in which it was made. So the fence's keeper makes one that listens, and hands it to the
worker, which accepts connections that come from there. Bytes are copied as they are; what they may ask for is decided
by who listens at the address, such as the gateway by its keys.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import urlsplit

from penstock.conf.errors import ConfigError
from penstock.workers.sandbox.workspace_worker import WorkspaceWorker

MAX_CONNECTIONS = 128
"""Largest number of connections of a command at a time. Further ones wait in the kernel, up to its backlog."""
CONNECT_S, ACCEPT_PAUSE_S = 10.0, 1.0
"""Seconds to connect with the address, and between attempts to accept where this process has no descriptor left."""
CHUNK_BYTES = 1 << 16


@asynccontextmanager
async def reaching(worker: WorkspaceWorker, url: str) -> AsyncIterator[None]:
    """Let commands of a workspace reach a URL's host and port, at 127.0.0.1 and the same port. Raises `ConfigError`,
    `WorkspaceError`."""
    address = urlsplit(url)
    if not address.hostname or not address.port:
        raise ConfigError(f"workspace: reach={url!r} is no URL with a host and a port, as http://127.0.0.1:8000 is.")
    with await worker.listener(address.port) as listener:
        relaying = asyncio.create_task(relay(listener, address.hostname, address.port))
        try:
            yield
        finally:
            relaying.cancel()
            await asyncio.wait([relaying])


async def relay(listener: socket.socket, host: str, port: int) -> None:
    """Connect all that connects to a listener with an address, until this is cancelled; then the connections end."""
    loop, places = asyncio.get_running_loop(), asyncio.Semaphore(MAX_CONNECTIONS)
    async with asyncio.TaskGroup() as connections:
        while True:
            await places.acquire()
            try:
                inner, _ = await loop.sock_accept(listener)
            except OSError:
                places.release()
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            connection = connections.create_task(_connected(inner, host, port))
            connection.add_done_callback(partial(_end, inner, places))


def _end(inner: socket.socket, places: asyncio.Semaphore, _: object) -> None:
    inner.close()
    places.release()


async def _connected(inner: socket.socket, host: str, port: int) -> None:
    """Copy bytes between a connection and a new one, both ways, until both have ended."""
    try:
        async with asyncio.timeout(CONNECT_S):
            from_outside, to_outside = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return
    try:
        from_inside, to_inside = await asyncio.open_connection(sock=inner)
        try:
            await asyncio.gather(_copied(from_inside, to_outside), _copied(from_outside, to_inside))
        finally:
            to_inside.transport.abort()
    finally:
        to_outside.transport.abort()


async def _copied(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(CHUNK_BYTES):
            target.write(data)
            await target.drain()
        target.write_eof()
    except OSError:  # then the other direction ends, too
        target.transport.abort()
