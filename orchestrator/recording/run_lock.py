"""Who works in a run's directory: one process at a time, by a lock that ends with it however it ends.

The lock is the kernel's (`flock`), so that a killed process leaves none; the file says who holds it. Taken by
`RunDirectory` and, for `checkpoint.directory`, by `checkpointing/resuming.py`. It holds between machines where their
shared file system has such locks (NFSv4, Lustre); one that has none is used without. A place behind a URL cannot be
locked: two runs must not share one. With `filelock` most of this would remain: who holds it, file systems without
locks, and a file that its last holder removes.
"""

import fcntl
import getpass
import json
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from penstock.conf.errors import RunInUse

FILE = "run.lock"


class RunLock:
    """Held from `take` to `release`, or to the end of the process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    @classmethod
    def take(cls, directory: Path, what: str) -> "RunLock":
        """`what`: the directory in the user's words, as `name=sums`. Makes it where it is not there. Raises `RunInUse`
        naming the holder; `OSError` if nothing can be written there."""
        path = directory / FILE
        while True:
            directory.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # whoever held it has just removed the directory
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                if _locked(descriptor, path, what) and _is_at(descriptor, path):
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(_me()).encode() + b"\n", 0)
                    return cls(path, descriptor)
                os.close(descriptor)

    def release(self, *, remove: bool = False) -> None:
        """May be called twice. `remove`: the file as well."""
        if self._descriptor < 0:
            return
        if remove:
            self._path.unlink(missing_ok=True)
        else:
            os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = -1


def _locked(descriptor: int, path: Path, what: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunInUse(
            f"{what}: {path.parent} is in use by {_holder(path)}. Wait for its end or end it, or choose another place."
        ) from None
    except OSError:
        pass  # a file system without locks
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Not so if the last holder has removed the file while this process waited to open it."""
    return os.path.samestat(os.fstat(descriptor), path.stat())


def _me() -> dict[str, str | int]:
    started = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return {"pid": os.getpid(), "host": socket.gethostname(), "user": _user(), "started": started}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # containers run under ids that have no name
        return str(os.getuid())


def _holder(path: Path) -> str:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return "process {pid} of {user} on {host}, started {started}".format(**found)
    except (OSError, ValueError, KeyError, TypeError):
        return "another process, which has only begun"
