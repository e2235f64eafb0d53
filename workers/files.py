"""Files that may lie elsewhere: fsspec URLs (s3://bucket/run) beside plain paths. For checkpoints.

Imports fsspec when a URL is met, so that plain paths need nothing.
"""

import contextlib
import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from penstock.conf.errors import CheckpointError


@dataclass(frozen=True)
class SavedFile:
    """What a rank has written. `checksum`: xxh3-128 of the bytes, hexadecimal."""

    name: str
    num_bytes: int
    checksum: str


def is_url(place: str) -> bool:
    return "://" in place


def upload(file: Path, url: str) -> None:
    """One file to `url/<name>`. Raises `CheckpointError`."""
    system, root = _open(url)
    try:
        system.makedirs(root, exist_ok=True)
        system.put_file(str(file), f"{root}/{file.name}")
    except OSError as error:
        raise CheckpointError(f"{url}/{file.name}: cannot be written: {error}") from None


def upload_directory(directory: Path, url: str) -> None:
    """All files below a directory, by the same names."""
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        parent = file.parent.relative_to(directory).as_posix()
        upload(file, url if parent == "." else f"{url}/{parent}")


def read_text(place: str) -> str:
    """A whole file. Raises `FileNotFoundError`."""
    if not is_url(place):
        return Path(place).read_text()
    system, root = _open(place)
    return bytes(system.cat_file(root)).decode()


def write_text(place: str, text: str) -> None:
    """A whole file in one step: readers see the old one or the new one. Raises `CheckpointError`."""
    try:
        if is_url(place):
            system, root = _open(place)
            system.makedirs(root.rpartition("/")[0], exist_ok=True)
            system.pipe_file(root, text.encode())
            return
        target = Path(place)
        part = target.with_name(f".{target.name}.part")
        part.write_text(text)
        part.replace(target)
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be written: {error}") from None


def download(url: str, directory: Path) -> None:
    """All files below `url`. Raises `CheckpointError` if there is nothing, or it cannot be read."""
    system, root = _open(url)
    try:
        names = system.find(root)
        for name in names:
            target = directory / name[len(root) :].lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(name, str(target))
    except OSError as error:
        raise CheckpointError(f"{url}: cannot be read: {error}") from None
    if not names:
        raise CheckpointError(f"{url}: nothing is there.")


def list_names(place: str) -> list[str]:
    """Names of what lies directly in a directory or URL; nothing if it is not there."""
    if not is_url(place):
        path = Path(place)
        return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    system, root = _open(place)
    try:
        return sorted(name.rstrip("/").rpartition("/")[2] for name in system.ls(root, detail=False))
    except FileNotFoundError:
        return []


def exists(place: str) -> bool:
    if not is_url(place):
        return Path(place).exists()
    system, root = _open(place)
    return bool(system.exists(root))


def remove(place: str) -> None:
    """A file, or a directory with all that is in it; nothing happens if it is not there."""
    if not is_url(place):
        if Path(place).is_dir():
            shutil.rmtree(place, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                Path(place).unlink()
        return
    system, root = _open(place)
    if system.exists(root):
        system.rm(root, recursive=True)


def _open(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        system, root = url_to_fs(url, use_listings_cache=False)
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            f"{url}: no file system for it ({error}). checkpoint.directory takes a path or an fsspec URL; some kinds "
            "want a package, such as s3fs for s3://."
        ) from None
    return system, str(root).rstrip("/")


def saved_file(path: Path) -> SavedFile:
    """Size and checksum of a file, read back."""
    with path.open("rb") as source:
        checksum = hashlib.file_digest(source, xxhash.xxh3_128).hexdigest()
    return SavedFile(path.name, path.stat().st_size, checksum)
