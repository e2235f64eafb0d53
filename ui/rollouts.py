"""Reads the samples of a run: `samples/step_N.parquet`, a million of them if need be, while more are written.

A `SampleIndex` of a few numbers a sample is kept in memory and grows with the files; texts and tokens are read when
they are shown. A file that cannot be read (cut off, or of another version) is left out and counted.
"""

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import parquet

from penstock.orchestrator.observability.runs.own_files import open_own

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


EXCERPT = 240
"""Most characters of a text in a list."""
MANY = 200
"""Most rows of one answer."""
MOST_REASONS = 100
"""Most ways in which a run's responses end."""
ODD = (pa.ArrowException, OSError, ValueError, TypeError, OverflowError)
"""Errors that are raised by files that are no samples, or not of this version."""
_STEP = re.compile(r"step_(\d{1,9})\.parquet")


class Rollouts:
    """Lifecycle: `update` now and then, with as much time as there is; `find` and `sample` at any time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._index = SampleIndex()
        self._read: set[int] = set()
        self._unread: list[int] = []
        self.reasons: list[str] = []
        self.num_unreadable = 0

    @property
    def num_files(self) -> tuple[int, int]:
        """Number of files in the index, and of all files."""
        return len(self._read), len(self._read) + len(self._unread)

    def update(self, budget_s: float = 0.5) -> bool:
        """Take up new files, the newest first, for so long. Returns whether all are in the index then."""
        deadline = time.monotonic() + budget_s
        steps = {int(found[1]) for file in _names(self._directory) if (found := _STEP.fullmatch(file))}
        self._unread = sorted(steps - self._read)
        while self._unread:
            step = self._unread.pop()
            self._read.add(step)
            try:
                self._take_up(step)
            except ODD:
                self.num_unreadable += 1
            if time.monotonic() > deadline:
                break
        pa.default_memory_pool().release_unused()
        return not self._unread

    def find(self, wanted: SampleFilter, budget_s: float = 1.0) -> dict[str, Any]:
        """A page of the samples that are wanted: {total, rows, complete}. `complete`: false if there was not enough
        time to look for the text in all of them."""
        index = self._index
        kept = np.flatnonzero(matching(index, wanted, self.reasons))
        end, total, complete = wanted.offset + min(wanted.limit, MANY), len(kept), True
        if wanted.text:
            order, complete = self._with_text(index, ordered(index, kept, wanted, total), wanted, budget_s)
            total = len(order)
        else:
            order = ordered(index, kept, wanted, end)
        return {"total": total, "complete": complete, "rows": self._lines(index, order[wanted.offset : end])}

    def sample(self, step: int, place: int) -> dict[str, Any]:
        """All columns of a sample's row. Raises `LookupError`."""
        try:
            with self._opened(step) as file:
                table = file.read()
            if not 0 <= place < table.num_rows:
                raise LookupError(f"step {step} has {table.num_rows} samples.")
            (row,) = table.slice(place, 1).to_pylist()
        except ODD as error:
            raise LookupError(f"samples of step {step}: {error}") from None
        return dict(row)

    @contextlib.contextmanager
    def _opened(self, step: int) -> Iterator[parquet.ParquetFile]:
        """Open the file of a step. Raises one of `ODD`."""
        name = f"{self._directory.name}/step_{step}.parquet"
        with open_own(self._directory.parent, name) as opened, parquet.ParquetFile(opened) as file:
            yield file

    def _take_up(self, step: int) -> None:
        with self._opened(step) as file:
            names = [name for name in ("row_id", "group_id", "reward", "advantage", "finish_reason", "response_ids")
                     if name in file.schema_arrow.names]  # fmt: skip
            table = file.read(names)
        self._index.add(table.num_rows, {
            "step": step, "place": np.arange(table.num_rows),
            "row": _integers(table, "row_id"), "group": _integers(table, "group_id"),
            "reward": _floats(table, "reward"), "advantage": _floats(table, "advantage"),
            "tokens": _lengths(table, "response_ids"), "finish": self._finish(table),
        })  # fmt: skip

    def _finish(self, table: pa.Table) -> NDArray[np.int64]:
        """Indices of the rows' reasons; new reasons are added to the list."""
        if "finish_reason" not in table.column_names:
            return np.full(table.num_rows, -1, np.int64)
        said = [None if one is None else str(one)[:EXCERPT] for one in table["finish_reason"].to_pylist()]
        new = [reason for reason in dict.fromkeys(filter(None, said)) if reason not in self.reasons]
        if len(self.reasons) + len(new) > MOST_REASONS:
            raise ValueError(f"more than {MOST_REASONS} ways in which responses end.")
        self.reasons += new
        return np.array([self.reasons.index(one) if one else -1 for one in said], np.int64)

    def _with_text(
        self, index: SampleIndex, order: NDArray[np.int64], wanted: SampleFilter, budget_s: float
    ) -> tuple[NDArray[np.int64], bool]:
        """Rows that contain the text, and whether all were looked at. Files are read in the order of their first
        rows."""
        deadline = time.monotonic() + budget_s
        steps = list(dict.fromkeys(index["step"][order].tolist()))
        hits: dict[int, NDArray[np.bool_]] = {}
        for step in steps:
            if time.monotonic() > deadline:
                break
            hits[step] = self._contains(step, wanted.text)
        none = np.zeros(0, np.bool_)
        kept = [at for at in order.tolist() if _is_hit(hits.get(int(index["step"][at]), none), int(index["place"][at]))]
        return np.array(kept, np.int64), len(hits) == len(steps)

    def _contains(self, step: int, text: str) -> NDArray[np.bool_]:
        try:
            with self._opened(step) as file:
                table = _texts(file)
        except ODD:
            return np.zeros(0, np.bool_)
        found = np.zeros(table.num_rows, np.bool_)
        for name in table.column_names:
            hit = pc.match_substring(table[name], text, ignore_case=True)
            found |= np.asarray(pc.fill_null(hit, False))
        return found

    def _lines(self, index: SampleIndex, places: NDArray[np.int64]) -> list[dict[str, Any]]:
        tables: dict[int, pa.Table | None] = {}
        lines = []
        for at in places.tolist():
            step, place = int(index["step"][at]), int(index["place"][at])
            if step not in tables:
                try:
                    with self._opened(step) as file:
                        tables[step] = _texts(file)
                except ODD:
                    tables[step] = None
            lines.append({
                "step": step, "place": place, "row": int(index["row"][at]), "group": int(index["group"][at]),
                "reward": _number(index["reward"][at]), "advantage": _number(index["advantage"][at]),
                "tokens": int(index["tokens"][at]),
                "finish_reason": self.reasons[index["finish"][at]] if index["finish"][at] >= 0 else None,
                **_excerpts(tables[step], place),
            })  # fmt: skip
        return lines


