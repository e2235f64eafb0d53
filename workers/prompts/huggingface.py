"""Rows of a dataset on the Hugging Face hub, or of parquet files in a local folder.

The hub keeps every public dataset converted to parquet under the revision `refs/convert/parquet`; those files are
fetched and read with Arrow, so no loader code runs and the `datasets` package is not needed.
"""

import importlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.conf.errors import DataError, suggest

PARQUET_REVISION = "refs/convert/parquet"


class ParquetRows:
    """Rows of parquet files, memory-mapped, one after the other."""

    def __init__(self, name: str, files: list[Path]) -> None:
        self.name = name
        try:
            tables = [pq.read_table(file, memory_map=True) for file in files]
            self._table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
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
        return ParquetRows(label, [folder / name for name in choose_files(names, path, subset, split)])
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
    try:
        listed = hub.HfApi().list_repo_files(path, repo_type="dataset", revision=PARQUET_REVISION)
    except (
        errors.HfHubHTTPError,
        errors.HFValidationError,
        errors.OfflineModeIsEnabled,
        OSError,
        RuntimeError,
    ) as error:
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"data.path={path}: neither a local folder nor a dataset that the Hugging Face hub hands out here "
            f"({first_line}). "
            "Check the id and the connection; a private dataset needs `hf auth login`. Or download its parquet files "
            "and set "
            "data.path to their folder, or export them as JSON lines (data.source=jsonl)."
        ) from error

    def fetch(name: str) -> Path:
        return Path(hub.hf_hub_download(path, name, repo_type="dataset", revision=PARQUET_REVISION))

    return [name for name in listed if name.endswith(".parquet")], fetch
