"""Files that may lie elsewhere: fsspec URLs (s3://bucket/run) or plain paths. For checkpoints and for runs at a URL.

fsspec does both, except for renaming a local file into its place: fsspec's own transactions write in another directory
first, from where a file may have to be copied.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from penstock.conf.errors import CheckpointError
from penstock.network.names import OutsideName, below
from penstock.store.data import durable
from penstock.workers.runtime.local_files import DirectReader, replacing

BLOCK_BYTES = 2**20
"""Bytes that are read from a URL and summed at a time, while they are in the cache."""
AHEAD_BYTES = 2**24
"""Bytes that are asked for at a time from a URL."""


@dataclass(frozen=True)
class SavedFile:
    """The name, size and checksum of a file as it was written. `checksum`: xxh3-128 of the bytes, hexadecimal."""

    name: str
    num_bytes: int
    checksum: str

    @classmethod
    def of_bytes(cls, name: str, data: bytes) -> "SavedFile":
        return cls(name, len(data), xxhash.xxh3_128_hexdigest(data))


def is_url(place: str) -> bool:
    return "://" in place


def absolute(place: str) -> str:
    """The path from the root, whatever directory a process works in later; a URL as it is."""
    return place if is_url(place) else str(Path(place).expanduser().resolve())


def upload(file: Path, url: str) -> None:
    """Upload one file to `url/<name>`, which is seen whole or not at all. Raises `CheckpointError`."""
    with _opened(url, "written", f"/{file.name}") as (system, root):
        system.makedirs(root, exist_ok=True)
        with _staged_path(system, f"{root}/{file.name}") as place:
            system.put_file(str(file), place)


def upload_directory(directory: Path, url: str) -> None:
    """Upload all files below a directory, under the same names."""
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        parent = file.parent.relative_to(directory).as_posix()
        upload(file, url if parent == "." else f"{url}/{parent}")


class RemoteFile:
    """A file at a URL, with the methods of `DirectReader` for a local one."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill the target from byte `offset` on. Raises `EOFError`."""
        self._file.seek(offset)
        while target:
            count = self._file.readinto(target)
            if not count:
                raise EOFError(f"the file ends {len(target):,} bytes too early")
            target = target[count:]

    def blocks(self) -> Iterator[memoryview]:
        """The whole file, block by block."""
        while block := self._file.read(BLOCK_BYTES):
            yield memoryview(block)


@contextlib.contextmanager
def open_file(place: str) -> Iterator[DirectReader | RemoteFile]:
    """Open a large file, to be read once. Raises `OSError`."""
    if not is_url(place):
        with contextlib.closing(DirectReader(place)) as here:
            yield here
        return
    system, path = _open(place)
    with system.open(path, "rb", block_size=AHEAD_BYTES) as file:
        yield RemoteFile(file)


def read_text(place: str) -> str:
    """Read a whole file. Raises `FileNotFoundError`."""
    system, path = _open(place)
    return bytes(system.cat_file(path)).decode()


def read_optional(place: str) -> bytes | None:
    """Read a whole file; None if it is not there. Raises `CheckpointError` if that cannot be found out."""
    with _opened(place, "read") as (system, path):
        try:
            return bytes(system.cat_file(path))
        except (FileNotFoundError, NotADirectoryError):
            return None


def write_text(place: str, text: str) -> None:
    """Write a whole file in one step: readers see the old one or the new one. Raises `CheckpointError`."""
    write_bytes(place, text.encode())


def write_bytes(place: str, data: bytes) -> None:
    """Write a whole file in one step, like `write_text`."""
    with _opened(place, "written") as (system, path):
        if is_url(place):
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
        with _staged_path(system, path) as target:
            system.pipe_file(target, data)


def find(url: str) -> list[str]:
    """Names of all files below a URL, relative to it. Raises `CheckpointError` if that cannot be found out."""
    with _opened(url, "read") as (system, root):
        return sorted(name[len(root) :].lstrip("/") for name in system.find(root))


def file_versions(url: str) -> dict[str, tuple[int, str]]:
    """All files below by name, except links: size, and what the file system says of the version or the time. A file for
    which both are unchanged has not changed. Raises `CheckpointError`."""
    with _opened(url, "read") as (system, root):
        return {
            name[len(root) :].lstrip("/"): (
                int(info.get("size") or 0),
                next((str(info[key]) for key in ("ETag", "LastModified", "mtime", "created") if info.get(key)), ""),
            )
            for name, info in system.find(root, detail=True).items()
            if not info.get("islink")
        }


def download(url: str, directory: Path, names: Iterable[str] | None = None) -> None:
    """Download all files below `url`, or these, in this order. Raises `CheckpointError` if there is nothing, if it
    cannot be read, or if a name leads out of the directory: then nothing is written."""
    names = find(url) if names is None else list(names)
    try:
        targets = [(name, below(directory, name)) for name in names]
    except OutsideName as error:
        raise CheckpointError(f"{url}: {error} Nothing is brought from there: see who writes to it.") from None
    with _opened(url, "read") as (system, root):
        for name, target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
            system.get_file(f"{root}/{name}", str(target))
    if not names:
        raise CheckpointError(f"{url}: nothing is there.")


