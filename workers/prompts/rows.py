"""Rows of a dataset as they are written: JSON's, those of Arrow's tables, or what a Python function makes. Every error
names the file and the line, or the row.

`data_files.py` opens files as such rows.
"""

import bisect
import itertools
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from penstock.conf.errors import DataError
from penstock.workers.user_code import find_function

MOST_ROWS = 10_000
"""Largest number of rows of a generator, which may have no end, unless `data.size` says more."""
MOST_TOGETHER = 2**31 - 1
"""Most bytes of a table whose columns are joined into one array each: pictures in one may be no more."""
_ESCAPES = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
"""Escapes of JSON that may stand for what is no text: a NUL, or half of a surrogate pair."""
_LONE = re.compile("[\ud800-\udfff]")
T = TypeVar("T")


class RawRows(Protocol):
    """Rows by number, each with its place, for messages."""

    folder: Path
    """The folder that their paths are relative to."""
    num_bytes: int
    """Bytes of their files; 0: they have none."""
    is_filled: bool
    """True if fields that a row lacks are there as None, as Arrow fills them."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str: ...


class JsonLines:
    """Objects of a file, one a line, found by byte offset and parsed when they are asked for. Blank lines count as
    lines but not as rows.

    Raises `DataError` for a line whose text cannot be used, wherever it stands.
    """

    is_filled = False

    def __init__(self, file: BinaryIO, name: str, folder: Path = Path()) -> None:
        """`file`: read from its beginning, and kept. `name`: of the file, for messages."""
        self.name, self.folder, self._file = name, folder, file
        self._offsets = array("Q")
        self._lines = array("Q")
        offset = 0
        for number, line in enumerate(file, start=1):
            if line.strip():
                self._offsets.append(offset)
                self._lines.append(number)
                if not line.isascii() or _ESCAPES.search(line):
                    self._check(line, len(self) - 1)
            offset += len(line)
        self.num_bytes = offset

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, index: int) -> str:
        return f"{self.name} line {self._lines[index]}"

    def row(self, index: int) -> dict[str, Any]:
        """Parse a row. Raises `DataError` if the line is not valid JSON, or no object."""
        self._file.seek(self._offsets[index])
        return _object(_parsed(self._file.readline(), self.where(index)), self.where(index))

    def _check(self, line: bytes, index: int) -> None:
        """Check a line that may hold what is no text. Raises `DataError`."""
        if _ESCAPES.search(line):
            check_texts(_parsed(line, self.where(index)), self.where(index))
        else:
            _decoded(line, self.where(index))


class JsonList:
    """Objects of a file that holds one list of them."""

    is_filled = False

    def __init__(self, data: bytes, name: str, folder: Path = Path()) -> None:
        """Raises `DataError` for what is no list of objects, or has a text that cannot be used."""
        self.name, self.folder, self.num_bytes = name, folder, len(data)
        self._rows = _parsed(data, name)
        for index, row in enumerate(self._rows):
            check_texts(_object(row, self.where(index)), self.where(index))

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        return f"{self.name} row {index}"

    def row(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._rows[index]
        return row


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error}). Convert the file to UTF-8.") from None


def _parsed(data: bytes, where: str) -> Any:
    text = _decoded(data, where)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f" of line {error.lineno}" if error.lineno > 1 else ""
        raise DataError(
            f"{where}: not valid JSON ({error.msg} at character {error.colno}{line}): {text.strip()[:80]!r}. "
            "The file must hold one JSON object a line, or a list of objects."
        ) from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, too many brackets in one another
        raise DataError(f"{where}: not valid JSON ({error}): {text.strip()[:80]!r}.") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: a JSON {type(value).__name__}, where an object with named columns is due.")
    return value


class ArrowRows:
    """Rows of Arrow tables, one after the other."""

    is_filled = True

    def __init__(self, name: str, tables: Sequence[pa.Table], folder: Path = Path(), num_bytes: int = 0) -> None:
        """`name`: of the files, for messages. Raises `DataError` for tables of different types, and for a row whose
        text cannot be used."""
        self.name, self.folder, self.num_bytes = name, folder, num_bytes
        try:
            table = pa.concat_tables(tables, promote_options="permissive")
            self._table = table.combine_chunks() if table.nbytes <= MOST_TOGETHER else table
        except pa.ArrowException as error:
            raise DataError(f"{name}: its files do not fit together: {error}") from error
        if _is_doubtful(self._table):
            for index in range(len(self)):
                check_texts(self.row(index), self.where(index))

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def where(self, index: int) -> str:
        return f"{self.name} row {index}"

    def row(self, index: int) -> dict[str, Any]:
        try:
            row: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(index)}: a text is not UTF-8 ({error}). Write the file anew.") from None
        return row


class JoinedRows:
    """Rows of several files, one after the other."""

    def __init__(self, parts: Sequence[RawRows], folder: Path) -> None:
        self._parts, self.folder = parts, folder
        self._ends = list(itertools.accumulate(map(len, parts)))
        self.num_bytes = sum(part.num_bytes for part in parts)
        self.is_filled = any(part.is_filled for part in parts)

    def __len__(self) -> int:
        return self._ends[-1]

    def where(self, index: int) -> str:
        part, index = self._place(index)
        return part.where(index)

    def row(self, index: int) -> dict[str, Any]:
        part, index = self._place(index)
        return part.row(index)

    def _place(self, index: int) -> tuple[RawRows, int]:
        """The part that has a row, and the row's number in it."""
        number = bisect.bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


