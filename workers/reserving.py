"""Room for files in shared memory, taken before anything is written: a write through a mapping that finds the file
system full kills its process."""

import errno
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
Spans = Sequence[tuple[int, int]]
"""Ranges of bytes, first and last-plus-one, in order, that do not overlap."""


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
