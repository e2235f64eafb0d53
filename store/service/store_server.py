"""The server of a store: clients call it by a Unix socket on its machine, over TCP from others.

A connection is a client. When it ends, its process has ended, or cannot be reached, for whatever reason: what it waited
for is withdrawn and what it held goes back, at once and without a deadline. The other end is `client/links.py`.

The socket lies in a directory that only its user may enter, and a peer whose user the kernel does not name as this one
is hung up on before anything is read of it. A client that comes over TCP has to know the token
(`network/connection.py`).
"""

import asyncio
import socket
import types
from collections.abc import Coroutine, Generator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import pyarrow as pa

from penstock.conf.errors import NotPlainData
from penstock.network.connection import Address, bind_path, is_same_user
from penstock.network.listener import Listener
from penstock.store.data.codec import Malformed
from penstock.store.data.remote_rows import ROWS, RowsNodes
from penstock.store.data.segment_files import DebouncedCall
from penstock.store.data.segments import Segments
from penstock.store.errors import StoreError
from penstock.store.service.wire import ANSWER, HELLO, MANY, MESSAGE, CallTypes, Hello, StoreAnswer, Wire, refs_of

BACKLOG = 4096
"""Connections that wait to be accepted: all clients of a run come at once."""
STORE_SERVICE = 4
"""The number of the service that a connection from another machine asks for (`network/listener.py`)."""


@dataclass(frozen=True)
class StorePort:
    """The port for clients on other machines. `host`: an address of this one. `ports`: the first that is free is taken;
    0: any. `token`: the clients know it."""

    host: str
    token: bytes = field(repr=False)
    ports: range = range(1)


@dataclass(frozen=True)
class Endpoint:
    """The addresses at which a store is served. `node`: Ray's id of the machine."""

    node: str
    path: str
    segments: tuple[str, str]
    """Directories of large batches: shared memory, disk."""
    address: Address | None = None
    """The address for other machines, and for containers that do not see the path."""
    token: bytes = field(default=b"", repr=False)
    nodes: RowsNodes = field(default_factory=RowsNodes)
    """Nodes on which large batches may lie, beside these directories."""


class ServedStore(Protocol):
    async def left(self, client: str) -> None:
        """Note that the client's connection has ended."""


class StoreServer:
    """A server of one store. Lifecycle: made in an event loop, then `start`; it goes with the loop, or with `close`.
    `path`: of the socket. `port`: for other machines; None: it is called from its own alone."""

    def __init__(
        self, store: ServedStore, calls: CallTypes, segments: Segments, path: Path, port: StorePort | None = None
    ) -> None:
        """Prepare the server. Raises `StoreError` if no port is free."""
        self._store, self._calls = store, calls
        self._segments = segments
        self.path = path
        self._token = port.token if port is not None else b""
        self.other_users = 0
        """Connections of other users."""
        self.malformed = 0
        """Connections that ended with a message that is none."""
        self._loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None
        self._accepting: set[asyncio.Task[Any]] = set()
        self._listener = self._listen(port) if port is not None else None

    async def start(self) -> None:
        listening = bind_path(self.path)
        self._server = await self._loop.create_unix_server(lambda: PeerCheck(self), sock=listening, backlog=BACKLOG)

    def endpoint(self, node: str) -> Endpoint:
        places = str(self._segments.directory), str(self._segments.spill)
        address = self._listener.address if self._listener is not None else None
        return Endpoint(node, str(self.path), places, address, self._token, self._segments.nodes)

    @property
    def refused(self) -> int:
        """Connections of other users, and of processes that are not of the run."""
        return self.other_users + (self._listener.refused if self._listener is not None else 0)

    def accept(self) -> Wire:
        """Make the server's end of a client's connection."""
        return ClientConnection(self, self._store, self._calls, self._segments).wire

    def close(self) -> None:
        """Take no more connections; those that are open stay."""
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.close()

    def _listen(self, port: StorePort) -> Listener:
        try:
            services = {STORE_SERVICE: self._accept_in_thread, ROWS: self._segments.rows.serve}
            return Listener(port.host, port.token, services, port.ports, takers=(STORE_SERVICE,))
        except OSError as error:
            raise StoreError(
                f"the store finds no port to listen on at {port.host} ({error}). Widen cluster.ports, or set it to "
                "null for any free port."
            ) from None

    def _accept_in_thread(self, connected: socket.socket) -> None:
        """Hand an authenticated connection from another machine to the loop; in the thread of its handshake."""
        connected.setblocking(False)
        try:
            self._loop.call_soon_threadsafe(self._accept_in_loop, connected)
        except RuntimeError:  # the loop has closed
            connected.close()

    def _accept_in_loop(self, connected: socket.socket) -> None:
        arriving = self._loop.connect_accepted_socket(self.accept, connected)
        visit = self._loop.create_task(arriving)
        self._accepting.add(visit)
        visit.add_done_callback(self._accepting.discard)


