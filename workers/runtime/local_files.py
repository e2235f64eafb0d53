"""Files of this machine: written whole or not at all, with the room that they need, or past the kernel's page cache.

A file is written beside its place, then renamed into it. Readers see the old file or the new one, and so does the next
process if this one is killed. For files that another process may read meanwhile: run directories, checkpoints,
publications.

Free space is measured before a write, for the error message if the write fails. In shared memory it is reserved before
anything is written, as a write through a mapping that finds the file system full kills its process.

Checkpoints, written once and seldom read, go by direct I/O (`O_DIRECT`):

    write ─▶ a block, aligned as disks want it, summed while it is in the cache ─▶ disk
    disk  ─▶ a block ─▶ `read_into`, `blocks`

Through the page cache the kernel finds, zeroes and fills a page for every 4 KiB, on a core that training wants. What
cannot go directly goes through the cache: the last bytes of a file, and all of it where the file system knows no
`O_DIRECT`.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from penstock.store.data import durable

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
Spans = Sequence[tuple[int, int]]
"""Ranges of bytes, first and last-plus-one, in order, that do not overlap."""
BLOCK_BYTES = 2**22
"""Bytes that are copied, summed and written to the disk at a time: enough for the disk's full rate, and little enough
for a cache."""


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
def staged_directory(target: Path) -> Iterator[Path]:
    """Yield a new directory to write to within the block. At its end its files come into `target`, beside those
    there already, and survive a power cut; nothing comes if the block fails."""
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
    """The free space before a write. Lifecycle: `measure` before writing, `shortage_text` if that has failed."""

    def __init__(self, needed_bytes: int) -> None:
        self._needed_bytes = needed_bytes
        self._free_bytes: int | None = None

    def measure(self, directory: str | Path) -> None:
        """Note the free space where a directory is or is to be made."""
        path = Path(directory)
        with contextlib.suppress(OSError):
            existing = next(place for place in (path, *path.absolute().parents) if place.is_dir())
            self._free_bytes = shutil.disk_usage(existing).free

    def shortage_text(self, advice: str) -> str:
        """Text to add to the error where little space may be the cause: other processes take some as well."""
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


class DirectWriter:
    """Writer of a new file. Lifecycle: `write`, again and again; `finish`; `close`. Raises `OSError`."""

    def __init__(self, path: str | Path) -> None:
        self._descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._block = _aligned_block()
        self._filled = 0
        self._digest = xxhash.xxh3_128()
        self.num_bytes = 0

    @property
    def checksum(self) -> str:
        """The xxh3-128 of what was to be written, hexadecimal. Valid after `finish`."""
        return self._digest.hexdigest()

    def write(self, data: memoryview) -> None:
        left = np.frombuffer(data, np.uint8)
        self.num_bytes += len(left)
        while len(left):
            some = left[: BLOCK_BYTES - self._filled]
            np.copyto(self._block[self._filled : self._filled + len(some)], some)
            self._filled += len(some)
            left = left[len(some) :]
            if self._filled == BLOCK_BYTES:
                self._flush()

    def finish(self) -> None:
        """Write what is left; all of the file is on the disk when this returns."""
        self._flush()
        durable.sync_opened(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def _flush(self) -> None:
        data = self._block[: self._filled].data
        self._digest.update(data)
        while data:
            data = data[_transfer_direct(self._descriptor, partial(os.write, self._descriptor, data)) :]
        self._filled = 0


class DirectReader:
    """Reader of any ranges of a file; each block is read once where they come in order. Raises `OSError`."""

    def __init__(self, path: str | Path) -> None:
        self._descriptor = _open(path, os.O_RDONLY)
        self._size = os.fstat(self._descriptor).st_size
        self._block = _aligned_block()
        self._start = self._filled = 0
        """First byte of the file in the block, and number of bytes in it."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill the target from byte `offset` on. Raises `EOFError`."""
        left = np.frombuffer(target, np.uint8)
        while len(left):
            there = self._from(offset)[: len(left)]
            if not len(there):
                raise EOFError(f"the file ends {len(left):,} bytes too early")
            np.copyto(left[: len(there)], there)
            left, offset = left[len(there) :], offset + len(there)

    def blocks(self) -> Iterator[memoryview]:
        """The whole file; each block is valid until the next is asked for."""
        offset = 0
        while len(block := self._from(offset)):
            yield block.data
            offset += len(block)

    def close(self) -> None:
        os.close(self._descriptor)

    def _from(self, offset: int) -> np.ndarray:
        """The part of a block from a byte of the file on; empty at the file's end."""
        if not self._start <= offset < self._start + self._filled:
            self._start = offset - offset % BLOCK_BYTES
            self._filled = self._fill()
        return self._block[offset - self._start : self._filled]

    def _fill(self) -> int:
        filled, wanted = 0, min(BLOCK_BYTES, self._size - self._start)
        while filled < wanted:
            read = partial(os.preadv, self._descriptor, [self._block[filled:].data], self._start + filled)
            count = _transfer_direct(self._descriptor, read)
            if not count:  # it was cut off meanwhile
                break
            filled += count
        return filled


def _open(path: str | Path, flags: int) -> int:
    with contextlib.suppress(OSError):
        return os.open(path, flags | os.O_DIRECT, 0o666)
    return os.open(path, flags, 0o666)


def _aligned_block() -> np.ndarray:
    """A block of whole pages."""
    return np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)


def _transfer_direct(descriptor: int, transfer: Callable[[], int]) -> int:
    """Transfer directly. After `EINVAL`, where the file system cannot transfer these bytes directly, the page cache is
    used from here on."""
    try:
        return transfer()
    except OSError as error:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return transfer()
