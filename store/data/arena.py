"""The segments that one process writes: files in shared memory whose pages are used again and again.

    slot = arena.reserve(nbytes)      a file that came back, or None
    batch = encode(…, slot)           large columns are joined right where they are to lie
    placed = arena.place(batch, slot) what is elsewhere yet is copied there; `placed` goes into the call
    arena.recycled(names)             the store has done with these

A page that is touched for the first time costs as much as copying it several times. So a file that the store has done
with goes back to its writer, which writes through a mapping of it. Before any has come back, large batches take files
whose pages were touched at the start of the store (`preallocate`): the writer that renames one has it. A new file is
written by the kernel, which touches pages cheaper than a mapping does.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import BinaryIO

import numpy as np
import psutil
import pyarrow as pa

from penstock.store.data.layout import ByteRange, Placed, aligned, buffers_of, kind_of
from penstock.store.data.mappings import map_file

STEP = 1 << 16
"""The smallest step by which a file grows, in bytes."""
OVERHEAD_BYTES = 1 << 14
"""Bytes of a batch beside its large columns: offsets, scalars."""
SPARE = "spare-"
"""The prefix of the names of preallocated files."""
SPARE_BYTES = 1 << 23
"""Size of such a file, in bytes. A batch of less than an eighth of it has few pages to touch, and takes none."""
SPARES = 16
"""The most preallocated files. They need to last until the first batches have come back."""
SHARE = 8
"""The part that is preallocated at most, of a store's budget and of the memory that is free: 1 / `SHARE`."""


class Slot:
    """A file that came back, mapped, and how much of it is taken by the batch that is being written."""

    def __init__(self, path: str, give_back: "Callable[[Slot], None]") -> None:
        self.path, self.name = path, os.path.basename(path)
        self.used = 0
        self.memory = np.zeros(0, dtype=np.uint8)
        self.address = 0
        self._give_back = give_back

    @property
    def size(self) -> int:
        """Bytes that are mapped."""
        return len(self.memory)

    def map(self, nbytes: int) -> None:
        """Map at least so many bytes from now on. Raises `OSError` if there is no room for them."""
        if nbytes <= self.size:
            return
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Without it a full file system would kill the process at its first touch of the page.
            os.posix_fallocate(descriptor, 0, nbytes)
            self.memory = map_file(descriptor, nbytes, is_written=True)
        finally:
            os.close(descriptor)
        self.address = self.memory.ctypes.data

    def take(self, nbytes: int) -> np.ndarray | None:
        """The next free bytes, uint8; None if there are not enough."""
        start = self.used
        if start + nbytes > self.size:
            return None
        self.used = start + aligned(nbytes)
        return self.memory[start : start + nbytes]

    def where(self, buffer: pa.Buffer) -> int | None:
        """Offset of a buffer that lies here."""
        offset = buffer.address - self.address
        return offset if offset >= 0 and offset + buffer.size <= self.size and buffer.size else None

    def give_back(self) -> None:
        """Give the file back: nothing of it was sent, or no process reads it any more."""
        self.used = 0
        self._give_back(self)


