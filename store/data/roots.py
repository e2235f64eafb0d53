"""Directories that belong to one process: only its user may enter them, and they do not outlive it for long.

A run's publications and a store's large batches lie in such directories, in shared memory and on disk. Each has an
`owner.pid`; the next run or store that starts on the machine sweeps what dead owners left. Shared memory is RAM:
nothing else would give it back before a reboot.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = "/dev/shm"
PREFIX = "penstock-"
OWNER_NAME = "owner.pid"
PRIVATE = 0o700
MOVED_WITHIN_S = 10.0
"""Longest wait in seconds for another process that checks who owns a directory, and moves it away: two calls of the
kernel."""


def claim_root(root: str | Path) -> Path:
    """Make the directory, owned by this process: it lives until this process is dead or removes it.

    Raises `FileExistsError` if the name is taken: what lies there belongs to another process, maybe of another user.
    """
    path = Path(root)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=PRIVATE)
    (path / OWNER_NAME).write_text(" ".join(identity(os.getpid())))
    return path


def guard_root(root: str | Path) -> None:
    """Have a process of its own remove the directory when this one is gone, however it ends: also by `kill -9`, and
    where no later run sweeps.

    The process is a shell in a session of its own that reads from a pipe; the kernel closes the pipe's other end. What
    another process has claimed in the meantime under the same name stays.
    """
    reading, writing = os.pipe()
    owner = (Path(root) / OWNER_NAME).read_text()
    command = ["setsid", "--fork", "sh", "-c", _GUARD, f"{PREFIX}guard", str(root), owner]
    try:
        subprocess.run(command, stdin=reading, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    finally:
        os.close(reading)
    _guards.append(writing)


_GUARD = f"""
trap '' HUP INT TERM
read -r _
exec 9<"$1" && flock -w {MOVED_WITHIN_S:g} 9 || exit
[ "$(cat "$1/{OWNER_NAME}")" = "$2" ] && mv -- "$1" "$1.$$" || exit
exec 9<&-
rm -rf -- "$1.$$"
"""
"""The guard's script. It outlives a signal that every process of a run is sent. It moves the directory first: a process
that claims the name again must find nothing there, and keep what it has made."""
_guards: list[int] = []
"""Pipe ends of this process's guards, open until it ends."""


def remove_root(root: str | Path, owner: list[str] | None = None) -> None:
    """Give the memory back at the end of a run. The name is free at once. `owner`: what another has claimed under the
    name meanwhile stays; None: it goes, whatever its owner.
    """
    gone = Path(f"{root}.{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(OSError):
        with _held(root):
            if owner is not None and (Path(root) / OWNER_NAME).read_text().split() != owner:
                return
            os.rename(root, gone)
        shutil.rmtree(gone, ignore_errors=True)


@contextlib.contextmanager
def _held(root: str | Path) -> Iterator[None]:
    """Keep guards and other removers of directories from moving it. Between the check of its owner and the move, one of
    them could otherwise free the name, and a new owner's directory would be moved. Raises `TimeoutError`."""
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        deadline = time.monotonic() + MOVED_WITHIN_S
        while True:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{root} is held by another process that removes it") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(directory)


def sweep_stale(root_parent: str | Path = SHARED_MEMORY) -> list[str]:
    """Remove roots whose owner is dead; returns them. Roots of other machines (on a disk that several share), of other
    users or PID namespaces, and unclaimed ones, stay."""
    removed = []
    for path in Path(root_parent).glob(f"{PREFIX}*"):
        try:
            owner = (path / OWNER_NAME).read_text().split()
        except OSError:
            continue
        if len(owner) == 4 and owner[2:] == [_namespace(), boot_id()] and not _alive(owner):
            remove_root(path, owner)
            removed.append(str(path))
    return removed


def identity(pid: int) -> tuple[str, str, str, str]:
    """PID, start time, PID namespace and boot: a PID alone is reused, and means something else in another container
    or on another machine."""
    return str(pid), _start_ticks(str(pid)) or "0", _namespace(), boot_id()


def _start_ticks(pid: str) -> str | None:
    """Clock ticks from boot to the process's start (proc(5), stat field 22). None if it has ended, also if its parent
    does not know of it yet. Read here because psutil's `create_time` is a date, which a clock change moves."""
    try:
        state, *values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else values[18]


def _namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def boot_id() -> str:
    """Id of the running kernel: another one after a reboot, and on another machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "0"


def _alive(owner: list[str]) -> bool:
    return _start_ticks(owner[0]) == owner[1]
