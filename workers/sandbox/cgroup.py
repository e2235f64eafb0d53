"""Memory, processes and processor time of everything behind a fence: held by a control group where this process may
make one, else read from /proc.

Versions 1 and 2 are supported. The group is made below this process's own, so that limits that others have set hold
too. Version 2 gives no memory to groups below one that has processes of its own; then the group is made beside it, if
the memory of the group above is divided already, and else by systemd, which makes a scope: root asks the system's
manager, other users their own. `busctl` sends the request of `systemd-run --scope`, for a process that exists already.
The scope is gone when its last process is.

Where none of this works (a container whose /sys/fs/cgroup is read-only), a `UsageWatch` replaces it. The filter of such
fences (`fence.py`) refuses what could hide from it: memory that is shared and has no file.
"""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from penstock.workers.sandbox.execution import MIB, Limits

ANSWER_S = 5.0
"""Seconds for systemd to answer, and for the process to be in its scope then."""
RUNNING = Path("/run/systemd/system")
"""Directory that exists where systemd runs (sd_booted(3))."""
MANAGER = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
NAME = "penstock-sandbox"
KEEPER_BYTES = 32 * MIB
KEEPER_PROCESSES = 4
REMOVE_S = 10.0
"""Seconds for killed processes to be gone; a group that still has some cannot be removed. They need a turn on a
processor for that, which comes at once unless the machine is very busy."""
CONTROLLERS = {"memory", "pids"}
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


class Cgroup:
    """A group: its directories, one for each hierarchy, memory first. Lifecycle: `around` a process, `remove`."""

    def __init__(self, directories: list[Path], version: int, *, is_own: bool = True) -> None:
        """`is_own`: to be removed here, as nothing else removes it. Raises `OSError` if the group does not report its
        counts."""
        self.directories, self.version, self._is_own = directories, version, is_own
        events, usage = ("memory.events", "cpu.stat") if version == 2 else ("memory.oom_control", "cpuacct.usage")
        self._events = os.open(directories[0] / events, os.O_RDONLY | os.O_CLOEXEC)
        found = [directory / usage for directory in directories if (directory / usage).exists()]
        self._usage = os.open(found[0], os.O_RDONLY | os.O_CLOEXEC) if found else -1

    @classmethod
    def around(cls, pid: int, limits: Limits) -> "Cgroup":
        """Make a group with this process in it. Raises `OSError` that says why there is none."""
        group = cls.make(pid, limits)
        try:
            group.add(pid)
        except OSError:
            group.remove()
            raise
        return group

    @classmethod
    def make(cls, pid: int, limits: Limits) -> "Cgroup":
        """Make a group. `pid`: for systemd, which makes no group without a process. Raises `OSError`."""
        memory, own = own_group("memory"), own_group("")
        bounds = (limits.memory_bytes + KEEPER_BYTES, limits.num_processes + KEEPER_PROCESSES)
        if memory is not None:
            return _of_version_1(memory, *bounds)
        if own is None:
            raise OSError("no hierarchy of control groups is mounted here")
        place, top = own
        refused: list[str] = []
        for parent in parents(place, top, has_systemd()):
            try:
                return _of_version_2(parent, *bounds)
            except OSError as error:
                refused.append(str(error))
        try:
            return cls([make_scope(pid, *bounds, top)], 2, is_own=False)
        except OSError as error:
            raise OSError("; ".join([*refused, str(error)])) from None

    def add(self, pid: int) -> None:
        """Add the process, and all that it starts from now on. Raises `OSError`."""
        for directory in self.directories if self._is_own else []:
            _write(directory / "cgroup.procs", pid)

    def num_killed(self) -> int:
        """Number of processes that the kernel ended because the group's memory was used up."""
        return _number(self._events, b"oom_kill ")

    def cpu_s(self) -> float | None:
        """Processor time of all processes that were ever in it, waited for or not. None: the group does not count
        that."""
        if self._usage < 0:
            return None
        return _number(self._usage, b"usage_usec ") / 1e6 if self.version == 2 else _number(self._usage, b"") / 1e9

    def remove(self) -> None:
        files = {self._events, self._usage} - {-1}
        self._events = self._usage = -1  # before they are closed: another thread may read
        for file in files:
            os.close(file)
        _remove(self.directories if self._is_own else [])


def parents(own: Path, top: Path, is_systemds: bool) -> Iterator[Path]:
    """Places where a group of version 2 may be made: below the own group; beside it, unless the group above is one that
    systemd alone divides."""
    yield own
    above = own.parent
    if own != top and not above.name.endswith(".slice") and not (is_systemds and above == top):
        yield above


def _of_version_1(memory: tuple[Path, Path], memory_bytes: int, processes: int) -> Cgroup:
    """Make a group of version 1, which must bound memory. Processes are bounded by the kernel's own limit as well, and
    processor time is reported."""
    directories = [
        _made(memory[0], {"memory.limit_in_bytes": memory_bytes}, {"memory.memsw.limit_in_bytes": memory_bytes})
    ]
    for controller, settings in (("pids", {"pids.max": processes}), ("cpuacct", {})):
        if (own := own_group(controller)) is not None:
            with suppress(OSError):
                directories.append(_made(own[0], settings))
    try:
        return Cgroup(directories, 1)
    except OSError:
        _remove(directories)
        raise


