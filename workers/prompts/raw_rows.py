"""Rows of a dataset as they are written: JSON's, those of Arrow's tables, or what a Python function makes; and the
files that `data.path` names, each read as what its bytes and its name say. Every error names the file and the line, or
the row.

    data.path ─▶ a file, a folder, a glob, a URL ─▶ files of one split, on this machine ─▶ format of each ─▶ rows
             ─▶ OWNER/NAME, which is no file ─▶ the Hugging Face hub

The hub keeps every public dataset converted to parquet under the revision `refs/convert/parquet`; those files are
fetched and read with Arrow, so no loader code runs and the `datasets` package is not needed.
"""

import bisect
import glob
import importlib
import itertools
import json
import re
import shutil
import tempfile
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from penstock.conf.errors import DataError, suggest
from penstock.workers.prompts.data_names import (
    ARROW,
    COMPRESSIONS,
    CSV,
    ENDINGS,
    JSON,
    PARQUET,
    ending_of,
    format_named,
    names_files,
)
from penstock.workers.runtime.url_files import is_url
from penstock.workers.user_code import InlineValue, find_function

MOST_ROWS = 10_000
"""Largest number of rows of a generator, which may have no end, unless `data.size` says more."""
MOST_TOGETHER = 2**31 - 1
"""Most bytes of a table whose columns are joined into one array each: pictures in one may be no more."""
_ESCAPES = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
"""Escapes of JSON that may stand for what is no text: a NUL, or half of a surrogate pair."""
_LONE = re.compile("[\ud800-\udfff]")
T = TypeVar("T")
PARQUET_REVISION = "refs/convert/parquet"
JSON_LIST = "a JSON list"
BEGINNINGS = {
    b"PAR1": PARQUET, b"ARROW1": ARROW, b"\xff\xff\xff\xff": ARROW, b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bz2",
}  # fmt: skip
"""What files of these formats and compressions begin with. Others are text."""
ABOUT = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
"""Names of files that `datasets` writes beside the rows."""
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
"""Usual names of splits."""


class RawRows:
    """Base of rows by number, each with its place, for messages."""

    name: str = ""
    """Name of the file or function, for messages."""
    folder: Path = Path()
    """The folder that their paths are relative to."""
    num_bytes: int = 0
    """Bytes of their files; 0: they have none."""
    is_filled: bool = False
    """True if fields that a row lacks are there as None, as Arrow fills them."""
    _rows: Sequence[Any] = ()

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """The row of a number. Raises `DataError` for one that cannot be used."""
        row: dict[str, Any] = self._rows[index]
        return row

    def where(self, index: int) -> str:
        return f"{self.name} row {index}"


class JsonLineRows(RawRows):
    """Objects of a file, one a line, found by byte offset and parsed when they are asked for. Blank lines count as
    lines but not as rows.

    Raises `DataError` for a line whose text cannot be used, wherever it stands.
    """

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


class JsonListRows(RawRows):
    """Objects of a file that holds one list of them."""

    def __init__(self, data: bytes, name: str, folder: Path = Path()) -> None:
        """Raises `DataError` for what is no list of objects, or has a text that cannot be used."""
        self.name, self.folder, self.num_bytes = name, folder, len(data)
        self._rows = _parsed(data, name)
        for index, row in enumerate(self._rows):
            check_texts(_object(row, self.where(index)), self.where(index))


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


class ArrowRows(RawRows):
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

    def row(self, index: int) -> dict[str, Any]:
        try:
            row: dict[str, Any] = self._table.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(index)}: a text is not UTF-8 ({error}). Write the file anew.") from None
        return row


class JoinedRows(RawRows):
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


