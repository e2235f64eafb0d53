"""The index of a run's samples: a few numbers of each, all in memory, to search and sort by."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES = {
    "step": np.int32, "place": np.int32, "row": np.int64, "group": np.int64, "reward": np.float32,
    "advantage": np.float32, "tokens": np.int32, "finish": np.int16,
}  # fmt: skip
"""Columns of the index and their types, 40 bytes a sample. `place`: that of the row in its file. `finish`: index of the
reason; -1: none. Runs write rewards as float32 too."""
LEAST_ROOM = 4096


class SampleIndex:
    """Columns `[N]`, in the order in which files were read, and of the rows in them.

    The index grows by half, in few large arrays: joining all columns after each file would copy a million samples for
    each hundred, and leave holes in memory that nothing fits into.
    """

    def __init__(self) -> None:
        self._columns: dict[str, NDArray[Any]] = {name: np.empty(0, dtype) for name, dtype in DTYPES.items()}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A column, `[N]`, as a view."""
        return self._columns[name][: self._count]

    def add(self, count: int, columns: dict[str, Any]) -> None:
        """Add samples. `columns`: `[count]` each, or one value for all; every name of `DTYPES`."""
        first, self._count = self._count, self._count + count
        if self._count > len(self._columns["step"]):
            self._grow(first, max(LEAST_ROOM, self._count * 3 // 2))
        for name, values in columns.items():
            self._columns[name][first : self._count] = values

    def _grow(self, kept: int, room: int) -> None:
        for name, values in self._columns.items():
            self._columns[name] = np.empty(room, values.dtype)
            self._columns[name][:kept] = values[:kept]
