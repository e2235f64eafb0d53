"""A connection of the store in an event loop: whole messages out of the bytes that come, and into them.

The frames are those of `network/connection.py`, whose other end may be one of these or a thread; asyncio's own streams
would copy twice what they receive. `data/codec.py` encodes and decodes the messages.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pyarrow as pa

from penstock.network.connection import HEADER, MAX_BODY
from penstock.store.data.codec import NOTHING, Codec, Malformed, joined

SCRATCH = 1 << 16
"""Size of the buffer for small messages, in bytes."""
MAX_BYTES = 2**36
"""The largest size of all buffers of a message, in bytes; one that announces more is none of ours. Memory is taken up
as they come."""
_ALIGN = 64
_LOG = logging.getLogger("penstock")

OnMessage = Callable[[int, memoryview, pa.Buffer], None]
"""A function that takes kind, body, area, as `Codec.decode` wants them. The body is there during the call only."""


class Wire(asyncio.BufferedProtocol):
    """One end of a connection. Messages are handed to `on_message` in order, the end of the connection to `on_lost`,
    with the error if it did not just close.

    A message that does not fit the scratch buffer is received into memory of its own, where its arrays stay. A
    malformed message ends the connection.
    """

    def __init__(self, on_message: OnMessage, on_lost: Callable[[Exception | None], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self.codec = Codec()
        self._transport: asyncio.WriteTransport | None = None
        self._scratch = bytearray(SCRATCH)
        self._start = self._end = 0
        """Start and end of what lies in the scratch buffer and is not taken yet."""
        self._large: _Large | None = None
        """The message that is being received, if it is a large one."""
        self._failure: Exception | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def send(self, kind: int, message: Any) -> None:
        """Hand a message to the kernel, or keep what it does not take yet. Raises `ConnectionError` when closed, and
        `NotPlainData`, before anything is sent."""
        if self._transport is None:
            raise ConnectionError("the connection is closed.")
        body, pieces, nbytes = self.codec.encode(message)
        for piece in joined(HEADER.pack(kind, len(body), nbytes) + body, pieces):
            self._transport.write(piece)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once: what the kernel has not taken yet is not sent."""
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._scratch, self._large = bytearray(), None  # whatever still refers to this end
        self._on_lost(self._failure or exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large.unfilled
        return memoryview(self._scratch)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._came(nbytes)
        except (Malformed, MemoryError) as error:
            _LOG.warning("a connection of the store is ended: %s", error)
            self._failure = error
            self._start = self._end = 0
            self._large = None
            if self._transport is not None:
                self._transport.abort()

    def _came(self, nbytes: int) -> None:
        if self._large is not None:
            if self._large.came(nbytes):
                large, self._large = self._large, None
                self._on_message(large.kind, large.body, large.area)
            return
        self._end += nbytes
        scratch, length = memoryview(self._scratch), 0
        while self._end - self._start >= HEADER.size:
            kind, num_body, num_area = HEADER.unpack_from(scratch, self._start)
            if num_body > MAX_BODY or num_area > MAX_BYTES:
                raise Malformed(f"a message of {num_body} and {num_area} bytes: the other end speaks something else.")
            length = HEADER.size + num_body + num_area
            body = self._start + HEADER.size
            area, end = body + num_body, body + num_body + num_area
            if end > self._end:
                break
            values = pa.py_buffer(bytes(scratch[area:end])) if num_area else NOTHING  # its arrays stay
            self._start, length = end, 0
            self._on_message(kind, scratch[body:area], values)
        self._make_room(length)

    def _make_room(self, length: int) -> None:
        """Make room for the rest of a message of `length` bytes, 0 if that is unknown."""
        rest = self._scratch[self._start : self._end]
        if length > SCRATCH:
            self._large = _Large(rest)
            rest = bytearray()
        self._scratch[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


class _Large:
    """A message that is being received."""

    def __init__(self, begun: bytearray) -> None:
        """Begin a message. `begun`: its first bytes, the header among them."""
        self.kind, num_body, num_area = HEADER.unpack_from(begun)
        self._skipped = -(num_body + HEADER.size) % _ALIGN  # so that the area is aligned
        self._memory = np.empty(self._skipped + HEADER.size + num_body + num_area, dtype=np.uint8)
        self._area_at = self._skipped + HEADER.size + num_body
        self._view = self._memory.data
        self._filled = self._skipped + len(begun)
        self._view[self._skipped : self._filled] = begun

    @property
    def unfilled(self) -> memoryview:
        return self._view[self._filled :]

    def came(self, nbytes: int) -> bool:
        """Note bytes that came. Returns whether the message is all there."""
        self._filled += nbytes
        return not len(self.unfilled)

    @property
    def body(self) -> memoryview:
        return self._view[self._skipped + HEADER.size : self._area_at]

    @property
    def area(self) -> pa.Buffer:
        return pa.py_buffer(self._memory).slice(self._area_at)
