"""The memory of everything below a process, read from /proc: what stands in for a cgroup where there can be none."""

import resource
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = resource.getpagesize()


def memory_below(pid: int) -> int:
    """Bytes that the process's descendants have made their own: anonymous memory, less what each shares with the
    process itself, as whose copy it began. Without /tmp and files."""
    own = anonymous(pid)
    return sum(max(0, anonymous(child) - own) for child in descendants(pid))


def descendants(pid: int) -> list[int]:
    """Those that are seen on the way; some may end, and others begin, meanwhile."""
    found: list[int] = []
    ahead = [pid]
    while ahead:
        children = _children(ahead.pop())
        found += children
        ahead += children
    return found


def anonymous(pid: int) -> int:
    """Bytes; 0 for a process that is gone."""
    with suppress(OSError, ValueError):
        _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
        return (resident - shared) * PAGE_BYTES
    return 0


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, file.read_text().split())
    return found
