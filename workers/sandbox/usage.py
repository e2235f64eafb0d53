"""Memory and processor time of everything below a process, read from /proc: what stands in for a cgroup.

What can hide from it is refused by the filter of such fences (`seccomp.py`): memory that is shared and has no file.
"""

import os
from contextlib import suppress
from pathlib import Path

COUNTED = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
"""A page that several processes have counts for each in part. Pages of files are the system's."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
UTIME = 11
"""Index in what /proc/PID/stat says after the program's name. Next come system time, and both of children that were
waited for."""
DEFAULT_BUFFER_BYTES = 212_992


class Watch:
    """What one execution uses, looked at from outside every now and then.

    Processor time is a lower bound: a process that nobody waits for, and that ended between two looks, takes what it
    used after the first with it.
    """

    def __init__(self, keeper: int) -> None:
        self.keeper = keeper
        self.cpu_s = 0.0
        """Of the processes below the keeper so far."""
        self._seen_s = 0.0

    def look(self) -> int:
        """Bytes now; notes processor time as well."""
        below = descendants(self.keeper)
        seen_s = sum(map(processor_time_of, below))
        self.cpu_s += max(0.0, seen_s - self._seen_s)
        self._seen_s = seen_s
        return sum(map(memory_of, below)) + num_sockets(self.keeper) * 2 * buffer_bytes()


def memory_below(pid: int) -> int:
    """Bytes of the process's descendants. Without what lies in /tmp, pipes and sockets."""
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
    """Bytes; 0 for a process that is gone. One that may not be looked into counts with its whole address space: it may
    have seen to that itself, and a container without `CAP_SYS_PTRACE` refuses it for all."""
    process = Path(f"/proc/{pid}")
    with suppress(FileNotFoundError, ProcessLookupError):
        for place in (
            process,
            *process.glob("task/*"),
        ):  # where the first thread has ended, another tells
            with suppress(ProcessLookupError):
                return _memory_in(place)
    return 0


def _memory_in(place: Path) -> int:
    try:
        text = (place / "smaps_rollup").read_text()
    except PermissionError:
        return int((place / "statm").read_text().split()[0]) * PAGE_BYTES
    kib = 0
    for line in text.splitlines():
        name, *words = line.split()
        kib += int(words[0]) if name in COUNTED else 0
    return kib << 10


def processor_time_of(pid: int) -> float:
    """Seconds, with those of children that it has waited for; 0 for a process that is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, words[UTIME : UTIME + 4])) / TICKS_PER_S
    return 0.0


def num_sockets(pid: int) -> int:
    """Sockets of the process's network namespace: pairs, as there are no others behind a fence."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/net/sockstat").read_text().splitlines():
            if line.startswith("sockets: used "):
                return int(line.split()[2])
    return 0


def buffer_bytes() -> int:
    """The most that a socket's buffer may be set to. The kernel doubles it, for what it needs beside the data."""
    with suppress(OSError):
        return int(Path("/proc/sys/net/core/wmem_max").read_text())
    return DEFAULT_BUFFER_BYTES


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, file.read_text().split())
    return found
