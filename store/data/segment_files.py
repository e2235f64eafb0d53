"""Files of segments in a process: written in shared memory, mapped and read without a copy, moved to disk in a thread.

    slot = arena.reserve(nbytes)       a file that was given back, or None
    batch = encode(…, slot)            large columns are joined right where they are to lie
    placed = arena.place(batch, slot)  copies there what is elsewhere; `placed` goes into the call
    batch = mappings.read(placed)      in another process: views of its mapping of the file
    arena.take_back(names)             the store has freed these

A page that is touched for the first time costs as much as copying it several times. So a file that the store has freed
goes back to its writer, which writes through a mapping of it. Before any file has been given back, large batches take
files whose pages were touched at the start of the store (`preallocate`): the writer that renames one has it. A new file
is written by the kernel, which touches pages cheaper than a mapping does.

A file is written anew after its last reader, so the store counts the clients that it has named it to (`segments.py`);
each `Reading` ends when the last array of what was read is collected, wherever that is, and a `DebouncedCall` reports
it. No file stays open: thousands of segments are mapped at a time, and a process may have only a thousand files open.
Python's own `mmap` keeps a copy of the descriptor for as long as the mapping exists; from Python 3.13 on it need not
(`trackfd`).
"""

import asyncio
import contextlib
import ctypes
import itertools
import mmap
import os
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import psutil
import pyarrow as pa

from penstock.store.data.codec import ByteRange, SegmentRef, aligned, buffers_of, kind_of, read
from penstock.store.data.segment_book import writer_of
from penstock.store.errors import RowsLost, StoreClosed, StoreError

