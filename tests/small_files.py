"""A disk that is full, on every machine and for any user: the kernel lets this process's files grow to some size and
no further. What crosses it is written in part, then raises `OSError`, as on a disk without room. See `tests/tmpfs.py`
for a real one."""

import contextlib
import resource
from collections.abc import Iterator


def let_files_grow_to(num_bytes: int) -> None:
    """Limit the size of all files of this process, until it is said otherwise. -1: no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if num_bytes < 0 else num_bytes, hard))


@contextlib.contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    let_files_grow_to(num_bytes)
    try:
        yield
    finally:
        let_files_grow_to(-1)
