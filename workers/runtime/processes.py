"""Processes of a run: their identity, their end, the stacks of all their threads for the log of one that does not
answer any more, and the settings with which they compute on this machine's CPUs.

The identity is more than a number, which another process may have by the time that it is used: an actor says who it is,
and its node's agent ends no other process.

    worker        register(directory)             a signal has `faulthandler` write stacks, which needs no Python lock
    node's agent  dump(process, directory, name)  by py-spy, which needs no help of the process; else by that signal
                  kill(process)                   with all that it has started

The settings are made before torch is imported, which reads them once:

- Threads that wait at a barrier spin by default. Engines, ranks and everything else of a run share the cores, so the
  thread that all wait for may have no core while the others spin on theirs: beside one busy process two threads that
  spin take 1.5 times as long as two that sleep, which alone are as fast.
- What an update frees goes back to the system, and is taken anew by the next, page by page. With pages of 2 MiB, where
  the kernel has them, 60,000 faults an update become a tenth, and a seventh of its time goes.
"""

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sysconfig
import time
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

from penstock.store.data.roots import identity

END_S = 10.0
"""Seconds for a killed process to be gone: its memory, on a GPU too, is given back only then."""
SIGNAL = signal.SIGUSR2
MAX_BYTES = 200_000
"""Largest size of one dump: what is beyond is mostly the same frames again."""
SPY_S = 10.0
WRITE_S = 5.0
"""Seconds for the process to write its stacks. The kernel lets it do so whatever it computes, unless it is stopped."""
QUIET_S = 0.3
"""Seconds without growth after which the file is taken to be whole."""

_files: dict[Path, TextIO] = {}
"""Files of this process: `faulthandler` wants its file open."""
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names under which torch's allocator reads its settings: the present one, and its earlier one."""
EXPANDABLE = "expandable_segments:True"
SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}


@dataclass(frozen=True)
class ProcessId:
    """The identity of a process. Plain data, so that it can be sent through Ray."""

    pid: int
    proof: tuple[str, ...]
    """Time when it started, and its PID namespace and machine."""

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        return cls(pid, identity(pid))

    @classmethod
    def from_answer(cls, said: Any) -> "ProcessId | None":
        """Convert what an actor's `process` has answered; the store, which does not know this class, answers with a
        tuple. None: there is no answer."""
        return said if isinstance(said, cls) else cls(*said) if isinstance(said, tuple) else None

    @classmethod
    def own(cls) -> "ProcessId":
        return cls.of(os.getpid())

    @property
    def is_alive(self) -> bool:
        """True if the process is alive. False also where it cannot be seen from: on another machine, in another
        container."""
        return identity(self.pid) == self.proof


def kill(process: ProcessId, timeout_s: float = END_S) -> bool:
    """End a process and all that it has started, at once. False if any of them is still there afterwards: the kernel
    does not end one that waits for a device."""
    members = _with_children(process.pid)
    if not process.is_alive:  # asked last: the children are its own
        return True
    ids = [ProcessId.of(member.pid) for member in members]
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()  # which asks again whether it is the same process
    deadline = time.monotonic() + timeout_s
    while (left := any(member.is_alive for member in ids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def children() -> frozenset[psutil.Process]:
    """Processes that this one has started, and those that they have."""
    return frozenset(_with_children(os.getpid())[1:])


def end_children(but: Set[psutil.Process] = frozenset()) -> int:
    """End what users' code has left: this process's children, with theirs. `but`: children that were there before that
    code, which belong to others. Returns the number of ended ones."""
    left = children() - but
    for member in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    return len(left)


def register(directory: str | Path) -> ProcessId:
    """Have a signal make this process write its stacks below `directory`, if the process sees that; return the identity
    of the process. A second call changes nothing."""
    process = ProcessId.own()
    path = _path(directory, process)
    if path not in _files and path.parent.is_dir():
        _files[path] = path.open("w")
        faulthandler.register(SIGNAL, _files[path], all_threads=True, chain=False)
    return process


def dump(process: ProcessId, directory: str | Path, name: str, py_spy: str | None = None) -> str:
    """The stacks of a process of this machine, within half a minute; or a text that says why there are none. Never
    raises for a process that is gone. `py_spy`: the program; None: the one that is installed, if any."""
    if not process.is_alive:
        return f"{name}, process {process.pid}: it is gone, or of another machine."
    spied = _spied(process.pid, py_spy or _installed())
    try:
        text = spied if spied is not None else _written(process, _path(directory, process))
    except (ProcessLookupError, FileNotFoundError):
        text = "it has ended meanwhile."
    text = f"{name}, process {process.pid} ({_status(process.pid)}):\n{text}"
    return text.encode()[:MAX_BYTES].decode(errors="ignore")


def _with_children(pid: int) -> list[psutil.Process]:
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _path(directory: str | Path, process: ProcessId) -> Path:
    return Path(directory) / f"{process.pid}.txt"


def _installed() -> str | None:
    """The py-spy beside this Python, or on the PATH."""
    scripts = sysconfig.get_path("scripts")
    return shutil.which("py-spy", path=os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)]))


