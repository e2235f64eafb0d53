"""Memory and processor time of everything below a process, read from /proc, where there is no cgroup.

The filter of such fences (`seccomp.py`) refuses what could hide from it: memory that is shared and has no file.
"""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

COUNTED = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
"""Entries of `smaps_rollup` that are counted. A page that several processes have counts for each in part. Pages of
files are the system's."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STATE, UTIME, STARTED = 0, 11, 19
"""Indices of fields in /proc/PID/stat after the program's name. After UTIME come system time, and both of children that
were waited for."""
DEAD = "X"
"""State of a process that is being waited for: from here on its time may be its parent's already."""
DEFAULT_BUFFER_BYTES = 212_992
BUFFERS_HELD = 3
"""Most data that a socket holds, in sizes of its buffer: it takes a message as long as its buffer is not full, however
large that is, and the kernel may take twice the pages of one as large as the buffer (2.6 in all have been seen)."""

Process = tuple[int, int]
"""A process id, and when it started: another process may get the id later."""
Times = tuple[float, float]
"""Seconds of a process itself, and of children that it has waited for, with those that these have waited for."""


class Watch:
    """The usage of one execution, looked at from outside now and then."""

    def __init__(self, keeper: int) -> None:
        self.keeper = keeper
        self._time = ProcessorTime()

    def look(self) -> int:
        """Return the bytes used now; note processor time as well."""
        below = descendants(self.keeper)
        self._time.add(dict(found for found in map(times_of, below) if found is not None))
        return sum(map(memory_of, below)) + num_sockets(self.keeper) * BUFFERS_HELD * buffer_bytes()

    @property
    def cpu_s(self) -> float:
        """Processor time of the processes below the keeper so far."""
        return self._time.total_s


class ProcessorTime:
    """Processor time of some processes, some of which end between two looks. Pure.

    Once a process was waited for, its time is in its parent's, whether a look has seen it or not; what was counted of
    it is not counted again. So it is never more than was used. It may be less: the time after the last look is lost for
    a process that is never waited for, and what was counted of it is mistaken for the next time that comes in a
    parent's.
    """

    def __init__(self) -> None:
        self.total_s = 0.0
        self._seen: dict[Process, Times] = {}
        self._there: set[Process] = set()
        self._gone_s = 0.0
        """Seconds that were counted of processes that are gone, and have not come back in a parent's time."""

    def add(self, now: Mapping[Process, Times]) -> None:
        """Add the times of a look. `now`: of those that are there, each read after those that may wait for it."""
        own_s = waited_s = 0.0
        for process, (own, waited) in now.items():
            own_before, waited_before = self._seen.get(process, (0.0, 0.0))
            own_s += own - own_before
            waited_s += waited - waited_before
        self._gone_s += sum(sum(self._seen[process]) for process in self._there - now.keys())
        again_s = min(waited_s, self._gone_s)
        self._gone_s -= again_s
        self.total_s += own_s + waited_s - again_s
        self._seen |= now
        self._there = set(now)


def descendants(pid: int) -> list[int]:
    """Descendants of a process that are seen on the way, each after its parent; some may end, and others begin,
    meanwhile."""
    found: list[int] = []
    ahead = [pid]
    while ahead:
        children = _children(ahead.pop())
        found += children
        ahead += children
    return found


def memory_of(pid: int) -> int:
    """Bytes of a process; 0 for one that is gone. A process that may not be looked into counts with its whole address
    space: it may have caused that itself, and a container without `CAP_SYS_PTRACE` refuses it for all."""
    process = Path(f"/proc/{pid}")
    with suppress(FileNotFoundError, ProcessLookupError):
        for place in (process, *process.glob("task/*")):  # where the first thread has ended, another tells
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


def times_of(pid: int) -> tuple[Process, Times] | None:
    """Times of a process. None: it is gone, or about to be."""
    with suppress(FileNotFoundError, ProcessLookupError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if words[STATE] != DEAD:
            user, system, users, systems = (int(word) / TICKS_PER_S for word in words[UTIME : UTIME + 4])
            return (pid, int(words[STARTED])), (user + system, users + systems)
    return None


def num_sockets(pid: int) -> int:
    """Number of sockets of the process's network namespace: pairs, as there are no others behind a fence."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/net/sockstat").read_text().splitlines():
            if line.startswith("sockets: used "):
                return int(line.split()[2])
    return 0


def buffer_bytes() -> int:
    """Size of a new socket's buffer (net.core.wmem_default, which not every container can read). The filter refuses to
    set another."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    return DEFAULT_BUFFER_BYTES


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, file.read_text().split())
    return found
