"""Rows that a Python function makes: a dataset of a few lines of code, for demonstrations and experiments."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from penstock.conf.errors import DataError
from penstock.workers.user_code import find_function

MOST_ROWS = 10_000
"""Largest number of rows of a generator, which may have no end, unless `data.size` says more."""
T = TypeVar("T")


def first_of(made: Iterable[T], size: int | None) -> tuple[list[T], bool]:
    """The first `size` rows; without a size all of a list, and the first 10,000 of a generator. Also returns whether
    there are more, which no setting leaves out."""
    if size is not None or isinstance(made, Sequence):
        return list(itertools.islice(made, size)), False
    found = list(itertools.islice(made, MOST_ROWS + 1))
    return found[:MOST_ROWS], len(found) > MOST_ROWS


class PythonRows:
    """Rows that `file.py:function` yields for a seed: `(seed: int) -> Iterable[dict]`."""

    def __init__(self, spec: str, seed: int, size: int | None, key: str = "data.path") -> None:
        """Call the function. Raises `ConfigError` for a function that is not found, `DataError` for one that makes no
        rows."""
        self._spec = spec
        made = find_function(spec, key)(seed)
        self._rows, self.is_cut = first_of(made, size)
        if not self._rows:
            raise DataError(f"{key}={spec}: the function has made no rows.")

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        return f"{self._spec} row {index}"

    def row(self, index: int) -> dict[str, Any]:
        """The row of a number. Raises `DataError` for what is no row."""
        row = self._rows[index]
        if not isinstance(row, dict):
            raise DataError(f"{self.where(index)}: {type(row).__name__}, where a dict with named columns is due.")
        return row
