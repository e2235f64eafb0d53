"""The segments that one process writes: files in shared memory whose pages are used again and again.

    slot = arena.reserve(nbytes)      a file that came back, or a new one
    batch = encode(…, slot)           large columns are joined right where they are to lie
    placed = arena.place(batch, slot) what is elsewhere yet is copied there; `placed` goes into the call
    arena.recycled(names)             the store has done with these

A page that is touched for the first time costs as much as copying it twice, so a file that the store has done with goes
back to its writer. Used by `transport.py` for clients, and by `segments.py` for what reaches the store by value.
"""

import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa

from penstock.store.layout import Placed, Span, aligned, buffers_of

SMALLEST = 1 << 16
"""Bytes of a file at least."""


class Slot:
    """One file, mapped, and how much of it is taken by the batch that is being written."""

    def __init__(self, path: str, nbytes: int, give_back: "Callable[[Slot], None]") -> None:
        """A new file. Raises `OSError` if there is no room for it."""
        self._give_back = give_back
        self.name = os.path.basename(path)
        self.used = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self._map(nbytes)
        except OSError:
            self.close()
            os.unlink(path)
            raise

    def __len__(self) -> int:
        return len(self.memory)

    def grow(self, nbytes: int) -> None:
        """At least so large from now on. Raises `OSError`."""
        self._map(nbytes)

    def take(self, nbytes: int) -> np.ndarray | None:
        """The next free bytes, uint8; None if there are not enough."""
        start = self.used
        if start + nbytes > len(self):
            return None
        self.used = start + aligned(nbytes)
        return self.memory[start : start + nbytes]

    def where(self, buffer: pa.Buffer) -> int | None:
        """Offset of a buffer that lies here."""
        offset = buffer.address - self.address
        return offset if offset >= 0 and offset + buffer.size <= len(self) and buffer.size else None

    def give_back(self) -> None:
        """Nothing of it was sent."""
        self.used = 0
        self._give_back(self)

    def close(self) -> None:
        """The mapping goes with its last array."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _map(self, nbytes: int) -> None:
        # Without it a full file system would kill the process at its first touch of the page.
        os.posix_fallocate(self._descriptor, 0, nbytes)
        self.memory = np.frombuffer(mmap.mmap(self._descriptor, nbytes), dtype=np.uint8)
        self.address = self.memory.ctypes.data


class Arena:
    """The slots of one writer. `places`: directories to write into, the next if one is full. Not thread-safe."""

    def __init__(self, places: Sequence[str], writer: str) -> None:
        self._places = places
        self._writer = writer
        self._numbers, self._serials = itertools.count(), itertools.count()
        self._free: list[Slot] = []
        self._out: dict[str, Slot] = {}
        """With the store."""

    def reserve(self, nbytes: int) -> Slot:
        """A slot with room for about so many bytes. Raises `OSError` if no place has it."""
        fitting = [slot for slot in self._free if len(slot) >= nbytes]
        if fitting:
            slot = min(fitting, key=len)
            self._free.remove(slot)
            return slot
        size = _rounded(nbytes)
        if self._free:
            slot = self._free.pop()
            try:
                slot.grow(size)
            except OSError:
                self._free.append(slot)
            else:
                return slot
        return self._new(size)

    def place(self, batch: pa.RecordBatch, slot: Slot | None = None) -> Placed:
        """Copy what does not lie in the slot yet; whose it is from now on, `recycled` and `gone` say. Raises
        `OSError`."""
        arrays = [buffers_of(array) for array in batch.columns]
        missing = sum(aligned(one.size) for some in arrays for one in some if slot is None or slot.where(one) is None)
        if slot is None or slot.used + missing > len(slot):
            if slot is not None:
                slot.give_back()
            slot = self.reserve(sum(aligned(one.size) for some in arrays for one in some))
        columns = tuple(
            (name, str(array.type), tuple(_put(slot, one) for one in some))
            for name, array, some in zip(batch.schema.names, batch.columns, arrays, strict=True)
        )
        self._out[slot.name] = slot
        return Placed(slot.name, next(self._serials), batch.num_rows, columns, slot.used)

    def recycled(self, names: Iterable[str]) -> None:
        """Nobody reads these any more."""
        for name in names:
            if slot := self._out.pop(name, None):
                slot.give_back()

    def gone(self, names: Iterable[str]) -> None:
        """The store has removed or moved these."""
        for name in names:
            if slot := self._out.pop(name, None):
                slot.close()

    def close(self) -> None:
        for slot in (*self._free, *self._out.values()):
            slot.close()

    def _new(self, nbytes: int) -> Slot:
        name = f"{self._writer}-{next(self._numbers)}"
        for place in self._places[:-1]:
            try:
                return Slot(os.path.join(place, name), nbytes, self._free.append)
            except OSError:
                continue
        os.makedirs(self._places[-1], exist_ok=True)
        return Slot(os.path.join(self._places[-1], name), nbytes, self._free.append)


def _put(slot: Slot, buffer: pa.Buffer) -> Span:
    offset = slot.where(buffer)
    if offset is None:
        offset = slot.used
        room = slot.take(buffer.size)
        assert room is not None
        room[:] = np.frombuffer(buffer, dtype=np.uint8)
    return offset, buffer.size


def _rounded(nbytes: int) -> int:
    """Up to a quarter more, so that batches of about the same size fit the same files."""
    step = max(SMALLEST, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step