TEXTS = ("task", "response_text", "transcript", "policy")


def _texts(file: parquet.ParquetFile) -> pa.Table:
    """The columns of `TEXTS` that are text. Raises `ValueError` for text that is no UTF-8."""
    texts = [
        field.name
        for field in file.schema_arrow
        if field.name in TEXTS and field.type in (pa.string(), pa.large_string())
    ]
    table = file.read(texts)
    table.validate(full=True)
    return table


def _excerpts(table: pa.Table | None, place: int) -> dict[str, str]:
    """The beginning of each column's text, by column."""
    if table is None or place >= table.num_rows:
        return {}
    return {name: str(table[name][place].as_py() or "")[:EXCERPT] for name in table.column_names}


def _is_hit(hits: NDArray[np.bool_], place: int) -> bool:
    return place < len(hits) and bool(hits[place])


def _integers(table: pa.Table, name: str) -> NDArray[np.int64]:
    if name not in table.column_names:
        return np.full(table.num_rows, -1, np.int64)
    return np.asarray(pc.fill_null(table[name].cast(pa.int64()), -1))


def _floats(table: pa.Table, name: str) -> NDArray[np.float64]:
    """A column as floats; NaN where there is no value. If each row has a list, its mean."""
    if name not in table.column_names:
        return np.full(table.num_rows, np.nan)
    column = table[name]
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return np.array([np.mean(one) if one else np.nan for one in column.to_pylist()], np.float64)
    return np.asarray(column.cast(pa.float64()).to_numpy(), np.float64)


def _lengths(table: pa.Table, name: str) -> NDArray[np.int64]:
    if name not in table.column_names:
        return np.full(table.num_rows, -1, np.int64)
    return np.asarray(pc.fill_null(pc.list_value_length(table[name]).cast(pa.int64()), 0))


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _names(directory: Path) -> list[str]:
    try:
        return [entry.name for entry in directory.iterdir()]
    except OSError:
        return []
