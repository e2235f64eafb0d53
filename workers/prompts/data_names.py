"""What the name in `data.path` or `evaluation.path` means: files, a dataset of the hub, or a split.

This needs no package, so that a configuration is loaded at once.
"""

import glob
import re
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

JSON, CSV, PARQUET, ARROW = "json", "csv", "parquet", "arrow"
ENDINGS = {
    ".jsonl": JSON, ".ndjson": JSON, ".json": JSON, ".csv": CSV, ".tsv": CSV, ".parquet": PARQUET, ".arrow": ARROW,
    ".feather": ARROW,
}  # fmt: skip
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


def names_files(path: str) -> bool:
    """Return whether a path means files, which may be missing, and no dataset of the hub.

    >>> names_files("rows.csv.gz"), names_files("s3://bucket/rows"), names_files("openai/gsm8k")
    (True, True, False)
    """
    if re.search(r"\.py:\w+$", path):
        return False
    if "://" in path or glob.has_magic(path) or format_named(path) or path.startswith(("/", "./", "../", "~")):
        return True
    parts = PurePosixPath(path).parts
    return Path(path).exists() or len(parts) > 2 or (len(parts) == 2 and Path(parts[0]).is_dir())


def has_splits(path: str) -> bool:
    """Return whether a path is that of a folder or of a dataset of the hub, whose splits have names."""
    return not format_named(path) and not glob.has_magic(path) and not Path(path).expanduser().is_file()


def names_split(name: str, path: str) -> bool:
    """Return whether `evaluation.path` names a split of the data at `path`, and no files."""
    return bool(re.fullmatch(r"[\w.-]+", name)) and not format_named(name) and has_splits(path)


def format_named(place: str) -> str:
    """The format by a file's name; empty if it says none."""
    return ENDINGS.get(ending_of(place), "")


def ending_of(place: str) -> str:
    """The ending of a file's name, before that of its compression."""
    name = PurePosixPath(urlsplit(place).path if "://" in place else place)
    return name.with_suffix("").suffix if name.suffix in COMPRESSIONS else name.suffix
