"""Mappings: the segments that one process reads, mapped once, read without a copy, and said to be done with when
nothing refers to them any more.

    array = map_file(descriptor, nbytes)    the descriptor may be closed
    del array, and all views of it          the pages are unmapped

A file is written anew after its last reader, so the store counts the clients that were told of it (`segments.py`); each
`Use` ends when the last array of what was read is collected, wherever that is, and a `DebouncedCall` tells it then.

No file stays open: thousands of segments are mapped at a time, and a process may have only a thousand files open.
Python's own `mmap` keeps a copy of the descriptor for as long as the mapping is there; from Python 3.13 on it need not
(`trackfd`).
"""

import asyncio
import contextlib
import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.store.data.layout import Placed, read
from penstock.store.errors import RowsLost, StoreError

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class _Pages:
    """The mapping that an array of a file's bytes holds on to."""

    def __init__(self, address: int, nbytes: int, *, is_written: bool) -> None:
        self._range = address, nbytes
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, not is_written),
        }  # fmt: skip

    def __del__(self, unmap: Callable[..., Any] = _LIBC.munmap) -> None:  # bound here: modules end before some arrays
        unmap(*self._range)


def map_file(descriptor: int, nbytes: int | None = None, *, is_written: bool = False) -> np.ndarray:
    """Map the first bytes of an open file, uint8, shared with all processes that have mapped it. `nbytes`: None: all
    that it has. `is_written`: the array can be written to, and its pages are there at once. Raises `OSError`."""
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


DEBOUNCE_S = 0.05
"""Delay in seconds. What ends with the next call anyway is said by that call; a lease's arrays end together."""


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


class Use:
    """The object that every buffer of one reading holds on to; its end is noted in `ended`, and told."""

    __slots__ = ("_ended", "_name", "_tell", "memory")

    def __init__(self, name: str, ended: "deque[str]", tell: Callable[[], None]) -> None:
        self._name, self._ended, self._tell = name, ended, tell
        self.memory: np.ndarray | None = None

    def __del__(self) -> None:  # may run in any thread, and while any other line runs: `tell` must bear that
        self._ended.append(self._name)
        self._tell()


class Mappings:
    """Files by name. `places`: directories to look for them in. `tell`: called when there is something for `ended` to
    return, by the thread that ends it."""

    def __init__(self, places: Sequence[str], tell: Callable[[], None]) -> None:
        self._places, self._tell = places, tell
        self._files: dict[str, np.ndarray] = {}
        self._ended: deque[str] = deque()

    def read(self, placed: Placed) -> pa.RecordBatch:
        """Read a batch as views of the file. Ends one use. Raises `StoreError` if it is in none of the places."""
        use = Use(placed.segment, self._ended, self._tell)  # first: it ends whatever fails from here on
        memory = self._files.get(placed.segment)
        if memory is None or len(memory) < placed.nbytes:
            memory = self._files[placed.segment] = self._map(placed.segment)
        use.memory = memory
        address = memory.ctypes.data
        return read(
            placed.num_rows, placed.columns, lambda offset, length: pa.foreign_buffer(address + offset, length, use)
        )

    def read_all(self, refs: Sequence[Placed]) -> list[pa.RecordBatch]:
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
        for place in self._places:
            try:
                with open(os.path.join(place, name), "rb") as file:
                    return map_file(file.fileno())
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreError(f"segment {name} of {place} cannot be mapped: {error}.") from None
        raise RowsLost(f"segment {name} is in none of {', '.join(self._places)}: its rows have ended, or the store.")