def _of_version_2(parent: Path, memory_bytes: int, processes: int) -> Cgroup:
    """Make a group of version 2. Raises `OSError` that says why the parent has no memory to give."""
    if CONTROLLERS - _words(parent / "cgroup.subtree_control"):
        if CONTROLLERS - _words(parent / "cgroup.controllers"):
            raise OSError(f"{parent} is not given the controllers memory and pids")
        try:
            _write(parent / "cgroup.subtree_control", "+memory +pids")
        except OSError as error:
            raise OSError(f"{parent} does not give memory to groups below it ({error.strerror})") from None
    directory = _made(parent, {"memory.max": memory_bytes, "pids.max": processes}, {"memory.swap.max": 0})
    try:
        return Cgroup([directory], 2)
    except OSError:
        _remove([directory])
        raise


def _made(parent: Path, settings: Mapping[str, int], if_there: Mapping[str, int] | None = None) -> Path:
    """Make a new group with these settings. `if_there`: settings that only kernels that count swap have. Raises
    `OSError`."""
    _sweep(parent)
    directory = parent / f"{NAME}-{_pid_namespace()}-{os.getpid()}-{secrets.token_hex(4)}"
    _mkdir(directory)
    try:
        for file, value in settings.items():
            _write(directory / file, value)
        for file, value in (if_there or {}).items():
            if (directory / file).exists():
                _write(directory / file, value)
    except OSError:
        _remove([directory])
        raise
    return directory


def own_group(controller: str) -> tuple[Path, Path] | None:
    """Directory of this process's group in the hierarchy of a controller, and where that is mounted; of version 2 if
    the name is empty."""
    path = next((path for names, path in _memberships() if controller in names.split(",")), None)
    mount = next(
        (place for root, place, kind, options in _mounts() if _is_of(controller, kind, options) and root == "/"), None
    )
    return None if path is None or mount is None else (Path(mount + path), Path(mount))


def _memberships() -> Iterator[tuple[str, str]]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        yield names, path


def _mounts() -> Iterator[tuple[str, str, str, str]]:
    """Root, place, type and options of each mount."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        first, _, second = line.partition(" - ")
        words, more = first.split(), second.split()
        yield words[3], words[4], more[0], more[-1]


def _is_of(controller: str, kind: str, options: str) -> bool:
    return controller in options.split(",") if controller and kind == "cgroup" else not controller and kind == "cgroup2"


def _words(file: Path) -> set[str]:
    return set(file.read_text().split())


def _mkdir(directory: Path) -> None:
    directory.mkdir()


def _write(file: Path, value: object) -> None:
    file.write_text(str(value))


def _number(file: int, name: bytes) -> int:
    """The number in the line that begins with the name; 0 if there is none."""
    with suppress(OSError):
        for line in os.pread(file, 4096, 0).splitlines():
            if line.startswith(name):
                return int(line.split()[-1])
    return 0


def _pid_namespace() -> int:
    """Number of the PID namespace on this machine. Containers that share a hierarchy have processes of the same ids."""
    return os.stat("/proc/self/ns/pid").st_ino


def _sweep(parent: Path) -> None:
    """Remove groups of processes that are gone, of this PID namespace: those of other ones cannot be seen."""
    for directory in parent.glob(f"{NAME}-{_pid_namespace()}-*"):
        owner = directory.name.split("-")[3]
        if not Path(f"/proc/{owner}").exists():
            _removed(directory)


def _remove(directories: list[Path]) -> None:
    deadline = time.monotonic() + REMOVE_S
    for directory in directories:
        while not _removed(directory) and time.monotonic() < deadline:
            time.sleep(0.002)


def _removed(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def has_systemd() -> bool:
    return RUNNING.is_dir()


def make_scope(pid: int, memory_bytes: int, num_processes: int, top: Path) -> Path:
    """Make a scope with this process in it; return its directory. `top`: where version 2 is mounted. Raises
    `OSError`."""
    busctl = shutil.which("busctl")
    if not has_systemd() or busctl is None:
        raise OSError("there is no systemd to ask for a scope")
    name = f"penstock-sandbox-{os.getpid()}-{pid}.scope"
    try:
        asked = subprocess.run(
            [busctl, *scope_request(name, pid, memory_bytes, num_processes)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"systemd did not answer for {ANSWER_S:g} s") from None
    if asked.returncode != 0:
        raise OSError(f"systemd made no scope: {asked.stderr.strip()[:200]}")
    return wait_in_scope(pid, name, top)


def scope_request(name: str, pid: int, memory_bytes: int, num_processes: int) -> list[str]:
    """Arguments of busctl. A call names the types of its arguments first, and each property its own."""
    properties = [
        ("PIDs", "au", "1", str(pid)),
        ("MemoryMax", "t", str(memory_bytes)),
        ("MemorySwapMax", "t", "0"),
        ("TasksMax", "t", str(num_processes)),
        ("CPUAccounting", "b", "true"),
        ("CollectMode", "s", "inactive-or-failed"),
    ]
    words = [word for entry in properties for word in entry]
    whose = "--system" if os.geteuid() == 0 else "--user"
    call = ["StartTransientUnit", "ssa(sv)a(sa(sv))", name, "fail", str(len(properties)), *words, "0"]
    return [whose, "--quiet", "call", *MANAGER, *call]


def wait_in_scope(pid: int, name: str, top: Path) -> Path:
    """Wait until the process is in its scope; return the directory. The answer of systemd is a job, and the process is
    there when that is done."""
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
                directory = Path(f"{top}{line.partition('::')[2]}")
                if directory.name == name and (directory / "memory.max").exists():
                    return directory
        time.sleep(0.01)
    raise OSError(f"systemd has put no process into {name}, or gives it no memory to divide")


class UsageWatch:
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
        for place in (process, *process.glob("task/*")):  # where the first thread has ended, another has them
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
