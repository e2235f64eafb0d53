"""Ports of this machine, and bounds of what a visitor costs before it has said anything.

`Listener` serves the run's processes on other machines. One thread accepts; each connection gets a thread, which checks
that the peer is of this run (the handshake of `connection.py`) and then calls the handler of the service that it asked
for. A peer that proves nothing gets no answer, and is counted.

`Heads` stands before an HTTP server:

    connection ─▶ Heads, until a head is whole ─▶ the protocol of the server
                    └▶ hung up on: too slow, too long, or the oldest of too many

Visitors that say nothing keep nobody out: where too many are within their handshake or head, one of them is cut off for
the next.
"""

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

from penstock.conf.errors import ConfigError
from penstock.network.connection import (
    FINISH_BYTES,
    HELLO,
    SILENCE_S,
    Address,
    NotAuthenticated,
    ServerHandshake,
    hang_up,
    prepare,
    read_exactly,
)

MANY = 1024
"""Connections that wait to be accepted: all machines of a run come at once."""
MAX_PENDING = 128
"""Connections that may be within the handshake at a time: a thread each."""
HANDSHAKE_S = 10.0
"""Seconds after which a connection that has not proved anything is hung up on."""
JOIN_S = 5.0
PAUSE_S = 0.02
"""A pause in seconds after a connection that could not be accepted."""

Handler = Callable[[socket.socket], None]
"""A function that serves an authenticated connection in its own thread, and may hand it over and return. The handler
owns the socket and closes it."""


Who = TypeVar("Who", bound=Hashable)
HEAD_S = 20.0
"""Seconds after which a connection whose head is not whole is hung up on."""
HEAD_BYTES = 2**16
BACKLOG = 64
"""Connections that wait to be accepted. asyncio accepts up to so many at once, and logs each one that fails."""
CONNECTIONS = 2**14
"""Most connections that a server keeps open."""
_END = b"\r\n\r\n"


class PendingPeers(Generic[Who]):
    """Connections that have not proved anything yet. Where there are too many, the oldest of the address that has most
    of them is to be cut off: an address that has fewer loses none to it. Pure."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._hosts: dict[Who, str] = {}
        """The host of each connection, the oldest first."""

    def add(self, who: Who, host: str) -> Who | None:
        """Add a connection. Returns the one that is to be cut off for it."""
        left = self._oldest_of_busiest() if len(self._hosts) >= self._most else None
        if left is not None:
            del self._hosts[left]
        self._hosts[who] = host
        return left

    def gone(self, who: Who) -> None:
        """Forget a connection that is authenticated, or has ended. Harmless for one that was cut off."""
        self._hosts.pop(who, None)

    def held(self) -> list[Who]:
        return list(self._hosts)

    def _oldest_of_busiest(self) -> Who:
        counts = Counter(self._hosts.values())
        largest = max(counts.values())
        return next(who for who, host in self._hosts.items() if counts[host] == largest)


class Listener:
    """A listening socket. Lifecycle: made with its handlers, `address` says where it is, `close` ends it with all
    connections that its handlers serve.

        with Listener("10.0.0.1", token, {ROWS: serve_rows}) as listener:
            tell_others(listener.address)
    """

    def __init__(
        self,
        host: str,
        token: bytes,
        handlers: Mapping[int, Handler],
        ports: range = range(1),
        takers: Collection[int] = (),
        silence_s: float = SILENCE_S,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """Listen on `host`, an address of this machine. `ports`: the first that is free is taken; 0: any. `takers`:
        services whose handlers take the connection with them, which `close` then leaves alone. Raises `OSError` if no
        port is free."""
        self._token, self._handlers, self._takers = token, dict(handlers), frozenset(takers)
        self._silence_s, self._handshake_s = silence_s, handshake_s
        self._socket = _bound(host, ports)
        self.address = Address(host, self._socket.getsockname()[1])
        self.refused = 0
        """Connections that proved nothing, and those that no thread could be had for."""
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._pending = PendingPeers[socket.socket](MAX_PENDING)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections and end those that are open. A second time changes nothing."""
        with self._lock:
            self._closed = True
            threads = list(self._open.items())
        hang_up(self._socket)
        for connected, _ in threads:
            hang_up(connected)
        for thread in [self._thread, *(thread for _, thread in threads)]:
            if thread is not threading.current_thread():
                thread.join(JOIN_S)
        self._socket.close()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connected, (host, *_) = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(PAUSE_S)  # the visitor was gone before it was let in, or there are too many open files
                continue
            thread = threading.Thread(target=self._serve, args=(connected,), name="connection", daemon=True)
            with self._lock:
                if self._closed:
                    connected.close()
                    return
                try:
                    thread.start()  # under the lock: `close` waits for no thread that has not begun
                except RuntimeError:  # there are too many threads; the next visitor may be let in again
                    self.refused += 1
                    connected.close()
                    continue
                self._open[connected] = thread
                if (left := self._pending.add(connected, host)) is not None:
                    hang_up(left)  # its own thread hears of that, counts it and closes it

    def _serve(self, connected: socket.socket) -> None:
        try:
            try:
                service = self._welcome(connected)
            finally:
                with self._lock:
                    self._pending.gone(connected)
            if service in self._takers:
                self._forget(connected)  # before another thread has it
            if service is not None:
                self._handlers[service](connected)
        finally:
            self._forget(connected)

    def _forget(self, connected: socket.socket) -> None:
        with self._lock:
            self._open.pop(connected, None)

    def _welcome(self, connected: socket.socket) -> int | None:
        """The service that a peer asks for; None if it has proved nothing. A peer that says little, slowly, is cut
        off."""
        watch = threading.Timer(self._handshake_s, hang_up, (connected,))
        watch.daemon = True
        watch.start()
        try:
            connected.settimeout(self._handshake_s)
            handshake = ServerHandshake(self._token)
            connected.sendall(handshake.reply(read_exactly(connected, HELLO.size)))
            handshake.finish(read_exactly(connected, FINISH_BYTES))
            if handshake.service not in self._handlers:
                raise NotAuthenticated(f"nobody serves {handshake.service} here.")
        except OSError:  # among them NotAuthenticated and TimeoutError
            self._refuse(connected)
            return None
        finally:
            watch.cancel()
        with suppress(OSError):
            prepare(connected, self._silence_s)
        return handshake.service

    def _refuse(self, connected: socket.socket) -> None:
        with self._lock:
            self.refused += 1
        connected.close()


