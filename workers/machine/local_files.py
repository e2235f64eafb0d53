"""Files of this machine: written whole or not at all, and with the room that they need.

A file is written beside its place, then renamed into it. Readers see the old file or the new one, and so does the next
process if this one is killed. For files that another process may read meanwhile: run directories, checkpoints,
publications.

Free space is measured before a write, for the error message if the write fails. In shared memory it is reserved before
anything is written, as a write through a mapping that finds the file system full kills its process.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.store.data import durable

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
Spans = Sequence[tuple[int, int]]
"""Ranges of bytes, first and last-plus-one, in order, that do not overlap."""


@contextlib.contextmanager
def replacing(target: Path, *, synced: bool = False) -> Iterator[Path]:
    """Yield the file to write within the block; it becomes `target` at its end. `synced`: it is there after a power
    cut too."""
    part = part_of(target)
    try:
        yield part
        if synced:
            durable.sync(part)
            durable.rename(part, target)
        else:
            part.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):  # the file system may be away
            part.unlink()
        raise


@contextlib.contextmanager
def filling(target: Path) -> Iterator[Path]:
    """Yield a new directory to write to within the block. At its end what is there comes into `target`, beside what
    that has already, and survives a power cut; nothing comes if the block fails."""
    is_there = target.is_dir()
    part = target / ".new.part" if is_there else part_of(target)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        durable.sync_tree(part)
        if not is_there:
            durable.rename(part, target)
            return
        for file in sorted(path for path in part.rglob("*") if path.is_file()):
            place = target / file.relative_to(part)
            place.parent.mkdir(parents=True, exist_ok=True)
            durable.rename(file, place)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def part_of(target: Path) -> Path:
    """The path where a file is written until it is whole."""
    return target.with_name(f".{target.name}.part")


def write_whole(target: Path, text: str, *, synced: bool = False) -> None:
    with replacing(target, synced=synced) as part:
        part.write_text(text, encoding="utf-8")


class FreeSpace:
    """The free space before a write. Lifecycle: `measure` before writing, `too_little` if that has failed."""

    def __init__(self, needed_bytes: int) -> None:
        self._needed_bytes = needed_bytes
        self._free_bytes: int | None = None

    def measure(self, directory: str | Path) -> None:
        """Note the free space where a directory is or is to be made."""
        path = Path(directory)
        with contextlib.suppress(OSError):
            existing = next(place for place in (path, *path.absolute().parents) if place.is_dir())
            self._free_bytes = shutil.disk_usage(existing).free

    def too_little(self, advice: str) -> str:
        """Text to add to the error where little space may be the cause: others want some of it as well."""
        if self._free_bytes is None or self._free_bytes > 2 * self._needed_bytes:
            return ""
        return f". Its part alone needs {self._needed_bytes:,} bytes, and {self._free_bytes:,} were free. {advice}"


@dataclass(frozen=True)
class Shortage:
    """The reason why a file has no room. `needed_bytes`: of the file, including the pages that it has."""

    needed_bytes: int
    free_bytes: int
    total_bytes: int


def reserve(file: Path, num_bytes: int, spans: Spans | None = None, leave_bytes: int = 0) -> Shortage | None:
    """Give a file its size, and pages where the spans are (None: everywhere). None: it has them.

    `leave_bytes`: what must be free afterwards. A file of that size that has the pages already stays as it is. Short of
    room, the file may have a part of its pages; it is the caller's to remove.
    """
    spans = spans if spans is not None else [(0, num_bytes)]
    needed = sum(end - start for start, end in spans)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        status = os.fstat(descriptor)
        present = status.st_blocks * 512
        if status.st_size != num_bytes:
            os.ftruncate(descriptor, num_bytes)
        elif present >= needed:
            return None
        if shutil.disk_usage(file.parent).free + present < needed + leave_bytes:
            return _shortage(file, needed)
        for start, end in spans:
            os.posix_fallocate(descriptor, start, end - start)
    except OSError as error:
        if error.errno not in FULL:
            raise
        return _shortage(file, needed)
    finally:
        os.close(descriptor)
    return None


def _shortage(file: Path, needed_bytes: int) -> Shortage:
    usage = shutil.disk_usage(file.parent)
    return Shortage(needed_bytes, usage.free, usage.total)