class PythonRows(RawRows):
    """Rows that `file.py:function` yields for a seed, `(seed: int) -> Iterable[dict]`, or that an `InlineValue` has."""

    def __init__(self, spec: str, seed: int, size: int | None, key: str = "data.path") -> None:
        """Call the function. Raises `ConfigError` for a function that is not found, `DataError` for one that makes no
        rows."""
        self.name = spec
        made = spec.value if isinstance(spec, InlineValue) else find_function(spec, key)(seed)
        self._rows, self.is_cut = first_of(made, size)
        if not self._rows:
            raise DataError(f"{key}={spec}: there are no rows.")
        for index, row in enumerate(self._rows):
            check_texts(row, self.where(index))

    def row(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        if not isinstance(row, dict):
            raise DataError(f"{self.where(index)}: {type(row).__name__}, where a dict with named columns is due.")
        return row


@dataclass(frozen=True)
class DataFile:
    """A file with rows, on this machine. `place`: its path or URL, as people know it."""

    place: str
    path: Path


@dataclass(frozen=True)
class DataSelection:
    """The rows that are wanted of a path, and the keys that say so, for messages."""

    path: str
    subset: str | None = None
    split: str | None = None
    """None: the only one, or the one called test."""
    key: str = "data.path"
    split_key: str = "data.split"

    @property
    def setting(self) -> str:
        return f"{self.key}={self.path}"

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.path, self.subset, self.split)))


def open_table(wanted: DataSelection, source: str, texts: Collection[str]) -> RawRows:
    """Open the rows of files or of a dataset of the hub.

    `source`: "jsonl" for files alone, "huggingface" or "auto". `texts`: columns that are text, whatever they hold.
    Raises `DataError`.
    """
    path = wanted.path
    if names_files(path) or source == "jsonl" or (source == "auto" and "/" not in path):
        folder, files, label = _find(wanted)
    else:
        names, fetch = _hub_files(wanted)
        folder, label = Path(), wanted.label
        files = [DataFile(f"{path}/{name}", fetch(name)) for name in choose_files(names, wanted)]
    rows = _joined([_open(file, folder, texts) for file in files], files, folder, label)
    if not len(rows):
        raise DataError(f"{wanted.setting}: {len(files)} file(s) of {rows.num_bytes} bytes with no rows.")
    return rows


def _find(wanted: DataSelection) -> tuple[Path, list[DataFile], str]:
    """The folder that the rows' paths are relative to, the files, and their name for messages. Raises `DataError`."""
    path, (system, root, fetch) = wanted.path, _opened(wanted)
    with _as_data_error(wanted.setting):
        kind = _kind(system, root)
        if kind == "directory":
            by_name = {str(name)[len(root) :].lstrip("/"): name for name in system.find(root)}
            names = choose_files([name for name in by_name if _has_rows(name) and format_named(name)], wanted)
            files = [DataFile(f"{path.rstrip('/')}/{name}", fetch(by_name[name])) for name in names]
            return Path(root), files, wanted.label
        found = [root] if kind else sorted(map(str, system.glob(root))) if glob.has_magic(root) else []
        names = [name for name in found if kind or (_has_rows(Path(name).name) and system.isfile(name))]
        if names:
            files = [DataFile(path if kind else name, fetch(name)) for name in names]
            return Path(names[0]).parent, files, path
    raise _missing(wanted)


def _opened(wanted: DataSelection) -> tuple[Any, str, Callable[[str], Path]]:
    """The file system of a path, the path as it names it, and what brings a file here. Raises `DataError`."""
    path = wanted.path
    if not is_url(path):
        return LocalFileSystem(), str(Path(path).expanduser().absolute()), Path
    try:
        system, root = url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise DataError(
            f"{wanted.setting}: no file system for it ({error}). Some kinds want a package, such as s3fs for s3://."
        ) from None
    cached = fsspec.filesystem("simplecache", fs=system)  # keeps what it has fetched while the process lives

    def fetch(name: str) -> Path:
        with cached.open(name) as file:
            return Path(file.name)

    return system, str(root).rstrip("/"), fetch


def _kind(system: Any, root: str) -> str:
    """`file` or `directory`; empty: nothing is there."""
    try:
        return str(system.info(root)["type"])
    except (FileNotFoundError, NotADirectoryError):
        return ""


