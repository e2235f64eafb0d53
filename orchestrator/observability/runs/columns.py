"""Reads `metrics.jsonl` as columns, while it is being written: only what was added is read.

A step may have several lines (its evaluation's, a resumed run's): of each metric the last value counts. A line that is
not whole yet is read when it is. A file that is shorter than before was cut back by a resumed run, and is read again
from its beginning.
"""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import json as arrow_json

from penstock.orchestrator.observability.runs.own_files import is_number, open_own

Values = NDArray[np.float64]
MAX_LINE = 2**24
"""Largest size of a line, in bytes; what is longer was not written by a run."""
PIECE_BYTES = 2**22
"""Bytes of the file that are in memory at a time."""


class Columns:
    """Lifecycle: `update` now and then; between two calls nothing changes."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        """Device and inode of the file that was read."""
        self._steps: Values = np.empty(0)
        self._columns: dict[str, Values] = {}
        self.num_unreadable = 0
        """Number of lines that are no JSON object with a step."""

    @property
    def keys(self) -> list[str]:
        """Metrics with a value at some step."""
        return [key for key, values in self._columns.items() if not np.isnan(values).all()]

    @property
    def steps(self) -> Values:
        """Steps, `[N]` float64, ascending, each once."""
        return self._steps

    def __getitem__(self, key: str) -> Values:
        """Values of a metric, `[N]` float64, NaN where a step has none."""
        return self._columns.get(key, np.full(len(self._steps), np.nan))

    def update(self) -> bool:
        """Read what was added. Returns whether there was anything."""
        try:
            with open_own(self._file.parent, self._file.name) as opened:
                status = os.fstat(opened.fileno())
                identity = (status.st_dev, status.st_ino)
                if identity != self._identity or status.st_size < self._offset:
                    self._forget(identity)
                opened.seek(self._offset)
                parts, size = [], 0
                for lines in whole_lines(opened):
                    parts.append(self._parsed(lines))
                    size += len(lines)
        except FileNotFoundError:
            had_any = bool(len(self._steps))
            self._forget(None)
            return had_any
        if not parts:
            return False
        self._offset += size
        self._join(parts)
        pa.default_memory_pool().release_unused()  # what it keeps of one long run is more than the run's numbers
        return True

    def _forget(self, identity: tuple[int, int] | None) -> None:
        self._identity, self._offset, self.num_unreadable = identity, 0, 0
        self._steps, self._columns = np.empty(0), {}

    def _parsed(self, lines: bytes) -> tuple[Values, dict[str, Values]]:
        """Parse lines by Arrow, which reads many of them ten times as fast; what it does not take is read line by
        line."""
        try:
            options = arrow_json.ReadOptions(use_threads=False, block_size=max(1 << 20, min(len(lines), MAX_LINE)))
            table = arrow_json.read_json(io.BytesIO(lines), read_options=options)
            if "step" in table.column_names:
                columns = {name: _floats(table[name]) for name in table.column_names}
                if np.isfinite(columns["step"]).all():
                    return columns.pop("step"), columns
        except pa.ArrowException:
            pass
        return self._one_by_one(lines)

    def _one_by_one(self, lines: bytes) -> tuple[Values, dict[str, Values]]:
        found: list[dict[str, Any]] = []
        for line in lines.splitlines():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict) and is_number(value.get("step")):
                found.append(value)
            else:
                self.num_unreadable += 1
        columns = {key: np.full(len(found), np.nan) for value in found for key in value}
        for index, value in enumerate(found):
            for key, number in value.items():
                if is_number(number):
                    columns[key][index] = number
        return columns.pop("step", np.empty(0)), columns

    def _join(self, added: list[tuple[Values, dict[str, Values]]]) -> None:
        parts = [(self._steps, self._columns), *added]
        every = np.concatenate([steps for steps, _ in parts])
        last = {step: index for index, step in enumerate(every.tolist())}
        order = np.array([last[step] for step in sorted(last)], dtype=np.int64)
        absent = [np.full(len(steps), np.nan) for steps, _ in parts]
        earlier = [(index, last[step]) for index, step in enumerate(every.tolist()) if index != last[step]]
        self._columns = {}
        for key in dict.fromkeys(key for _, columns in parts for key in columns):
            values = np.concatenate([columns.get(key, none) for (_, columns), none in zip(parts, absent, strict=True)])
            for index, of_step in reversed(earlier):
                if np.isnan(values[of_step]):
                    values[of_step] = values[index]
            self._columns[key] = values[order]
        self._steps = every[order]


def whole_lines(opened: BinaryIO) -> Iterator[bytes]:
    """All lines that are left of a file, some MiB at a time. A line that is too long comes in pieces."""
    rest = b""
    while piece := opened.read(PIECE_BYTES):
        whole, newline, rest = (rest + piece).rpartition(b"\n")
        if newline:
            yield whole + newline
        elif len(rest) > MAX_LINE:
            yield rest
            rest = b""


def _floats(column: pa.ChunkedArray) -> Values:
    """A column as floats; NaN where there is no number."""
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return np.full(len(column), np.nan)
    return np.asarray(column.cast(pa.float64()).to_numpy(), dtype=np.float64)
