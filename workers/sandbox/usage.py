"""The memory of everything below a process, read from /proc: what stands in for a cgroup where there can be none."""

from contextlib import suppress
from pathlib import Path

COUNTED = ("Pss_Anon:", "Pss_Shmem:")
"""A page that several processes have counts for each in part. Pages of files are the system's."""


def memory_below(pid: int) -> int:
    """Bytes of the process's descendants. Without what lies in /tmp and pipes."""
    return sum(map(memory_of, descendants(pid)))


def descendants(pid: int) -> list[int]:
    """Those that are seen on the way; some may end, and others begin, meanwhile."""
    found: list[int] = []
    ahead = [pid]
    while ahead:
        children = _children(ahead.pop())
        found += children
        ahead += children
    return found


def memory_of(pid: int) -> int:
    """Bytes; 0 for a process that is gone."""
    kib = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, *words = line.split()
            kib += int(words[0]) if name in COUNTED else 0
    return kib << 10


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, file.read_text().split())
    return found