T = TypeVar("T")
STEP = 1 << 16
"""The smallest step by which a file grows, in bytes."""
OVERHEAD_BYTES = 1 << 14
"""Bytes of a batch beside its large columns: offsets, scalars."""
SPARE = "spare-"
"""The prefix of the names of preallocated files."""
SPARE_BYTES = 1 << 23
"""Size of such a file, in bytes. A batch of less than an eighth of it has few pages to touch, and takes none."""
SPARES = 16
"""The most preallocated files. They are needed until the first files are given back."""
SHARE = 8
"""The part that is preallocated at most, of a store's budget and of the memory that is free: 1 / `SHARE`."""
DEBOUNCE_S = 0.05
"""Delay in seconds. What ends before the next call is reported by that call; a lease's arrays end together."""
CLOSED = "the store is closed: it writes and moves no files any more."
COPIED_AT_ONCE = 1 << 20
"""Bytes copied at once."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class SegmentSlot:
    """A file that was given back, mapped, and how much of it the batch that is being written takes."""

    def __init__(self, path: str, give_back: "Callable[[SegmentSlot], None]") -> None:
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
        self._free: list[SegmentSlot] = []
        self._out: dict[str, SegmentSlot] = {}
        """Slots that are with the store, by name."""

    def reserve(self, nbytes: int) -> SegmentSlot | None:
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

    def place(self, batch: pa.RecordBatch, slot: SegmentSlot | None = None) -> SegmentRef:
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
        return SegmentRef(slot.name, next(self._serials), batch.num_rows, columns, nbytes, self._node)

    def take_back(self, names: Iterable[str]) -> None:
        """Take back files that no process reads any more."""
        for name in names:
            if (slot := self._out.pop(name, None)) is not None:
                slot.give_back()

    def forget(self, names: Iterable[str]) -> None:
        """Forget files that the store has removed or moved. Their mappings go with the last array that lies in them."""
        for name in names:
            self._out.pop(name, None)

    def _spare(self, nbytes: int) -> SegmentSlot | None:
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
                slot = SegmentSlot(path, self._free.append)
                self._free.append(slot)
                return slot
        return None

    def _new_file(self, arrays: Sequence[Sequence[pa.Buffer]]) -> tuple[SegmentSlot, list[ByteRange]]:
        """Write all buffers one after the other, in the first place that has room."""
        name = f"{self._writer}-{next(self._numbers)}"
        for place in self._places:
            path = os.path.join(place, name)
            try:
                return SegmentSlot(path, self._free.append), _write_new(path, arrays)
            except OSError:
                if place == self._places[-1]:
                    raise
        raise OSError(f"no place to write {name} to")


def preallocate(place: str, max_bytes: int) -> None:
    """Make spare files for writers that share so many bytes, and touch their pages now. As many as there is memory for:
    no writer depends on them."""
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


def _put(slot: SegmentSlot, buffer: pa.Buffer) -> ByteRange:
    offset = slot.where(buffer)
    if offset is None:
        offset = slot.used
        memory = slot.take(buffer.size)
        assert memory is not None
        memory[:] = np.frombuffer(buffer, dtype=np.uint8)
    return offset, buffer.size


def _size(slot: SegmentSlot) -> int:
    return slot.size


def _rounded(nbytes: int) -> int:
    """Round up, by up to a quarter, so that batches of about the same size fit the same files."""
    step = max(STEP, 1 << max(0, nbytes.bit_length() - 3))
    return -(-nbytes // step) * step


class SegmentMappings:
    """Files by name. `places`: directories to look for them in. `tell`: called when there is something for `ended` to
    return, by the thread that ends it."""

    def __init__(self, places: Sequence[str], tell: Callable[[], None]) -> None:
        self._places, self._tell = places, tell
        self._files: dict[str, np.ndarray] = {}
        self._ended: deque[str] = deque()

    def read(self, placed: SegmentRef) -> pa.RecordBatch:
        """Read a batch as views of the file. Ends one use. Raises `StoreError` if it is in none of the places."""
        use = Reading(placed.segment, self._ended, self._tell)  # first: it ends whatever fails from here on
        memory = self._files.get(placed.segment)
        if memory is None or len(memory) < placed.nbytes:
            memory = self._files[placed.segment] = self._map(placed.segment)
        use.memory = memory
        address = memory.ctypes.data
        return read(
            placed.num_rows, placed.columns, lambda offset, length: pa.foreign_buffer(address + offset, length, use)
        )

    def read_all(self, refs: Sequence[SegmentRef]) -> list[pa.RecordBatch]:
        """Read batches. If one cannot be read, no use is left of any."""
        batches: list[pa.RecordBatch] = []
        try:
            for placed in refs:
                batches.append(self.read(placed))
        finally:
            self.skip(placed.segment for placed in refs[len(batches) + 1 :])  # after one that cannot be read
        return batches

    def skip(self, names: Iterable[str]) -> None:
        """End one use of each file, which was never read."""
        for name in names:
            self._ended.append(name)
            self._tell()

    def ended(self) -> list[str]:
        """Return the names of the uses that have ended since the last call, one for each."""
        names = []
        while self._ended:
            names.append(self._ended.popleft())
        return names

    def forget(self, names: Iterable[str]) -> None:
        """Forget files that were removed: their pages go with the last array that lies in them."""
        for name in names:
            self._files.pop(name, None)

    def close(self) -> None:
        self._files.clear()

    def _map(self, name: str) -> np.ndarray:
        try:
            return map_segment(self._places, name)
        except FileNotFoundError as error:
            raise RowsLost(str(error)) from None
        except OSError as error:
            raise StoreError(f"segment {name} of {', '.join(self._places)} cannot be mapped: {error}.") from None


class Reading:
    """The object that every buffer of one reading holds on to; its end is noted in `ended` and reported."""

    __slots__ = ("_ended", "_name", "_tell", "memory")

    def __init__(self, name: str, ended: "deque[str]", tell: Callable[[], None]) -> None:
        self._name, self._ended, self._tell = name, ended, tell
        self.memory: np.ndarray | None = None

    def __del__(self) -> None:  # may run in any thread, and while any other line runs: `tell` must bear that
        self._ended.append(self._name)
        self._tell()


class DebouncedCall:
    """A callback for the event loop that any thread and any finalizer may ask for: `call = DebouncedCall(loop,
    callback)`, then `call()` whenever there is something to do. It runs once for all that ask meanwhile; nothing after
    the loop has closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop, self._callback = loop, callback
        self._is_due = False

    def __call__(self) -> None:
        if self._is_due:
            return
        self._is_due = True
        with contextlib.suppress(RuntimeError):  # the loop has closed
            # What asyncio itself calls from finalizers: it takes no lock.
            self._loop.call_soon_threadsafe(self._loop.call_later, DEBOUNCE_S, self._run)

    def _run(self) -> None:
        self._is_due = False  # first: what ends from now on is due again
        self._callback()


