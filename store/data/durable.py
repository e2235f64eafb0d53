"""Files that survive a power cut. Only this module syncs files and names, and renames what a later process reads.

A file system may keep a new name and lose the bytes behind it, and it may bring back a name that was removed. So each
step is on the disk before the next one relies on it:

    bytes ─ sync ─▶ name ─ sync of its directory ─▶ marker that counts on it ─▶ removal of what it replaces

Syncing waits for the disk: callers are threads beside the training.
"""

import errno
import os
from pathlib import Path

CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)
"""Errors of directories that cannot be synced: some file systems have no such call, and a directory of another user may
be entered but not opened."""


def sync(path: str | Path) -> None:
    """Sync the bytes of a file, or the names in a directory. Raises `OSError`."""
    is_directory = os.path.isdir(path)
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not (is_directory and error.errno in CANNOT_SYNC):
            raise


def sync_opened(descriptor: int) -> None:
    """Sync the bytes of an open file. Raises `OSError`."""
    os.fsync(descriptor)


def sync_tree(directory: str | Path) -> None:
    """Sync all files and names below a directory, and its own name. Raises `OSError`."""
    for folder, _, files in os.walk(directory):
        for name in files:
            sync(os.path.join(folder, name))
        sync(folder)
    sync_name(directory)


def sync_name(path: str | Path) -> None:
    """Sync the name of a file or directory, and those of all directories above it, which may be new. Raises
    `OSError`."""
    for parent in Path(os.path.abspath(path)).parents:
        sync(parent)


def rename(source: Path, target: Path) -> None:
    """Give a synced file or directory its name; a file that has the name is replaced. Raises `OSError`."""
    os.replace(source, target)
    sync_name(target)