class Arena:
    """The files of one writer. `places`: directories to write into, the next if one is full. Not thread-safe."""

    def __init__(self, places: Sequence[str], writer: str, node: str = "") -> None:
        """Write into `places`, which are of `node`, as segments say it."""
        self._places = places
        self._spares: list[str] | None = None
        """Names of spare files that other writers may have taken meanwhile; None: not looked for yet."""
        self._writer, self._node = writer, node
        self._numbers, self._serials = itertools.count(), itertools.count()
        self._free: list[Slot] = []
        self._out: dict[str, Slot] = {}
        """Slots that are with the store, by name."""

    def reserve(self, nbytes: int) -> Slot | None:
        """A slot with room for so many bytes: the smallest that has it, a spare one, or the largest, grown. None if
        there is none, or no room to grow."""
        fitting = [slot for slot in self._free if slot.size >= nbytes]
        slot = min(fitting, key=_size) if fitting else self._spare(nbytes) or max(self._free, key=_size, default=None)
        if slot is None:
            return None
        try:
            slot.map(_rounded(nbytes))
        except OSError:
            return None
        self._free.remove(slot)
        return slot

    def place(self, batch: pa.RecordBatch, slot: Slot | None = None) -> Placed:
        """Copy into the slot what does not lie there yet, or all of it into a new file. The file is the
        store's until `recycled` or `forget`. Raises `OSError` if no place has room; then the slot is the caller's as
        before."""
        arrays = [buffers_of(array) for array in batch.columns]
        missing = sum(aligned(one.size) for some in arrays for one in some if slot is None or slot.where(one) is None)
        if slot is None or slot.used + missing > slot.size:
            too_small = slot
            slot, spans = self._new_file(arrays)
            nbytes = sum(aligned(length) for _, length in spans)
            if too_small is not None:
                too_small.give_back()  # now that what lies there has been copied
        else:
            spans, nbytes = [_put(slot, one) for some in arrays for one in some], slot.used
        left = iter(spans)
        columns = tuple(
            (name, kind_of(array.type), tuple(next(left) for _ in some))
            for name, array, some in zip(batch.schema.names, batch.columns, arrays, strict=True)
        )
        self._out[slot.name] = slot
        return Placed(slot.name, next(self._serials), batch.num_rows, columns, nbytes, self._node)

    def recycled(self, names: Iterable[str]) -> None:
        """Take back files that no process reads any more."""
        for name in names:
            if (slot := self._out.pop(name, None)) is not None:
                slot.give_back()

    def forget(self, names: Iterable[str]) -> None:
        """Forget files that the store has removed or moved. Their mappings go with the last array that lies in them."""
        for name in names:
            self._out.pop(name, None)

    def _spare(self, nbytes: int) -> Slot | None:
        """A preallocated file for so large a batch; the first writer that renames it has it."""
        if not SPARE_BYTES // 8 <= nbytes <= SPARE_BYTES:
            return None
        if self._spares is None:
            self._spares = [name for name in os.listdir(self._places[0]) if name.startswith(SPARE)]
        while self._spares:
            name = f"{self._writer}-{next(self._numbers)}"
            path = os.path.join(self._places[0], name)
            with suppress(FileNotFoundError):
                os.rename(os.path.join(self._places[0], self._spares.pop()), path)
                slot = Slot(path, self._free.append)
                self._free.append(slot)
                return slot
        return None

    def _new_file(self, arrays: Sequence[Sequence[pa.Buffer]]) -> tuple[Slot, list[ByteRange]]:
        """Write all buffers one after the other, in the first place that has room."""
        name = f"{self._writer}-{next(self._numbers)}"
        for place in self._places:
            path = os.path.join(place, name)
            try:
                return Slot(path, self._free.append), _write_new(path, arrays)
            except OSError:
                if place == self._places[-1]:
                    raise
        raise OSError(f"no place to write {name} to")


def preallocate(place: str, max_bytes: int) -> None:
    """Make spare files for writers that share so many bytes, and touch their pages now. As many as there is memory for:
    no writer needs them to go on."""
    with suppress(OSError):  # a full directory, or the files of a store before this one, which serve as well
        disk, memory = os.statvfs(place), psutil.virtual_memory()
        for number in range(num_spares(max_bytes, min(disk.f_bavail * disk.f_frsize, memory.available))):
            _touch_new(os.path.join(place, f"{SPARE}{number}"), SPARE_BYTES)


def num_spares(max_bytes: int, free_bytes: int) -> int:
    """Files to preallocate where a store may use `max_bytes` of shared memory, and so many are free."""
    return min(SPARES, min(max_bytes, free_bytes) // SHARE // SPARE_BYTES)


def _touch_new(path: str, nbytes: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _write_new(path: str, arrays: Sequence[Sequence[pa.Buffer]]) -> list[ByteRange]:
    """Write a new file. A name that exists is another's, and stays. Raises `OSError`; then nothing is left behind."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            return [_write(file, one) for some in arrays for one in some]
    except OSError:
        with suppress(OSError):
            os.unlink(path)
        raise


def _write(file: BinaryIO, buffer: pa.Buffer) -> ByteRange:
    offset = file.tell()
    file.write(buffer)
    file.write(bytes(aligned(buffer.size) - buffer.size))
    return offset, buffer.size


def _put(slot: Slot, buffer: pa.Buffer) -> ByteRange:
    offset = slot.where(buffer)
    if offset is None:
        offset = slot.used
        memory = slot.take(buffer.size)
        assert memory is not None
        memory[:] = np.frombuffer(buffer, dtype=np.uint8)
    return offset, buffer.size


def _size(slot: Slot) -> int:
    return slot.size


def _rounded(nbytes: int) -> int:
    """Round up, by up to a quarter, so that batches of about the same size fit the same files."""
    step = max(STEP, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step
