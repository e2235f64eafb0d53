"""Root directories of publications in shared memory: who owns one, and which are left over from runs that died.

A run claims `/dev/shm/penstock-<run-id>` with an `owner.pid` file; the next run that starts on the node sweeps what
dead owners left. Shared memory is RAM: nobody else would give it back before a reboot.
"""

import os
import shutil
from pathlib import Path

SHARED_MEMORY = "/dev/shm"
PREFIX = "penstock-"
OWNER_NAME = "owner.pid"


def claim_root(root: str | Path) -> Path:
    """Make the directory, owned by this process: it lives until this process is dead or removes it."""
    path = Path(root)
    path.mkdir(parents=True, exist_ok=True)
    (path / OWNER_NAME).write_text(" ".join(_identity(os.getpid())))
    return path


def remove_root(root: str | Path) -> None:
    """Give the memory back at the end of a run."""
    shutil.rmtree(root, ignore_errors=True)


def sweep_stale(root_parent: str | Path = SHARED_MEMORY) -> list[str]:
    """Remove roots whose owner is dead; returns them. Roots of other users or PID namespaces, and unclaimed ones,
    stay."""
    removed = []
    for path in Path(root_parent).glob(f"{PREFIX}*"):
        try:
            owner = (path / OWNER_NAME).read_text().split()
        except OSError:
            continue
        if len(owner) == 3 and owner[2] == _namespace() and not _alive(owner):
            shutil.rmtree(path, ignore_errors=True)
            removed.append(str(path))
    return removed


def _identity(pid: int) -> tuple[str, str, str]:
    """PID, start time and PID namespace: a PID alone is reused, and means something else in another container."""
    return str(pid), _start_ticks(str(pid)) or "0", _namespace()


def _start_ticks(pid: str) -> str | None:
    """Clock ticks from boot to the process's start (proc(5), stat field 22): unlike a date, no clock change moves
    it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def _alive(owner: list[str]) -> bool:
    return _start_ticks(owner[0]) == owner[1]
