"""The first process in new namespaces: `python first_process.py PIDFD SETTINGS`, started by `namespaces.py`.

It arranges what a machine sees (`SETTINGS`: the arguments of `arrange` as JSON, or `null` where there is no machine,
only a network), prints `ready`, and waits until the process that PIDFD refers to has ended, however it ended. With it
all the others in its process namespace end: the kernel kills them.
"""

import ctypes
import json
import os
import select
import signal
import socket
import sys
from typing import Any

MS_BIND, MS_MOVE, MS_REC = 4096, 8192, 16384
PR_SET_PDEATHSIG = 1
SHM, TMP = "/dev/shm", "/tmp"

libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str = "none", flags: int = 0, options: str = "") -> None:
    """Mount a file system, with the arguments of `man 2 mount`."""
    if libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"mounting {source} at {target}: {os.strerror(number)}")


def arrange(hostname: str, hosts: str, shm: str, keep: list[str]) -> None:
    """Its own name, `/etc/hosts`, `/sys`, `/tmp` and `/dev/shm`; nobody else sees these mounts.

    `shm`: size of `/dev/shm`, as `mount` takes it. `keep`: folders below `/tmp` that stay what they are. What is to be
    mounted is put together at `/dev/shm`, which is replaced last.
    """
    socket.sethostname(hostname)

    mount("tmpfs", SHM, "tmpfs", options="mode=755")
    with open(f"{SHM}/hosts", "w") as file:
        file.write(hosts)
    mount(f"{SHM}/hosts", "/etc/hosts", flags=MS_BIND)

    mount("sysfs", SHM, "sysfs")  # a new one has the interfaces of this network
    if os.path.isdir("/sys/fs/cgroup"):
        mount("/sys/fs/cgroup", f"{SHM}/fs/cgroup", flags=MS_BIND | MS_REC)
    mount(SHM, "/sys", flags=MS_MOVE)

    mount("tmpfs", SHM, "tmpfs", options="mode=1777")
    for folder in keep:
        place = SHM + folder.removeprefix(TMP)
        os.makedirs(place, exist_ok=True)
        mount(folder, place, flags=MS_BIND | MS_REC)
    mount(SHM, TMP, flags=MS_MOVE)

    mount("tmpfs", SHM, "tmpfs", options=f"mode=1777,size={shm}")


def main(owner: int, settings: dict[str, Any] | None) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans become its children: nobody waits for them
    if settings is not None:
        arrange(**settings)
    print("ready", flush=True)
    select.select([owner], [], [])


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
