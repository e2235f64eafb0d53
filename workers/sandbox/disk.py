"""Directories on a named disk for what is changed in workspaces, instead of memory.

    DISK/penstock-changes-UID/NAME         the changes of one workspace; the directory is the user's of its fence
                              NAME.lock    held by the process whose workspace it is

Only this process's user may enter the directory above. A workspace's own is removed when its fence has ended; what a
killed process leaves, by the next workspace on this disk. Removal follows no links, and bears whatever commands have
made: `rm` is used, as Python's own stops at deep directories and at those that their owner may not enter.
"""

import fcntl
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.conf.errors import ConfigError, InfrastructureError
from penstock.workers.sandbox.inside_workspace import LEAST_FREE_BYTES
from penstock.workers.sandbox.original_tree import locked, own_directory, sweep


class DiskChanges:
    """The directory of one workspace. Lifecycle: made on a disk that was `prepared`; `remove`."""

    def __init__(self, disk: Path, owner: int | None) -> None:
        """`owner`: user and group of the directory; None: this process's. Raises `ConfigError`."""
        self.path = base_on(disk) / secrets.token_hex(8)
        self._removing = threading.Lock()
        with named(disk):
            self._lock = locked(self.path.with_suffix(".lock"), fcntl.LOCK_EX)
            self._release = weakref.finalize(self, os.close, self._lock)
            self.path.mkdir(mode=0o700)
            if owner is not None:
                os.chown(self.path, owner, owner)

    def remove(self) -> None:
        """Remove it. What cannot be removed is left to a later call, or to the next process that uses this disk."""
        with self._removing:
            if self._release.alive:
                remove_tree(self.path)
                if not self.path.exists():
                    self.path.with_suffix(".lock").unlink(missing_ok=True)
                    self._release()


def prepare(disk: Path) -> None:
    """Remove what nobody uses. Raises `ConfigError` for a disk that cannot be written to, `InfrastructureError` for a
    full one."""
    base = base_on(disk)
    with named(disk):
        own_directory(base, 0o700)
        sweep(base, remove_tree)
        free_bytes = shutil.disk_usage(base).free
    if free_bytes < LEAST_FREE_BYTES:
        raise InfrastructureError(
            f"workspace: disk={disk} has {free_bytes:,} bytes left, and commands end below {LEAST_FREE_BYTES:,}. Make "
            "room on it, or name another one."
        )


@contextmanager
def named(disk: Path) -> Iterator[None]:
    """Raise `ConfigError` for an `OSError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"workspace: disk={disk}: {error.strerror}. Name a directory that this user may write to, or leave disk "
            "out to keep changes in memory."
        ) from None


def base_on(disk: Path) -> Path:
    """Directory of this user's workspaces on a disk."""
    return Path(os.path.realpath(disk)) / f"penstock-changes-{os.geteuid()}"


def unnamed_file(disk: Path) -> int:
    """Descriptor of a file of the disk that is gone with it."""
    with tempfile.TemporaryFile(dir=base_on(disk)) as file:
        return fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 3)


def remove_tree(path: Path) -> None:
    """Remove a directory. Raises nothing if something stays."""
    words = [] if os.geteuid() == 0 else [["chmod", "-Rf", "u+rwX", str(path)]]
    for command in [*words, ["rm", "-rf", "--one-file-system", str(path)]]:
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