def _bound(host: str, ports: Sequence[int]) -> socket.socket:
    """A socket that listens on the first of `ports` that is free. Raises `OSError`."""
    problem = OSError(f"no port to listen on at {host}: the range is empty.")
    for port in ports:
        try:
            return socket.create_server(
                (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=MANY
            )
        except OSError as error:
            problem = error
    raise problem


def listen(host: str, ports: Sequence[int]) -> socket.socket:
    """Listen on the first of `ports` that is free. Raises `ConfigError`."""
    try:
        return _bound(host, ports)
    except OSError as error:
        tried = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else f"{ports[0]}"
        raise ConfigError(
            f"port {tried} of {host}: {error.strerror}. Choose another: --port N, or --port 0 for any."
        ) from None


class Heads:
    """The connections of one server whose first head is not whole. Lifecycle: `before` gives the factory to listen
    with; `close` hangs up on them."""

    def __init__(
        self, most: int = MAX_PENDING, head_s: float = HEAD_S, head_bytes: int = HEAD_BYTES,
        most_open: int = 0, holder: Callable[[bytes], str] = lambda head: "",
    ) -> None:  # fmt: skip
        """`most_open`: bound on connections with a whole head; 0: the server's own. `holder`: whose one is, by its
        head."""
        self.head_s, self.head_bytes, self._most_open, self._holder = head_s, head_bytes, most_open, holder
        self.pending = PendingPeers[_Head](most)
        self.open: set[_Head] = set()
        self._whole = PendingPeers[Any](most_open)

    def before(self, make: Any) -> Any:
        """A factory of protocols that `make` makes, too, each once its first head has come."""
        return lambda *args, **named: _Head(self, partial(make, *args, **named))

    def admit(self, transport: Any, head: bytes) -> None:
        """Count a connection whose head is whole, in the place of another one where there are too many."""
        if self._most_open:
            for ended in [one for one in self._whole.held() if one.is_closing()]:
                self._whole.gone(ended)
            if (oldest := self._whole.add(transport, self._holder(head))) is not None:
                oldest.abort()

    def close(self) -> None:
        for head in list(self.open):
            head.hang_up()


class _Head(asyncio.Protocol):
    def __init__(self, heads: Heads, make: Callable[[], asyncio.Protocol]) -> None:
        self._heads, self._make, self._data = heads, make, bytearray()

    def connection_made(self, transport: Any) -> None:  # uvloop's are no asyncio.Transport
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(self._heads.head_s, self.hang_up)
        self._heads.open.add(self)
        host = transport.get_extra_info("peername") or [""]
        if (oldest := self._heads.pending.add(self, host[0])) is not None:
            oldest.hang_up()

    def data_received(self, data: bytes) -> None:
        start = max(0, len(self._data) - len(_END))
        self._data += data
        if self._data.find(_END, start) >= 0:
            self._forget()
            self._heads.admit(self._transport, bytes(self._data))
            protocol = self._make()
            self._transport.set_protocol(protocol)
            protocol.connection_made(self._transport)
            protocol.data_received(bytes(self._data))
        elif len(self._data) > self._heads.head_bytes:
            self.hang_up()

    def connection_lost(self, error: Exception | None) -> None:
        self._forget()

    def hang_up(self) -> None:
        self._forget()
        self._transport.abort()

    def _forget(self) -> None:
        self._timer.cancel()
        self._heads.pending.gone(self)
        self._heads.open.discard(self)