def _spied(pid: int, py_spy: str | None) -> str | None:
    """The stacks of the process and of those that it has started. None where py-spy is missing, or may not look. It
    cannot pause a stopped process, and need not."""
    for options in ([], ["--nonblocking"]) if py_spy is not None else ():
        command = [str(py_spy), "dump", "--pid", str(pid), "--subprocesses", *options]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SPY_S, check=True)
            return done.stdout.decode(errors="replace")
    return None


def _written(process: ProcessId, path: Path) -> str:
    """The stacks as the process itself writes them."""
    if not path.exists() or not _catches(process.pid):
        return "py-spy cannot look at it, and it has not registered to write its stacks itself."
    before = size = path.stat().st_size
    os.kill(process.pid, SIGNAL)
    deadline = grown = time.monotonic() + WRITE_S
    while time.monotonic() < deadline and not (size > before and time.monotonic() - grown > QUIET_S):
        time.sleep(QUIET_S / 10)
        if path.stat().st_size > size:
            size, grown = path.stat().st_size, time.monotonic()
    with path.open("rb") as file:
        file.seek(before)
        return file.read(MAX_BYTES).decode(errors="replace") or f"it wrote no stacks within {WRITE_S:g} s."


def _catches(pid: int) -> bool:
    """Return whether the process handles the signal, which would end one without a handler."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (SIGNAL - 1) & 1)


def _status(pid: int) -> str:
    """State of a process: stopped, waiting for a disk, running, …"""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def cpu_entry(key: str) -> str:
    """The first core's entry in /proc/cpuinfo, such as `model name`, `vendor_id` or `flags`; empty where there is
    none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    entries = (line.split(":", 1) for line in lines if ":" in line)
    return next((value.strip() for name, value in entries if name.strip() == key), "")


def prepare_for_torch() -> None:
    """Set the environment variables of `SETTINGS`; those that the user has set stay."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def use_expandable_segments() -> None:
    """Have torch's allocator enlarge its pieces of GPU memory, which rows of all lengths break up otherwise: memory is
    then free that no tensor fits into. Before torch first uses the GPU. What the user has set stays."""
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = EXPANDABLE


def compiled_folder() -> str | None:
    """The directory where what torch compiles stays for later runs: below XDG_CACHE_HOME, or ~/.cache, where models of
    the hub lie as well. torch's own default is the temporary directory, which containers and restarts empty. None: no
    such directory may be written to."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "penstock" / "inductor"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # not ours, or there is no home
        return None
    return str(folder) if os.access(folder, os.W_OK | os.X_OK) else None


def keep_compiled() -> None:
    """Have torch keep what this process compiles in `compiled_folder`; TORCHINDUCTOR_CACHE_DIR of the user stays."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ and (folder := compiled_folder()) is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