@contextmanager
def _as_data_error(what: str) -> Iterator[None]:
    """Raise `DataError` for what a file system raises in the block: its library raises what it likes."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{what}: cannot be read: {type(error).__name__}: {error}") from error


def _has_rows(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return not any(part.startswith(".") for part in parts) and parts[-1] not in ABOUT


def _missing(wanted: DataSelection) -> DataError:
    path, place = wanted.path, Path(wanted.path).expanduser()
    if is_url(path):
        return DataError(f"{wanted.setting}: there is no such file or folder, or its host does not answer.")
    if glob.has_magic(path):
        return DataError(f"{wanted.setting}: there is no file of this pattern (seen from {Path.cwd()}).")
    if not place.parent.is_dir():
        return DataError(f"{wanted.setting}: there is no folder {place.parent.resolve()}.")
    near = [other.name for other in place.parent.iterdir()]
    hint = suggest(place.name, near) if near else "; the folder is empty."
    if len(place.parts) == 1 and not format_named(path):
        hint += (
            " A dataset of the hub is OWNER/NAME, or needs data.source=huggingface; a task of reasoning_gym needs "
            "data.source=reasoning_gym."
        )
    return DataError(f"{wanted.setting}: there is no such file{hint}")


def choose_files(names: Collection[str], wanted: DataSelection) -> list[str]:
    """The files of one subset and split among `SUBSET/SPLIT/0000.parquet` (the hub) or
    `[SUBSET/]SPLIT-00000-of-00001.parquet`, in order.

    A subset may be left out where there is only one. Where no file has the usual name of a split, all of them are the
    split train. Raises `DataError` with what there is.
    """
    path, subset, split = wanted.path, wanted.subset, wanted.split
    if not names:
        raise DataError(f"{wanted.setting}: no file with rows there ({', '.join(ENDINGS)}).")
    known = [(name, *_place(name)) for name in sorted(names)]
    subsets = sorted({place for _, place, _ in known})
    if subset is None and len(subsets) > 1:
        raise DataError(
            f"data.subset=null: {path} has several subsets: {', '.join(subsets)}. Choose one with data.subset=NAME."
        )
    if subset is not None and subset not in subsets and subsets != [""]:
        raise DataError(f"data.subset={subset}: {path} has no such subset{suggest(subset, subsets)}")
    place = subsets[0] if subset is None or subsets == [""] else subset
    splits = sorted({part for _, of, part in known if of == place})
    if split in (None, "train") and not any(part.split("_")[0] in SPLITS or part == split for part in splits):
        chosen = [name for name, of, _ in known if of == place]
    else:
        split = split or (splits[0] if len(splits) == 1 else "test")
        chosen = [name for name, of, part in known if (of, part) == (place, split)]
    if not chosen:
        raise DataError(f"{wanted.split_key}={split}: {path} has no such split{suggest(str(split), splits)}")
    if len(formats := sorted(set(map(format_named, chosen)))) > 1:
        raise DataError(
            f"{wanted.setting}: a folder with files of several formats: {', '.join(formats)}. Name those of one: "
            f"{wanted.key}={path.rstrip('/')}/**/*.{formats[0]}"
        )
    return chosen


def _place(name: str) -> tuple[str, str]:
    """Subset and split of a file's path."""
    *folders, file = (part for part in name.split("/") if part != "data")
    pieces = [_without_number(piece) for piece in file.partition(".")[0].split("-")]
    split = next((piece for piece in pieces if piece in SPLITS), "")
    if not split and folders and (pieces[0].isdigit() or folders[-1] in SPLITS):
        return "/".join(folders[:-1]), folders[-1]
    return "/".join(folders), split or pieces[0]


def _without_number(piece: str) -> str:
    """The split of `train_0` and `train0`; other names stay as they are."""
    bare = re.sub(r"_?\d+$", "", piece)
    return bare if bare in SPLITS else piece


