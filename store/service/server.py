"""The store's socket for processes of its own machine: calls over a Unix socket, a tenth of what an actor call costs.

A connection is a client. When it ends, its process has ended, however that came: what it waited for is withdrawn and
what it held goes back, at once and without a deadline. Made by `Store.endpoint`; the other end is `client/links.py`.

Messages are pickles, which run code. So the socket lies in a directory that only its user may enter, and a peer whose
user the kernel does not name as this one is hung up on before anything is read of it.
"""

import asyncio
import contextlib
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from penstock.store.data.segments import Segments
from penstock.store.data.soon import Soon
from penstock.store.errors import StoreError
from penstock.store.service.calls import refs_of
from penstock.store.service.peers import MANY, bind, is_same_user
from penstock.store.service.wire import Wire

WITHOUT_WAITING = ("many",)
"""Calls that are answered at once, without a task of their own."""


@dataclass(frozen=True)
class Endpoint:
    """Where a store is served. `node`: Ray's id of the machine."""

    node: str
    path: str
    segments: tuple[str, str]
    """Directories of large batches: shared memory, disk."""


class Served(Protocol):
    async def left(self, client: str) -> None:
        """The client's connection has ended."""


class Server:
    """Lifecycle: `start` once; it goes with its event loop, or with `close`. `path`: where it listens."""

    def __init__(self, store: Served, segments: Segments, path: Path) -> None:
        self._store = store
        self._segments = segments
        self.path = path
        self.refused = 0
        """Connections of other users."""
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: PeerCheck(self), sock=bind(self.path), backlog=MANY)

    def accept(self) -> Wire:
        """A visitor's end of its connection."""
        return Connection(self._store, self._segments).wire

    def close(self) -> None:
        """Take no more connections; those that are open stay."""
        if self._server is not None:
            self._server.close()


class PeerCheck(asyncio.BaseProtocol):
    """What a connection meets first: nothing is read before it is known whose it is."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        if not is_same_user(transport.get_extra_info("socket")):
            self._server.refused += 1
            transport.abort()
            return
        wire = self._server.accept()
        transport.set_protocol(wire)
        wire.connection_made(transport)


class Connection:
    """One client's connection. Its first message is its name, the others are calls."""

    def __init__(self, store: Served, segments: Segments) -> None:
        self.wire = Wire(self._hear, self._gone)
        self._store = store
        self._segments = segments
        self._client: str | None = None
        self._waiting: set[asyncio.Task[None]] = set()

    def _hear(self, message: Any) -> None:
        if self._client is None:
            self._client = str(message)
            self._segments.entered(self._client, Soon(asyncio.get_running_loop(), self._tell))
            return
        number, method, arguments, ended = message
        if ended:
            self._segments.unuse(self._client, ended)
        if number is None:  # it says no more than that
            return
        answering = self._answer(self._client, number, method, arguments)
        if method in WITHOUT_WAITING:
            with contextlib.suppress(StopIteration):
                answering.send(None)  # runs to its end
            return
        task = asyncio.ensure_future(answering)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _answer(self, client: str, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        error: BaseException | None = None
        value = None
        try:
            if method.startswith("_"):
                raise StoreError(f"the store has no call {method!r}.")
            value = await getattr(self._store, method)(*arguments)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the caller hears it
            error = failure
        if not self.wire.is_open:
            return
        notice = self._segments.notice(client)
        try:
            self.wire.send((number, value, _loadable(error), notice))
        except Exception as failure:  # noqa: BLE001 - pickle raises what it likes; the caller hears it
            unsent = StoreError(f"the answer of {method!r} cannot be sent: {type(failure).__name__}: {failure}")
            self.wire.send((number, None, unsent, notice))
            return
        for placed in refs_of(value):  # the client will read it; until it says otherwise nobody writes there
            self._segments.use(client, placed.segment)

    def _tell(self) -> None:
        """No answer has taken it along: a client that calls nothing would hold on to what is gone."""
        notice = self._segments.notice(str(self._client))
        if notice is not None and self.wire.is_open:
            self.wire.send((None, None, None, notice))

    def _gone(self) -> None:
        for task in list(self._waiting):
            task.cancel()
        if self._client is not None:
            leaving = asyncio.ensure_future(self._store.left(self._client))
            self._waiting.add(leaving)
            leaving.add_done_callback(self._waiting.discard)


def _loadable(error: BaseException | None) -> BaseException | None:
    """The error if it arrives as itself, or a `StoreError` with its words: one that cannot be loaded would end the
    connection."""
    if error is None or isinstance(error, StoreError):
        return error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever its class does when it is made again
        return StoreError(f"{type(error).__name__}: {error}")
    return error
