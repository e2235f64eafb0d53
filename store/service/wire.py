"""Messages on a socket: pickled, with large buffers beside the pickle so that nothing copies them into it.

    number of buffers, bytes of the pickle │ bytes of each buffer │ pickle │ buffer │ buffer …

Both ends are processes of one run and one user, on one machine. Used by `server.py`, `client/links.py` and
`client/pulse.py`. Ours, since asyncio's streams copy twice what they receive, `multiprocessing.connection` blocks the
event loop while a message comes, and an actor call costs several times as much.
"""

import asyncio
import pickle
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

HEAD = struct.Struct("<IQ")
BESIDE = 1 << 14
"""Buffers of so many bytes travel beside the pickle; smaller ones are cheaper within."""
SCRATCH = 1 << 16
"""Bytes of small messages that are read at a time."""
MOST_BESIDE = 1024
"""Buffers beside one pickle at most, the others lie within: a message's head and sizes must fit the scratch buffer."""


def pieces(value: Any, beside: int = BESIDE) -> "list[bytes | memoryview]":
    """What a message consists of, in order. Raises what pickle raises."""
    buffers: list[memoryview] = []

    def within(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < beside or len(buffers) == MOST_BESIDE:
            return True
        buffers.append(raw)
        return False

    body = pickle.dumps(value, protocol=5, buffer_callback=within)
    sizes = struct.pack(f"<{len(buffers)}Q", *(buffer.nbytes for buffer in buffers))
    return [HEAD.pack(len(buffers), len(body)) + sizes + body, *buffers]


def receive(read: Callable[[int], bytes]) -> Any:
    """One message, for a thread that waits. `read(n)`: the next n bytes."""
    count, body = HEAD.unpack(read(HEAD.size))
    sizes = struct.unpack(f"<{count}Q", read(8 * count))
    pickled = read(body)
    return pickle.loads(pickled, buffers=[read(size) for size in sizes])


class Wire(asyncio.BufferedProtocol):
    """One end of a connection. Messages are handed to `on_message` in order, the end of the other side to `on_lost`.

    A message that does not fit the scratch buffer is received into a buffer of its own, where its arrays stay.
    """

    def __init__(self, on_message: Callable[[Any], None], on_lost: Callable[[], None], beside: int = BESIDE) -> None:
        """`beside`: bytes from which a buffer travels beside the pickle."""
        self._on_message, self._on_lost, self._beside = on_message, on_lost, beside
        self._transport: asyncio.WriteTransport | None = None
        self._scratch = bytearray(SCRATCH)
        self._start = self._end = 0
        """What lies in the scratch buffer and is not taken yet."""
        self._large: bytearray | None = None
        """The message that is being received, if it is a large one, and how much of it is there."""
        self._filled = 0

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def send(self, value: Any) -> None:
        """Hand a message to the kernel, or keep what it does not take yet. Raises `ConnectionError` when closed, and
        what pickle raises, before anything is sent."""
        if self._transport is None:
            raise ConnectionError("the connection is closed.")
        for piece in pieces(value, self._beside):
            self._transport.write(piece)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return memoryview(self._large)[self._filled :]
        return memoryview(self._scratch)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._large is not None:
            self._filled += nbytes
            if self._filled == len(self._large):
                message, self._large = self._large, None
                self._take(memoryview(message))
            return
        self._end += nbytes
        while (length := self._next_length()) and self._start + length <= self._end:
            message = self._scratch[self._start : self._start + length]
            self._start += length
            self._take(memoryview(message))
        self._make_room(length)

    def _next_length(self) -> int:
        """Bytes of the first message in the scratch buffer; 0 if that cannot be told yet."""
        there = self._end - self._start
        if there < HEAD.size:
            return 0
        count, body = HEAD.unpack_from(self._scratch, self._start)
        if there < HEAD.size + 8 * count:
            return 0
        sizes = struct.unpack_from(f"<{count}Q", self._scratch, self._start + HEAD.size)
        return int(HEAD.size + 8 * count + body + sum(sizes))

    def _make_room(self, length: int) -> None:
        """For the rest of a message of `length` bytes, 0 if that is unknown."""
        rest = self._scratch[self._start : self._end]
        if length > SCRATCH:
            self._large = bytearray(length)
            self._large[: len(rest)] = rest
            self._filled = len(rest)
            rest = bytearray()
        self._scratch[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def _take(self, message: memoryview) -> None:
        count, body = HEAD.unpack_from(message)
        sizes = struct.unpack_from(f"<{count}Q", message, HEAD.size)
        ends = [HEAD.size + 8 * count + int(body)]
        for size in sizes:
            ends.append(ends[-1] + size)
        buffers = [message[start:end] for start, end in pairwise(ends)]
        self._on_message(pickle.loads(message[ends[0] - int(body) : ends[0]], buffers=buffers))
