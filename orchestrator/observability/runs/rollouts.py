"""Reads the samples of a run: `samples/step_N.parquet`, a million of them if need be, while more are written.

An index of a few numbers a sample is kept in memory and grows with the files; texts and tokens are read when they are
shown. A file that cannot be read (cut off, or of another version) is left out and counted.
"""

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import parquet

from penstock.orchestrator.observability.runs.own_files import open_own
from penstock.orchestrator.observability.runs.sample_index import SampleFilter, SampleIndex, matching, ordered

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


TEXTS = ("task", "response_text", "transcript")


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