class PeerCheck(asyncio.BaseProtocol):
    """The first protocol of a connection: nothing is read before its user is known."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        if not is_same_user(transport.get_extra_info("socket")):
            self._server.other_users += 1
            transport.abort()
            return
        wire = self._server.accept()
        transport.set_protocol(wire)
        wire.connection_made(transport)


class ClientConnection:
    """A client's connection. Its first message is its name, all later ones are calls."""

    def __init__(self, server: StoreServer, store: ServedStore, calls: CallTypes, segments: Segments) -> None:
        self.wire = Wire(self._on_message, self._on_lost)
        self._server, self._store, self._calls = server, store, calls
        self._segments = segments
        self._client: str | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        self._beginning: set[int] = set()
        """Numbers of calls whose task has not begun yet."""

    def _on_message(self, kind: int, body: memoryview, area: pa.Buffer) -> None:
        if self._client is None:
            self._register(kind, body, area)
            return
        if kind != MESSAGE:
            raise Malformed(f"client {self._client} sends a message of kind {kind}.")
        message = self.wire.codec.decode(self._calls.message_type, body, area)
        if message.ended:
            self._segments.end_readings(self._client, message.ended)
        if message.request is None:
            return
        method, arguments = self._calls.call(message.request)
        answering = self._answer(self._client, message.number, method, arguments)
        if method == MANY and not self._beginning:  # no task unless it has to wait, as for a file that is moved
            try:
                answering = _continue_in_task(answering, answering.send(None))
            except StopIteration:
                return
        else:
            self._beginning.add(message.number)
        task = asyncio.ensure_future(answering)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    def _register(self, kind: int, body: memoryview, area: pa.Buffer) -> None:
        if kind != HELLO:
            raise Malformed(f"a connection that begins with a message of kind {kind}.")
        hello = self.wire.codec.decode(Hello, body, area)
        self._client = hello.client
        send_notice_soon = DebouncedCall(asyncio.get_running_loop(), self._send_notice)
        self._segments.add_client(hello.client, send_notice_soon, hello.node)

    async def _answer(self, client: str, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        self._beginning.discard(number)
        error: StoreError | None = None
        value = None
        try:
            value = await getattr(self._store, method)(*arguments)
        except StoreError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - any error is sent to the caller
            error = StoreError(f"{type(failure).__name__}: {failure}")
        if not self.wire.is_open:
            return
        notice = self._segments.notice(client)
        try:
            self.wire.send(ANSWER, StoreAnswer(number, value, error, notice))
        except NotPlainData as failure:
            unsent = StoreError(f"the answer of {method!r} cannot be sent: {failure}")
            self.wire.send(ANSWER, StoreAnswer(number, None, unsent, notice))
            return
        for placed in refs_of(value):  # in use until the client reports the end of its reading
            self._segments.book.begin_reading(client, placed.segment)

    def _send_notice(self) -> None:
        """Send a notice that no answer has taken along: a client that calls nothing would hold on to what is gone."""
        notice = self._segments.notice(str(self._client))
        if notice is not None and self.wire.is_open:
            self.wire.send(ANSWER, StoreAnswer(None, None, None, notice))

    def _on_lost(self, error: Exception | None) -> None:
        if isinstance(error, Malformed):
            self._server.malformed += 1
        for task in list(self._waiting):
            task.cancel()
        if self._client is not None:
            leaving = asyncio.ensure_future(self._store.left(self._client))
            self._waiting.add(leaving)
            leaving.add_done_callback(self._waiting.discard)


async def _continue_in_task(begun: Coroutine[Any, Any, None], awaited: Any) -> None:
    """Go on, in a task, with what has begun outside of one. `awaited`: what it waits for."""
    await _continue(begun, awaited)


@types.coroutine
def _continue(begun: Coroutine[Any, Any, None], awaited: Any) -> Generator[Any, Any, None]:
    while True:
        try:
            value = yield awaited
            go_on = partial(begun.send, value)
        except BaseException as error:  # noqa: BLE001 - a task that is cancelled, for one: it is theirs to handle
            go_on = partial(begun.throw, error)
        try:
            awaited = go_on()
        except StopIteration:
            return