def _is_doubtful(table: pa.Table) -> bool:
    """Return whether a text of the table is not UTF-8, or has a NUL."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        return True
    return any(
        pc.any(pc.match_substring(text, "\0")).as_py()
        for column in table.columns
        for chunk in column.chunks
        for text in _texts(chunk)
    )


def _texts(array: pa.Array) -> Iterator[pa.Array]:
    """The arrays of text in an array, however deep."""
    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        yield array
    elif pa.types.is_string_view(kind):
        yield array.cast(pa.large_string())
    elif pa.types.is_dictionary(kind):
        yield from _texts(array.dictionary)
    elif isinstance(array, pa.ExtensionArray):
        yield from _texts(array.storage)
    elif pa.types.is_struct(kind):
        for field in array.flatten():
            yield from _texts(field)
    elif pa.types.is_map(kind):
        yield from _texts(array.keys)
        yield from _texts(array.items)
    elif pa.types.is_nested(kind) and hasattr(array, "flatten"):
        yield from _texts(array.flatten())


def without_none(value: Any) -> Any:
    """Leave out the fields of dicts that are None, however deep.

    >>> without_none([{"city": {"type": "string", "enum": None}, "date": None}])
    [{'city': {'type': 'string'}}]
    """
    if isinstance(value, Mapping):
        return {name: without_none(field) for name, field in value.items() if field is not None}
    return list(map(without_none, value)) if isinstance(value, list) else value


def check_texts(value: Any, where: str) -> None:
    """Check that all texts in a row can be written as UTF-8 without a NUL, which tokenizers, files and processes refuse
    later. Raises `DataError` with the column."""
    fields = value.items() if isinstance(value, Mapping) else (("", value),)
    for name, field in fields:
        if fault := _fault_of(name) or _fault_of(field):
            column = f"column {name!a} holds " if isinstance(value, Mapping) else "it holds "
            raise DataError(f"{where}: {column}{fault}, which is no text. Take it out, or leave the row out.")


def _fault_of(value: Any) -> str:
    """What makes a text in a value unusable; empty: nothing."""
    if isinstance(value, str):
        if "\0" in value:
            return "a NUL (U+0000)"
        lone = None if value.isascii() else _LONE.search(value)
        return f"half of a surrogate pair (U+{ord(lone[0]):04X})" if lone else ""
    if isinstance(value, Mapping):
        value = itertools.chain.from_iterable(value.items())
    elif not isinstance(value, list | tuple):
        return ""
    return next(filter(None, map(_fault_of, value)), "")


def first_of(made: Iterable[T], size: int | None) -> tuple[list[T], bool]:
    """The first `size` rows; without a size all of a list, and the first 10,000 of a generator. Also returns whether
    there are more, which no setting leaves out."""
    if size is not None or isinstance(made, Sequence):
        return list(itertools.islice(made, size)), False
    found = list(itertools.islice(made, MOST_ROWS + 1))
    return found[:MOST_ROWS], len(found) > MOST_ROWS


class PythonRows:
    """Rows that `file.py:function` yields for a seed: `(seed: int) -> Iterable[dict]`."""

    num_bytes = 0
    is_filled = False

    def __init__(self, spec: str, seed: int, size: int | None, key: str = "data.path") -> None:
        """Call the function. Raises `ConfigError` for a function that is not found, `DataError` for one that makes no
        rows."""
        self._spec, self.folder = spec, Path()
        made = find_function(spec, key)(seed)
        self._rows, self.is_cut = first_of(made, size)
        if not self._rows:
            raise DataError(f"{key}={spec}: the function has made no rows.")
        for index, row in enumerate(self._rows):
            check_texts(row, self.where(index))

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
