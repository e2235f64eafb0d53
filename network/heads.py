"""The first head of a connection to an HTTP server: bounds of what a visitor costs before the server knows of it.

    connection ─▶ Heads, until a head is whole ─▶ the protocol of the server
                    └▶ hung up on: too slow, too long, or the oldest of too many

As with `listener.py`, visitors that say nothing keep nobody out: where too many are within their head, one of them is
cut off for the next.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.conf.errors import ConfigError
from penstock.network.listener import MAX_PENDING, PendingHandshakes

HEAD_S = 20.0
"""Seconds after which a connection whose head is not whole is hung up on."""
HEAD_BYTES = 2**16
BACKLOG = 64
"""Connections that wait to be accepted. asyncio accepts up to so many at once, and logs each one that fails."""
CONNECTIONS = 2**14
"""Most connections that a server keeps open."""
_END = b"\r\n\r\n"


def listen(host: str, ports: Sequence[int]) -> socket.socket:
    """Listen on the first of `ports` that is free. Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            problem = error
    tried = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else f"{ports[0]}"
    raise ConfigError(f"port {tried} of {host}: {problem.strerror}. Choose another: --port N, or --port 0 for any.")


class Heads:
    """The connections of one server whose first head is not whole. Lifecycle: `before` gives the factory to listen
    with; `close` hangs up on them."""

    def __init__(self, most: int = MAX_PENDING, head_s: float = HEAD_S, head_bytes: int = HEAD_BYTES) -> None:
        self.head_s, self.head_bytes = head_s, head_bytes
        self.pending = PendingHandshakes[_Head](most)
        self.open: set[_Head] = set()

    def before(self, make: Any) -> Any:
        """A factory of protocols that `make` makes, too, each once its first head has come."""
        return lambda *args, **named: _Head(self, partial(make, *args, **named))

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
        if (oldest := self._heads.pending.come(self, host[0])) is not None:
            oldest.hang_up()

    def data_received(self, data: bytes) -> None:
        start = max(0, len(self._data) - len(_END))
        self._data += data
        if self._data.find(_END, start) >= 0:
            self._forget()
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
