"""Tries the fence from inside: `sandbox.py` sends the text of this file in, and reads what `probe` returns.

It imports what every interpreter has, and reports facts; `sandbox.py` judges them outside.
"""

import ctypes
import errno
import fcntl
import os
import resource
import socket
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)


def probe(hidden: list[str], devices: list[str], abstract: str, port: int) -> dict[str, Any]:
    """Try what must not work; return the facts. `hidden`: paths of the host that must not be here. `abstract`, `port`:
    where the host listens meanwhile."""
    return {
        "uid": os.getuid(),
        "pid": os.getpid(),
        "environment": len(os.environ),
        "capabilities": capabilities(),
        "no_new_privileges": libc.prctl(39, 0, 0, 0, 0),
        "seccomp": libc.prctl(21, 0, 0, 0, 0),
        "seen": [path for path in hidden if os.path.lexists(path)],
        "written": [path for path in ("/", "/dev", "/usr", os.path.dirname(os.__file__)) if can_write(path)]
        + [f"the times of {device}" for device in devices if can_touch(device)],
        "left_over": os.listdir("/tmp"),
        "connected": [
            name
            for name, family, address in (
                ("abstract socket", socket.AF_UNIX, f"\0{abstract}"),
                ("127.0.0.1", socket.AF_INET, ("127.0.0.1", port)),
            )
            if can_connect(family, address)
        ],
        "granted": [
            name
            for name, call in {
                "unshare": lambda: libc.unshare(0x10000000),
                "mount": lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None),
                "ptrace": lambda: libc.ptrace(0, 0, None, None),
                "setuid": lambda: libc.setuid(0),
                "chroot": lambda: libc.chroot(b"/tmp"),
                "sendmsg": lambda: libc.sendmsg(0, None, 0),
                "recvmsg": lambda: libc.recvmsg(0, None, 0),
                "flock": lambda: libc.flock(0, fcntl.LOCK_UN),
                "fcntl for leases": lambda: libc.fcntl(0, fcntl.F_SETLEASE, fcntl.F_UNLCK),
                "fcntl for notices": lambda: libc.fcntl(0, fcntl.F_NOTIFY, 0),
                "socketpair of netlink": lambda: libc.socketpair(16, 3, 0, (ctypes.c_int * 2)()),
                "prctl to hide": lambda: libc.prctl(4, 0, 0, 0, 0),
                "ioctl of networks": lambda: libc.ioctl(0, 0x8910, None),
                "setsockopt of filters": lambda: libc.setsockopt(0, socket.SOL_SOCKET, 26, None, 0),
            }.items()
            if not is_refused(call)
        ],
        "limits": {
            name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1]
            for name in ("AS", "CPU", "NPROC", "FSIZE", "NOFILE", "CORE")
        },
    }


def capabilities() -> int:
    """Capabilities: effective, permitted and inheritable ones, together as bits."""
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    return -1 if libc.capget(header, sets) else sum(sets)


def can_write(directory: str) -> bool:
    try:
        os.close(os.open(os.path.join(directory, "probe"), os.O_CREAT | os.O_WRONLY))
    except OSError:
        return False
    return True


def can_touch(path: str) -> bool:
    try:
        os.utime(path)
    except OSError:
        return False
    return True


def can_connect(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            connection.connect(address)
    except OSError:
        return False
    return True


def is_refused(call: Any) -> bool:
    return call() < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS)