def _hub_files(wanted: DataSelection) -> tuple[list[str], Callable[[str], Path]]:
    hub = importlib.import_module("huggingface_hub")
    errors = importlib.import_module("huggingface_hub.errors")
    of_client = errors.HfHubHTTPError.__bases__[0]
    """The HTTP client's own error, by whatever name: a host that is not found is no `OSError` there."""
    try:
        listed = hub.HfApi().list_repo_files(wanted.path, repo_type="dataset", revision=PARQUET_REVISION)
    except (
        of_client, errors.HFValidationError, errors.OfflineModeIsEnabled, OSError, RuntimeError
    ) as error:  # fmt: skip
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"{wanted.setting}: neither files of this machine nor a dataset that the Hugging Face hub hands out here "
            f"({first_line}). Check the id and the connection; a private dataset needs `hf auth login`. Or download "
            f"its files, and set {wanted.key} to one of them or to their folder."
        ) from error

    def fetch(name: str) -> Path:
        return Path(hub.hf_hub_download(wanted.path, name, repo_type="dataset", revision=PARQUET_REVISION))

    return [name for name in listed if name.endswith(".parquet")], fetch


def _joined(opened: "Sequence[RawRows | pa.Table]", files: Sequence[DataFile], folder: Path, label: str) -> RawRows:
    """The rows of files, one after the other: those of tables as of one, so that all have the same columns."""
    tables, sizes = [one for one in opened if isinstance(one, pa.Table)], [file.path.stat().st_size for file in files]
    if len(tables) == len(opened):
        return ArrowRows(label, tables, folder, sum(sizes))
    parts: list[RawRows] = [
        ArrowRows(file.place, [one], folder, size) if isinstance(one, pa.Table) else one
        for one, file, size in zip(opened, files, sizes, strict=True)
    ]
    return parts[0] if len(parts) == 1 else JoinedRows(parts, folder)


def _open(file: DataFile, folder: Path, texts: Collection[str]) -> "RawRows | pa.Table":
    """Open a file in its format. Raises `DataError`."""
    source, place = cast(BinaryIO, file.path.open("rb")), file.place
    form = _format_of(source, place)
    if is_compressed := form in COMPRESSIONS.values():
        source = _decompressed(source, form, place)
        form = _format_of(source, place)
    if form == JSON:
        return JsonLineRows(source, place, folder)
    with source:
        if form == JSON_LIST:
            return JsonListRows(source.read(), place, folder)
        try:
            native = pa.PythonFile(source) if is_compressed else pa.memory_map(str(file.path))
            return _table(native, form, place, texts)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{place}: reading it as {form} failed: {error}") from error


def _format_of(source: BinaryIO, place: str) -> str:
    """The format or the compression of a file that is at its beginning. Raises `DataError`."""
    start = source.read(256)
    source.seek(0)
    if form := next((form for beginning, form in BEGINNINGS.items() if start.startswith(beginning)), ""):
        return form
    named, text = format_named(place), start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"version https://git-lfs"):
        raise DataError(f"{place}: a pointer of Git LFS stands in the place of the file. Fetch it: git lfs pull.")
    if named in (PARQUET, ARROW):
        raise DataError(f"{place}: its name says {named}, and its bytes do not: it begins with {start[:20]!r}.")
    if text.startswith(b"["):
        return JSON_LIST
    return CSV if named == CSV and not text.startswith(b"{") else JSON


def _decompressed(source: BinaryIO, compression: str, place: str) -> BinaryIO:
    """What a file holds, in a temporary one."""
    found = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - whoever reads the rows keeps it open
    try:
        with source, pa.CompressedInputStream(pa.PythonFile(source), compression) as stream:
            shutil.copyfileobj(stream, found)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{place}: reading it as {compression} failed: {error}") from error
    found.seek(0)
    return found


def _table(native: pa.NativeFile, form: str, place: str, texts: Collection[str]) -> pa.Table:
    if form == PARQUET:
        return pyarrow.parquet.read_table(native)
    if form == ARROW:
        is_file = native.read(6) == b"ARROW1"
        native.seek(0)
        return (pa.ipc.open_file if is_file else pa.ipc.open_stream)(native).read_all()
    return pyarrow.csv.read_csv(
        native,
        parse_options=pyarrow.csv.ParseOptions(
            delimiter="\t" if ending_of(place) == ".tsv" else ",", newlines_in_values=True
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(texts, pa.string()), strings_can_be_null=True, null_values=[""]
        ),
    )
