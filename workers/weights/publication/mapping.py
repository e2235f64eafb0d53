"""Memory mappings of publications: those that a writer keeps from one to the next, and page tables filled in advance.

Two files take turns (`reused_files.py`), so a trainer rank maps each of them once and from then on writes at the speed
of memory: no page fault, and no lock of the file that ranks would wait for, as with `write(2)`.
"""

import contextlib
import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path

POPULATE_READ, POPULATE_WRITE = 22, 23
"""madvise(2), Linux 5.14; the `mmap` module has no names for them."""
POPULATE_BYTES = 8 * 2**20
"""Bytes that are filled at a time: the call holds the interpreter's lock, so that a step of generation can come
between."""


@dataclass(frozen=True)
class _Kept:
    """A mapping. `descriptor` keeps the inode's number from being used again while the mapping stands for it."""

    descriptor: int
    memory: mmap.mmap
    root: Path

    def is_current(self, root: Path) -> bool:
        return self.root == root and os.fstat(self.descriptor).st_nlink > 0


class KeptMappings:
    """A process's mappings of files that it writes again and again. Lifecycle: `let_go` and `writable` for each
    version; `close`. Threads may share it: a mapping that one releases stays with the threads that have it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], _Kept] = {}
        """Mappings by device and inode."""
        self._lock = threading.Lock()

    def writable(self, file: Path, root: Path) -> tuple[mmap.mmap, bool]:
        """Map the whole file, shared and writable; also return whether this process has just mapped it. The mapping
        stays the same as long as it is the same file of the same size."""
        with self._lock:
            descriptor = os.open(file, os.O_RDWR)
            status = os.fstat(descriptor)
            key = (status.st_dev, status.st_ino)
            if key in self._kept and len(self._kept[key].memory) == status.st_size:
                os.close(descriptor)
                return self._kept[key].memory, False
            if key in self._kept:
                os.close(self._kept.pop(key).descriptor)
            self._kept[key] = _Kept(descriptor, mmap.mmap(descriptor, status.st_size), root)
            return self._kept[key].memory, True

    def let_go(self, root: Path) -> None:
        """End mappings of removed files, whose memory they hold, and of other roots than this."""
        with self._lock:
            for key in [key for key, kept in self._kept.items() if not kept.is_current(root)]:
                os.close(self._kept.pop(key).descriptor)

    def close(self) -> None:
        with self._lock:
            while self._kept:
                os.close(self._kept.popitem()[1].descriptor)


def populate(memory: mmap.mmap, start: int, end: int, advice: int) -> None:
    """Fill the page tables of bytes `[start, end)`. Kernels before 5.14 refuse: then the first access does it."""
    start -= start % mmap.PAGESIZE
    with contextlib.suppress(OSError):
        for position in range(start, end, POPULATE_BYTES):
            memory.madvise(advice, position, min(POPULATE_BYTES, end - position))
