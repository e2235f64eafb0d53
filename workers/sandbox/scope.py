"""A scope of systemd around a process: a control group of version 2 for a process that may not make one itself.

systemd divides the groups of a machine, and gives a part on request: root asks the system's manager, other users their
own. `busctl` sends the request of `systemd-run --scope`, for a process that is there already. The scope is gone when
its last process is.
"""

import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

ANSWER_S = 5.0
"""Seconds for systemd to answer, and for the process to be in its scope then."""
RUNNING = Path("/run/systemd/system")
"""Directory that exists where systemd runs (sd_booted(3))."""
MANAGER = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")


def is_offered() -> bool:
    return RUNNING.is_dir()


def around(pid: int, memory_bytes: int, num_processes: int, top: Path) -> Path:
    """Make a scope with this process in it; return its directory. `top`: where version 2 is mounted. Raises
    `OSError`."""
    busctl = shutil.which("busctl")
    if not is_offered() or busctl is None:
        raise OSError("there is no systemd to ask for a scope")
    name = f"penstock-sandbox-{os.getpid()}-{pid}.scope"
    try:
        asked = subprocess.run(
            [busctl, *request(name, pid, memory_bytes, num_processes)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"systemd did not answer for {ANSWER_S:g} s") from None
    if asked.returncode != 0:
        raise OSError(f"systemd made no scope: {asked.stderr.strip()[:200]}")
    return _entered(pid, name, top)


def request(name: str, pid: int, memory_bytes: int, num_processes: int) -> list[str]:
    """Arguments of busctl. A call names the types of its arguments first, and each property its own."""
    properties = [
        ("PIDs", "au", "1", str(pid)),
        ("MemoryMax", "t", str(memory_bytes)),
        ("MemorySwapMax", "t", "0"),
        ("TasksMax", "t", str(num_processes)),
        ("CPUAccounting", "b", "true"),
        ("CollectMode", "s", "inactive-or-failed"),
    ]
    words = [word for entry in properties for word in entry]
    whose = "--system" if os.geteuid() == 0 else "--user"
    call = ["StartTransientUnit", "ssa(sv)a(sa(sv))", name, "fail", str(len(properties)), *words, "0"]
    return [whose, "--quiet", "call", *MANAGER, *call]


def _entered(pid: int, name: str, top: Path) -> Path:
    """Wait until the process is in its scope; return the directory. The answer of systemd is a job, and the process is
    there when that is done."""
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
                directory = Path(f"{top}{line.partition('::')[2]}")
                if directory.name == name and (directory / "memory.max").exists():
                    return directory
        time.sleep(0.01)
    raise OSError(f"systemd has put no process into {name}, or gives it no memory to divide")