def map_segment(places: Sequence[str], name: str) -> np.ndarray:
    """Map a file, uint8, of the first of the directories that has it. Raises `FileNotFoundError`, `OSError`."""
    for place in places:
        with contextlib.suppress(FileNotFoundError), open(os.path.join(place, name), "rb") as file:
            return map_file(file.fileno())
    raise FileNotFoundError(f"segment {name} is in none of {', '.join(places)}: its rows have ended, or the store.")


def map_file(descriptor: int, nbytes: int | None = None, *, is_written: bool = False) -> np.ndarray:
    """Map the first bytes of an open file, uint8, shared with all processes that have mapped it. `nbytes`: None: all
    that it has. `is_written`: the array can be written to, and its pages are touched at once. Raises `OSError`."""
    if nbytes is None:
        nbytes = os.fstat(descriptor).st_size
    protection, flags = mmap.PROT_READ, mmap.MAP_SHARED
    if is_written:
        protection, flags = protection | mmap.PROT_WRITE, flags | mmap.MAP_POPULATE
    address = _LIBC.mmap(None, nbytes, protection, flags, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, f"{nbytes} bytes cannot be mapped: {os.strerror(number)}")
    return np.asarray(_Pages(address, nbytes, is_written=is_written))


class _Pages:
    """The mapping that an array of a file's bytes holds on to."""

    def __init__(self, address: int, nbytes: int, *, is_written: bool) -> None:
        self._range = address, nbytes
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, not is_written),
        }  # fmt: skip

    def __del__(self, unmap: Callable[..., Any] = _LIBC.munmap) -> None:  # bound here: modules end before some arrays
        unmap(*self._range)


class FileThread:
    """The thread for files. Lifecycle: `run` any number of times, `close`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "segments")
        self._is_closed = False

    async def run(self, work: Callable[[], T], undo: Callable[[T | None], None]) -> T:
        """Run work in the thread. Returns what it returns, or raises what it raises. `undo`: called on the loop once
        the work has ended, if its caller waits no more; with its result, None if it has failed. Raises `StoreClosed`
        where it will not be begun any more."""
        if self._is_closed:
            raise StoreClosed(CLOSED)
        running = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if running.cancelled():
                raise StoreClosed(CLOSED) from None
            running.add_done_callback(
                lambda ended: undo(None if ended.cancelled() or ended.exception() else ended.result())
            )
            raise

    def begin(self, work: Callable[[], None]) -> None:
        """Begin work that no caller waits for, and that does not fail. Raises `StoreClosed` as `run` does."""
        if self._is_closed:
            raise StoreClosed(CLOSED)
        self._thread.submit(work)

    def close(self) -> None:
        """Wait for what is under way; what is not is not begun. A second time changes nothing."""
        self._is_closed = True
        self._thread.shutdown(cancel_futures=True)


def move(source: Path, target: Path) -> None:
    """Move a file to another file system. A target that exists is another's, and stays. Raises `OSError`; then the
    source is as before and there is nothing new."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as copy, source.open("rb") as original:
            shutil.copyfileobj(original, copy, COPIED_AT_ONCE)
    except OSError:
        target.unlink(missing_ok=True)
        raise
    source.unlink()


def files_of_writers(writers: Collection[str], places: Sequence[Path]) -> list[Path]:
    """Files of these writers; none of a place that is gone."""
    found: list[Path] = []
    for place in places:
        try:
            found += [place / name for name in os.listdir(place) if writer_of(name) in writers]
        except OSError:
            continue
    return found
