"""Rows of a dataset as they are written: a JSON-lines file's, those of parquet files of the Hugging Face hub or of a
local folder, or what a Python function makes. Every error names the file and the line, or the row.

The hub keeps every public dataset converted to parquet under the revision `refs/convert/parquet`; those files are
fetched and read with Arrow, so no loader code runs and the `datasets` package is not needed.
"""

import importlib
import itertools
import json
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.conf.errors import DataError, suggest
from penstock.workers.user_code import find_function

PARQUET_REVISION = "refs/convert/parquet"
MOST_ROWS = 10_000
"""Largest number of rows of a generator, which may have no end, unless `data.size` says more."""
MOST_TOGETHER = 2**31 - 1
"""Most bytes of a table whose columns are joined into one array each: pictures in one may be no more."""
T = TypeVar("T")


class RawRows(Protocol):
    """Rows by number, each with its place, for messages. `folder`: the one that their paths are relative to."""

    folder: Path

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str: ...


class JsonLines:
    """Objects of a file, one a line, found by byte offset and parsed when they are asked for. Blank lines count as
    lines but not as rows.

    Raises `DataError` if the file is missing or empty, or holds fewer than one object.
    """

    def __init__(self, path: str, key: str = "data.path") -> None:
        self.path = Path(path).expanduser()
        self.folder = self.path.parent
        _check_file(self.path, key)
        self._offsets = array("Q")
        self._lines = array("Q")
        with self.path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)
            size = offset
        if not self._offsets:
            raise DataError(f"{key}={path}: the file has {size} bytes and no rows; one JSON object a line is due.")
        self._file = self.path.open("rb")

    def __len__(self) -> int:
        return len(self._offsets)

    def where(self, index: int) -> str:
        return f"{self.path} line {self._lines[index]}"

    def row(self, index: int) -> dict[str, Any]:
        """Parse a row. Raises `DataError` if the line is not valid JSON, or no object."""
        self._file.seek(self._offsets[index])
        line = self._file.readline()
        try:
            value = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(index)}: not UTF-8 ({error}). Convert the file to UTF-8.") from None
        except json.JSONDecodeError as error:
            shown = line.decode("utf-8", "replace").strip()
            raise DataError(
                f"{self.where(index)}: not valid JSON ({error.msg} at character {error.colno}): {shown[:80]!r}. "
                "The file must hold one JSON object a line."
            ) from None
        if not isinstance(value, dict):
            raise DataError(
                f"{self.where(index)}: a JSON {type(value).__name__}, where an object with named columns is due."
            )
        return value


def _check_file(path: Path, key: str) -> None:
    if path.is_dir():
        raise DataError(f"{key}={path}: a folder; name the .jsonl file in it.")
    if not path.is_file():
        folder = path.parent
        if not folder.is_dir():
            raise DataError(f"{key}={path}: there is no folder {folder.resolve()}.")
        near = [other.name for other in folder.iterdir() if other.is_file()]
        hint = suggest(path.name, near) if near else "; the folder is empty."
        raise DataError(f"{key}={path}: there is no such file{hint}")


class ParquetRows:
    """Rows of parquet files, memory-mapped, one after the other."""

    def __init__(self, name: str, files: list[Path], folder: Path = Path()) -> None:
        self.name, self.folder = name, folder
        try:
            tables = [pq.read_table(file, memory_map=True) for file in files]
            table = pa.concat_tables(tables, promote_options="permissive")
            self._table = table.combine_chunks() if table.nbytes <= MOST_TOGETHER else table
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"data.path={name}: reading its parquet files failed: {error}") from error
        if not self._table.num_rows:
            raise DataError(f"data.path={name}: {len(files)} parquet file(s) without a row.")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def where(self, index: int) -> str:
        return f"{self.name} row {index}"

    def row(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        return row


def open_huggingface(path: str, subset: str | None, split: str) -> ParquetRows:
    """Open a split of a dataset: `path` is a hub id (`openai/gsm8k`) or a local folder with parquet files.

    Raises `DataError` naming data.path, data.subset or data.split if it is not there or cannot be fetched.
    """
    label = " ".join(filter(None, (path, subset, split)))
    folder = Path(path).expanduser()
    if folder.is_dir():
        names = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*.parquet"))]
        return ParquetRows(label, [folder / name for name in choose_files(names, path, subset, split)], folder)
    names, fetch = _hub_files(path)
    return ParquetRows(label, [fetch(name) for name in choose_files(names, path, subset, split)])


def choose_files(names: list[str], path: str, subset: str | None, split: str) -> list[str]:
    """The files of one subset and split among `SUBSET/SPLIT/0000.parquet` (the hub) or
    `[SUBSET/]SPLIT-00000-of-00001.parquet`.

    A subset may be left out where there is only one. Raises `DataError` with what there is.
    """
    if not names:
        raise DataError(f"data.path={path}: no parquet files there.")
    known = [(name, *_place(name)) for name in names]
    subsets = sorted({place for _, place, _ in known})
    if subset is None and len(subsets) > 1:
        raise DataError(
            f"data.subset=null: {path} has several subsets: {', '.join(subsets)}. Choose one with data.subset=NAME."
        )
    if subset is not None and subset not in subsets and subsets != [""]:
        raise DataError(f"data.subset={subset}: {path} has no such subset{suggest(subset, subsets)}")
    wanted = subsets[0] if subset is None or subsets == [""] else subset
    chosen = [name for name, place, part in known if place == wanted and part == split]
    if not chosen:
        splits = {part for _, place, part in known if place == wanted}
        raise DataError(f"data.split={split}: {path} has no such split{suggest(split, splits)}")
    return chosen


def _place(name: str) -> tuple[str, str]:
    """Subset and split of a file's path."""
    folders = [part for part in name.split("/")[:-1] if part != "data"]
    stem = name.split("/")[-1].removesuffix(".parquet")
    if stem.isdigit() and folders:
        return "/".join(folders[:-1]), folders[-1]
    return "/".join(folders), stem.split("-")[0]


def _hub_files(path: str) -> tuple[list[str], Any]:
    hub = importlib.import_module("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")
    of_client = errors.HfHubHTTPError.__bases__[0]
    """The HTTP client's own error, by whatever name: a host that is not found is no `OSError` there."""
    try:
        listed = hub.HfApi().list_repo_files(path, repo_type="dataset", revision=PARQUET_REVISION)
    except (
        of_client, errors.HFValidationError, errors.OfflineModeIsEnabled, OSError, RuntimeError
    ) as error:  # fmt: skip
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"data.path={path}: neither a local folder nor a dataset that the Hugging Face hub hands out here "
            f"({first_line}). Check the id and the connection; a private dataset needs `hf auth login`. Or download "
            "its parquet files and set data.path to their folder, or export them as JSON lines (data.source=jsonl)."
        ) from error

    def fetch(name: str) -> Path:
        return Path(hub.hf_hub_download(path, name, repo_type="dataset", revision=PARQUET_REVISION))

    return [name for name in listed if name.endswith(".parquet")], fetch


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
        self._spec, self.folder = spec, Path()
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