def list_names(place: str) -> list[str]:
    """Names of what lies directly in a directory or URL; nothing if it is not there. Raises `CheckpointError` if that
    cannot be found out."""
    with _opened(place, "read") as (system, path):
        try:
            return sorted(name.rstrip("/").rpartition("/")[2] for name in system.ls(path, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []


def exists(place: str) -> bool:
    """Return whether something is there. Raises `CheckpointError` if that cannot be found out. (fsspec's own `exists`
    says no then, and what does not exist is removed.)"""
    with _opened(place, "read") as (system, path):
        try:
            system.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


def file_fault(directory: str, file: SavedFile, check_wanted: Callable[[], None] = lambda: None) -> str | None:
    """The fault of a file that ought to lie in a directory or URL, read to its end, as half a sentence; None: nothing.
    `check_wanted`: called now and then; what it raises ends the reading. Raises `CheckpointError` if that cannot be
    found out."""
    place = f"{directory}/{file.name}"
    try:
        below(Path(), file.name)
    except OutsideName:
        return "is no name of a file of its directory"
    if fault := size_fault(place, file.num_bytes):
        return fault
    try:
        found = _checksum(place, check_wanted)
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be read: {error}") from None
    if found != file.checksum:
        return f"is damaged: its checksum is {found}, and what was written has {file.checksum}"
    return None


def _checksum(place: str, check_wanted: Callable[[], None]) -> str:
    digest = xxhash.xxh3_128()
    with open_file(place) as source:
        for block in source.blocks():
            digest.update(block)
            check_wanted()
    return digest.hexdigest()


def size_fault(place: str, num_bytes: int) -> str | None:
    """The fault of a file that ought to have so many bytes, as half a sentence; None: nothing. Raises `CheckpointError`
    if that cannot be found out."""
    with _opened(place, "read") as (system, path):
        try:
            size = system.info(path)["size"]
        except (FileNotFoundError, NotADirectoryError):
            return "is missing"
    return None if size == num_bytes else f"has {size:,} bytes instead of {num_bytes:,}"


def remove(place: str) -> None:
    """Remove a file for good, or a directory as far as what is in it can be removed; nothing happens if it is not
    there. Raises `CheckpointError`."""
    with _opened(place, "removed") as (system, path):
        if system.isdir(path):
            with contextlib.suppress(OSError):
                system.rm(path, recursive=True)
        else:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                system.rm_file(path)
                if type(system) is LocalFileSystem:
                    durable.sync_name(path)


def move(place: str, to: str) -> None:
    """Move a directory to another name on the same file system. Raises `CheckpointError`."""
    with _opened(place, "moved") as (system, path):
        system.mv(path, _open(to)[1], recursive=True)


def sync(place: str) -> None:
    """Have all files of a directory survive a power cut; those of a URL do. Raises `CheckpointError`."""
    with _opened(place, "written") as (system, path):
        if type(system) is LocalFileSystem:
            durable.sync_tree(path)


def _open(place: str) -> tuple[Any, str]:
    """The file system of a place, and the place as that file system names it."""
    if not is_url(place):  # whatever its name has: `~` and `::` mean something in URLs
        return LocalFileSystem(), os.path.abspath(place)
    try:
        system, root = url_to_fs(place, use_listings_cache=False)
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            f"{place}: no file system for it ({error}). output_dir and checkpoint.directory take a path or an fsspec "
            "URL; some kinds want a package, such as s3fs for s3://."
        ) from None
    return system, str(root).rstrip("/")


@contextlib.contextmanager
def _opened(place: str, what: str, name: str = "") -> Iterator[tuple[Any, str]]:
    """The file system of a place, and the place as that file system names it. Raises `CheckpointError` for what fails
    in the block. `what`: written or read; `name`: the end of the place that is; both for the message."""
    opened = _open(place)
    place += name
    try:
        yield opened
    except OSError as error:
        raise CheckpointError(f"{place}: cannot be {what}: {error}") from error
    except Exception as error:
        if not is_url(place):
            raise
        # Libraries of file systems raise what they like: botocore's lost connection is no OSError.
        raise CheckpointError(f"{place}: cannot be {what}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _staged_path(system: Any, path: str) -> Iterator[str]:
    """The place to write to within the block so that `path` is seen whole: object stores ensure it themselves."""
    if type(system) is not LocalFileSystem:
        yield path
        return
    with replacing(Path(path), synced=True) as part:
        yield str(part)


def saved_file(path: Path) -> SavedFile:
    """Size and checksum of a file, read back."""
    with path.open("rb") as source:
        checksum = hashlib.file_digest(source, xxhash.xxh3_128).hexdigest()
    return SavedFile(path.name, path.stat().st_size, checksum)
