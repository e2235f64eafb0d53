"""Reading and writing of large files by direct I/O (`O_DIRECT`), past the kernel's page cache: checkpoints, written
once and seldom read.

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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from penstock.store.data import durable

BLOCK_BYTES = 2**22
"""Bytes that are copied, summed and written to the disk at a time: enough for the disk's full rate, and little enough
for a cache."""


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
            data = data[_directly_if_possible(self._descriptor, partial(os.write, self._descriptor, data)) :]
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
            count = _directly_if_possible(self._descriptor, read)
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


def _directly_if_possible(descriptor: int, transfer: Callable[[], int]) -> int:
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
