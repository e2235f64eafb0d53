"""The files that `data.path` names, in whatever format: each is what its bytes and its name say.

    data.path ─▶ a file, a folder, a glob, a URL ─▶ files of one split, on this machine ─▶ format of each ─▶ rows
             ─▶ OWNER/NAME, which is no file ─▶ the Hugging Face hub

The hub keeps every public dataset converted to parquet under the revision `refs/convert/parquet`; those files are
fetched and read with Arrow, so no loader code runs and the `datasets` package is not needed.
"""

import glob
import importlib
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from penstock.conf.errors import DataError, suggest
from penstock.workers.machine.files import is_url
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
from penstock.workers.prompts.rows import ArrowRows, JoinedRows, JsonLines, JsonList, RawRows

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


@dataclass(frozen=True)
class DataFile:
    """A file with rows, on this machine. `place`: its path or URL, as people know it."""

    place: str
    path: Path


@dataclass(frozen=True)
class Wanted:
    """The rows that are wanted of a path, and the keys that say so, for messages."""

    path: str
    subset: str | None = None
    split: str | None = None
    """None: the only one, or the one called test."""
    key: str = "data.path"
    split_key: str = "data.split"

    @property
    def told(self) -> str:
        return f"{self.key}={self.path}"

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.path, self.subset, self.split)))


def open_table(wanted: Wanted, source: str, texts: Collection[str]) -> RawRows:
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
        raise DataError(f"{wanted.told}: {len(files)} file(s) of {rows.num_bytes} bytes with no rows.")
    return rows


def _find(wanted: Wanted) -> tuple[Path, list[DataFile], str]:
    """The folder that the rows' paths are relative to, the files, and their name for messages. Raises `DataError`."""
    path, (system, root, fetch) = wanted.path, _opened(wanted)
    with _told(wanted.told):
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


def _opened(wanted: Wanted) -> tuple[Any, str, Callable[[str], Path]]:
    """The file system of a path, the path as it names it, and what brings a file here. Raises `DataError`."""
    path = wanted.path
    if not is_url(path):
        return LocalFileSystem(), str(Path(path).expanduser().absolute()), Path
    try:
        system, root = url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise DataError(
            f"{wanted.told}: no file system for it ({error}). Some kinds want a package, such as s3fs for s3://."
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
def _told(what: str) -> Iterator[None]:
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


def _missing(wanted: Wanted) -> DataError:
    path, place = wanted.path, Path(wanted.path).expanduser()
    if is_url(path):
        return DataError(f"{wanted.told}: there is no such file or folder, or its host does not answer.")
    if glob.has_magic(path):
        return DataError(f"{wanted.told}: there is no file of this pattern (seen from {Path.cwd()}).")
    if not place.parent.is_dir():
        return DataError(f"{wanted.told}: there is no folder {place.parent.resolve()}.")
    near = [other.name for other in place.parent.iterdir()]
    hint = suggest(place.name, near) if near else "; the folder is empty."
    if len(place.parts) == 1 and not format_named(path):
        hint += (
            " A dataset of the hub is OWNER/NAME, or needs data.source=huggingface; a task of reasoning_gym needs "
            "data.source=reasoning_gym."
        )
    return DataError(f"{wanted.told}: there is no such file{hint}")


def choose_files(names: Collection[str], wanted: Wanted) -> list[str]:
    """The files of one subset and split among `SUBSET/SPLIT/0000.parquet` (the hub) or
    `[SUBSET/]SPLIT-00000-of-00001.parquet`, in order.

    A subset may be left out where there is only one. Where no file has the usual name of a split, all of them are the
    split train. Raises `DataError` with what there is.
    """
    path, subset, split = wanted.path, wanted.subset, wanted.split
    if not names:
        raise DataError(f"{wanted.told}: no file with rows there ({', '.join(ENDINGS)}).")
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
            f"{wanted.told}: a folder with files of several formats: {', '.join(formats)}. Name those of one: "
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


def _hub_files(wanted: Wanted) -> tuple[list[str], Callable[[str], Path]]:
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
            f"{wanted.told}: neither files of this machine nor a dataset that the Hugging Face hub hands out here "
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
        return JsonLines(source, place, folder)
    with source:
        if form == JSON_LIST:
            return JsonList(source.read(), place, folder)
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
