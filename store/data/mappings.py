"""The segments that one process reads: mapped once, read without a copy, and said to be done with when nothing refers
to them any more.

A file is written anew after its last reader, so the store counts the clients that were told of it (`segments.py`); each
`Use` ends when the last array of what was read is collected, wherever that is, and `tell` is called then.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa

from penstock.store.data.file_memory import map_file
from penstock.store.data.layout import Placed, read
from penstock.store.errors import StoreError


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
            placed.num_rows,
            placed.columns,
            lambda offset, length: pa.foreign_buffer(address + offset, length, use),
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
        raise StoreError(f"segment {name} is in none of {', '.join(self._places)}: its rows have ended, or the store.")
