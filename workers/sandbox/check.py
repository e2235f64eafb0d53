"""Proves that a fence holds before anything else runs behind it: a program inside tries what has to fail.

`check` is called with the first worker, and with the first that has no control group. `holes` decides, and is pure.
"""

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.conf.errors import SandboxUnavailable
from penstock.workers.sandbox import probe
from penstock.workers.sandbox.execution import MIB, Limits, Value, results_of
from penstock.workers.sandbox.fence import DEVICES, Machine
from penstock.workers.sandbox.sandbox_worker import Worker
from penstock.workers.sandbox.usage import descendants, memory_of

NAMESPACES = ("user", "pid", "net", "ipc", "uts", "cgroup", "mnt")
HIDDEN = (
    *("/proc/1", "/proc/self", "/sys/kernel", "/dev/kmsg", "/dev/mem", "/home", "/var", "/run", "/etc/passwd"),
    *("/usr/share/doc", "/usr/src", "/usr/include"),
)
SEEN_BYTES = 8 * MIB
WAITING = f"import time\nkept = bytearray({SEEN_BYTES})\nkept[::4096] = kept[::4096]\ntime.sleep(1e6)"
LOOK_S = 0.01
SEEN_S = 10.0
"""Seconds for the watch to see the process; it does at the first look on a machine that is not busy."""


async def check(worker: Worker, machine: Machine) -> None:
    """Check a fence. Raises `SandboxUnavailable` with every hole that is found."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory, socket.socket(socket.AF_UNIX) as listener:
        name = f"penstock-{os.getpid()}-{os.urandom(8).hex()}"
        listener.bind(f"\0{name}")
        listener.listen(1)
        with socket.create_server(("127.0.0.1", 0)) as server:
            request = {
                "source": Path(probe.__file__).read_text(),
                "function": "probe",
                "calls": [[[directory, *hidden_paths(machine)], list(DEVICES), name, server.getsockname()[1]]],
            }
            ending = await worker.execute(request, b"")
    result = results_of(ending, 1, worker.limits)[0]
    if not isinstance(result, Value):
        raise SandboxUnavailable(
            f"sandbox: the program that tries the fence from inside failed ({result.reason}: {result.text[-400:]}), so "
            "no code of a model runs."
        )
    found = holes(result.data, worker.limits) + shared_namespaces(worker.keeper)
    if worker.keeper_uid == 0:
        found.append("the user inside is root outside")
    if worker.cgroup is None and not await is_seen(worker):
        found.append(
            f"there is no control group for it ({worker.without_cgroup}), and the memory of a process inside is not "
            "seen in /proc either, so nothing bounds it"
        )
    if found:
        raise SandboxUnavailable(
            f"sandbox: the fence has holes, so no code of a model runs: {'; '.join(found)}. Report this with the "
            "kernel's version and how the container was started."
        )


async def is_seen(worker: Worker) -> bool:
    """Return whether the watch, which replaces a cgroup, sees a process that waits inside. That is ended then."""
    waiting = asyncio.ensure_future(worker.execute({"source": WAITING}, b"", SEEN_S))
    while not waiting.done():
        for pid in descendants(worker.keeper):
            if memory_of(pid) >= SEEN_BYTES:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                await waiting
                return True
        await asyncio.wait([waiting], timeout=LOOK_S)
    return False


def hidden_paths(machine: Machine) -> list[str]:
    """Paths of the host that must not be seen inside, unless the interpreter's tree lies below them: such a directory
    is there, with nothing else."""
    of_the_user = [os.path.expanduser(f"~/{name}") for name in (".ssh", ".cache", ".bashrc")]
    return [path for path in (*HIDDEN, *of_the_user) if not machine.prefix.is_relative_to(path)]


def holes(facts: Mapping[str, Any], limits: Limits) -> list[str]:
    """Texts on what is wrong in the facts that `probe.probe` found."""
    wanted = {
        "AS": limits.memory_bytes,
        "CPU": -int(-limits.cpu_s // 1),
        "NPROC": limits.num_processes + 1,
        "FSIZE": limits.file_bytes,
        "CORE": 1,
    }
    found = [f"it {word} {', '.join(facts[key])}" for key, word in WORDS.items() if facts[key]]
    found += [
        f"RLIMIT_{key} is {facts['limits'][key]}" for key, limit in wanted.items() if facts["limits"][key] != limit
    ]
    found += [
        f"{key} is {facts[key]}, not {value}"
        for key, value in {"pid": 1, "environment": 0, "capabilities": 0, "no_new_privileges": 1, "seccomp": 2}.items()
        if facts[key] != value
    ]
    return found + (["the user inside is root"] if facts["uid"] == 0 else [])


WORDS = {
    "seen": "sees",
    "written": "can write to",
    "left_over": "begins with files in /tmp:",
    "connected": "can connect to",
    "granted": "may call",
}


def shared_namespaces(keeper: int) -> list[str]:
    """Namespaces of this process that a process inside is in too, as far as /proc tells."""
    found = []
    with suppress(PermissionError):
        for name in NAMESPACES:
            if os.readlink(f"/proc/{keeper}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}"):
                found.append(f"its {name} namespace is this one")
    return found
