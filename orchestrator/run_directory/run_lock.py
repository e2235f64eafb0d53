"""The lock of a run's directory, in which one process at a time works, and the events with which a process starts and
ends its work on the run.

The lock is the kernel's (`flock`), so that a killed process leaves none; the file names the process that holds it.
There is one for `checkpoint.directory` as well. It holds between machines where their shared file system has such locks
(NFSv4, Lustre); one that has none is used without, and the run says so. A place behind a URL cannot be locked: two runs
must not share one. With `filelock` most of this would remain: the name of the holder, file systems without locks, and a
file that its last holder removes.
"""

import fcntl
import getpass
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.conf.errors import RunInUse

FILE = "run.lock"
STARTS = ("start", "resume", "taken_over")
"""Events with which a process starts its work on a run."""
ENDS = ("end", "failed", "interrupted")
"""Events with which a process ends it."""


class RunLock:
    """A lock that is held from `take` to `release`, or to the end of the process."""

    def __init__(self, path: Path, descriptor: int, holder: dict[str, str | int], is_exclusive: bool) -> None:
        """`holder`: what the file says of this process. `is_exclusive`: True if no other process can take the lock
        meanwhile, which a file system without locks cannot promise."""
        self.is_exclusive = is_exclusive
        self._path, self._descriptor, self._holder = path, descriptor, holder
        self._is_lost = False

    @classmethod
    def take(cls, directory: Path, what: str) -> "RunLock":
        """Take the lock of a directory, which is made if it is not there. `what`: the directory in the user's words, as
        `name=sums`. Raises `RunInUse` naming the holder; `OSError` if nothing can be written there."""
        path = directory / FILE
        while True:
            directory.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the last holder has just removed the directory
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                try:
                    is_exclusive = _lock(descriptor, path, what)
                    if _is_linked(descriptor, path):
                        os.ftruncate(descriptor, 0)
                        os.pwrite(descriptor, json.dumps(me := _this_process()).encode() + b"\n", 0)
                        return cls(path, descriptor, me, is_exclusive)
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)

    def check_held(self, what: str) -> None:
        """Raise `RunInUse` if another process has taken the place: a file system that was away may have dropped the
        lock. Raises `OSError` if the file cannot be read."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (
            FileNotFoundError,
            ValueError,
        ):  # removed by hand, or lost with the file system: no sign of another process
            return
        if found != self._holder:
            self._is_lost = True
            raise RunInUse(
                f"{what}: {self._path.parent} could not be reached for a while, and is now in use by "
                f"{_holder(self._path)}. Nothing more is written there; that process goes on with the run."
            )

    def release(self, *, remove: bool = False) -> None:
        """Release the lock. May be called twice. `remove`: remove the file as well. The lock is gone even if that
        fails."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        with suppress(OSError):
            if remove and not self._is_lost:
                self._path.unlink()
            elif not self._is_lost:
                os.ftruncate(descriptor, 0)
        with suppress(OSError):
            os.close(descriptor)


def last_start_or_end(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last event of `STARTS` and `ENDS`: a run that failed and was resumed has not failed. Empty: none."""
    return next((event for event in reversed(events) if event.get("kind") in (*STARTS, *ENDS)), {})


def _lock(descriptor: int, path: Path, what: str) -> bool:
    """Lock a file; False: the file system has no locks. Raises `RunInUse`."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunInUse(
            f"{what}: {path.parent} is in use by {_holder(path)}. Wait for its end or end it, or choose another place."
        ) from None
    except OSError:
        return False
    return True


def _is_linked(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still at its path: the last holder may have removed it meanwhile."""
    return os.path.samestat(os.fstat(descriptor), path.stat())


def _this_process() -> dict[str, str | int]:
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
