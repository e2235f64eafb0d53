"""The index of a run's samples: a few numbers of each, all in memory, and the search for those that are wanted."""

from collections.abc import Sequence
from dataclasses import dataclass
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
SORTS = ("step", "group", "reward", "advantage", "tokens")
"""Columns to sort by."""


@dataclass(frozen=True)
class SampleFilter:
    """A filter of samples; what is None or empty does not matter."""

    first_step: int | None = None
    last_step: int | None = None
    group: int | None = None
    least_reward: float | None = None
    most_reward: float | None = None
    least_tokens: int | None = None
    most_tokens: int | None = None
    finish_reason: str = ""
    text: str = ""
    """Text that occurs in a prompt, a response or a conversation, in any case."""
    sort: str = "step"
    """Key to sort by: step, group, reward, advantage or tokens."""
    down: bool = True
    offset: int = 0
    limit: int = 50

    def __post_init__(self) -> None:
        for name, value in (("offset", self.offset), ("limit", self.limit)):
            if value < 0:
                raise ValueError(f"{name}={value}: a number of rows, from 0 on.")


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


def matching(index: SampleIndex, wanted: SampleFilter, reasons: Sequence[str]) -> NDArray[np.bool_]:
    """Return for each sample whether it is wanted, `[N]`. `reasons`: those that `finish` is an index of. The text is
    not looked at."""
    kept = np.ones(len(index), np.bool_)
    for values, least, most in (
        (index["step"], wanted.first_step, wanted.last_step),
        (index["group"], wanted.group, wanted.group),
        (index["reward"], wanted.least_reward, wanted.most_reward),
        (index["tokens"], wanted.least_tokens, wanted.most_tokens),
    ):
        if least is not None:
            kept &= values >= least
        if most is not None:
            kept &= values <= most
    if wanted.finish_reason:
        known = reasons.index(wanted.finish_reason) if wanted.finish_reason in reasons else -2
        kept &= index["finish"] == known
    return kept


def ordered(index: SampleIndex, kept: NDArray[np.int64], wanted: SampleFilter, most: int) -> NDArray[np.int64]:
    """Order of at least the first `most` rows, by what is asked for, then by step, group and place; unknown values come
    last."""
    if wanted.sort not in SORTS:
        raise ValueError(f"sort={wanted.sort}: one of {', '.join(SORTS)}.")
    values = np.asarray(index[wanted.sort][kept], np.float64)
    values = np.where(np.isnan(values), np.inf, -values if wanted.down else values)
    if 0 < most < len(kept):
        first = values <= np.partition(values, most - 1)[most - 1]
        kept, values = kept[first], values[first]
    ties = index["place"][kept], index["group"][kept], -index["step"][kept]
    order: NDArray[np.int64] = kept[np.lexsort((*ties, values))]
    return order
