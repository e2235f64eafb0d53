"""The ends of a store's socket: where it lies, and which user's they are.

The kernel tells the peer's user: the standard library has no call for it, and its own connections
(`multiprocessing.connection`) want a secret that the caller would have to hand over.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

CREDENTIALS = struct.Struct("iII")
"""Layout of `SO_PEERCRED`: PID, user, group (unix(7))."""
BACKLOG = 4096
"""Connections that wait to be accepted: all clients of a run come at once."""


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as this one's user. The kernel says so, not the peer."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(said)[1]) == os.geteuid()


def bind(path: Path) -> socket.socket:
    """Make a socket at `path`, to listen on. Raises `OSError`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _short(path) as name:
        listener.bind(name)
    return listener


def connect(path: Path) -> socket.socket:
    """Connect to the socket at `path`, which a process of this user serves. Raises `OSError`: `PermissionError` if it
    is another's."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)  # at once, or not at all
    try:
        with _short(path) as name:
            connection.connect(name)
        if not is_same_user(connection):
            raise PermissionError(f"{path} is served by another user")
    except OSError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of the socket that the kernel takes, however long its directory's is: it has 108 bytes for it."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
