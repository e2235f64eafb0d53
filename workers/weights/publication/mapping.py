"""Memory mappings of publications: those that a writer keeps from one to the next, and page tables filled in advance.

Two files take turns (`reused_files.py`), so a trainer rank maps each of them once and from then on writes at the speed
of memory: no page fault, and no lock of the file that ranks would wait for, as with `write(2)`. Used by
`publication.py` and `reading.py`.
"""

import contextlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

POPULATE_READ, POPULATE_WRITE = 22, 23
"""madvise(2), Linux 5.14; the `mmap` module has no names for them."""
POPULATE_BYTES = 8 * 2**20
"""At a time: the call holds the interpreter's lock, so that a step of generation can come between."""


@dataclass(frozen=True)
class _Kept:
    """`descriptor` keeps the inode's number from being used again while the mapping stands for it."""

    descriptor: int
    memory: mmap.mmap
    root: Path

    def is_current(self, root: Path) -> bool:
        return self.root == root and os.fstat(self.descriptor).st_nlink > 0


_kept: dict[tuple[int, int], _Kept] = {}
"""By device and inode. Of the process, as page tables are."""


def let_go(root: Path) -> None:
    """End the kept mappings of removed files, whose memory they hold, and of other roots than this."""
    for key in [key for key, kept in _kept.items() if not kept.is_current(root)]:
        os.close(_kept.pop(key).descriptor)


def writable_mapping(file: Path, root: Path) -> tuple[mmap.mmap, bool]:
    """The whole file, shared and writable, and whether this process has just mapped it: it is the same mapping as long
    as it is the same file of the same size."""
    descriptor = os.open(file, os.O_RDWR)
    status = os.fstat(descriptor)
    key = (status.st_dev, status.st_ino)
    if key in _kept and len(_kept[key].memory) == status.st_size:
        os.close(descriptor)
        return _kept[key].memory, False
    if key in _kept:
        os.close(_kept.pop(key).descriptor)
    _kept[key] = _Kept(descriptor, mmap.mmap(descriptor, status.st_size), root)
    return _kept[key].memory, True


def populate(memory: mmap.mmap, start: int, end: int, advice: int) -> None:
    """Fill the page tables of bytes `[start, end)`. Kernels before 5.14 refuse: then the first access does it."""
    start -= start % mmap.PAGESIZE
    with contextlib.suppress(OSError):
        for position in range(start, end, POPULATE_BYTES):
            memory.madvise(advice, position, min(POPULATE_BYTES, end - position))
