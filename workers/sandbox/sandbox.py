"""Runs code that a model wrote, and returns how it ended and what data it returned. The entry to this folder.

    caller ─▶ Sandbox ─▶ FenceWorker (a fence that stands ready) ═▶ keeper ─▶ one process an execution
                            outside ◀═══════════════════════▶ inside

Code may do anything to itself: what it returned is compared outside of the fence, as data (`execution.py`).

Before anything else runs behind a fence, a program inside tries what has to fail: `check` is called with the first
worker, and with the first that has no control group. `holes` decides, and is pure.
"""

import asyncio
import logging
import os
import signal
import socket
import tempfile
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from penstock.conf.environment import SandboxConfig
from penstock.conf.errors import NotStarted, SandboxUnavailable
from penstock.workers.runtime.async_tasks import time_limit_paused
from penstock.workers.sandbox import probe
from penstock.workers.sandbox.cgroup import descendants, memory_of
from penstock.workers.sandbox.execution import (
    MIB,
    CallResult,
    Ending,
    Limits,
    ProgramOutcome,
    Value,
    outcome_of,
    reason_of,
    results_of,
)
from penstock.workers.sandbox.fence import DEVICES, NAMESPACES, FencePrograms, WorkspaceView
from penstock.workers.sandbox.sandbox_worker import FenceKilled, FenceWorker, standing

_LOG = logging.getLogger("penstock")
HIDDEN = (
    *("/proc/1", "/proc/self", "/sys/kernel", "/dev/kmsg", "/dev/mem", "/home", "/var", "/run", "/etc/passwd"),
    *("/usr/share/doc", "/usr/src", "/usr/include"),
)
OWN_IN_WORKSPACES = ("/proc/1", "/proc/self", "/etc/passwd")
"""Paths that a workspace has, too, with content of its own."""
SEEN_BYTES = 8 * MIB
WAITING = f"import time\nkept = bytearray({SEEN_BYTES})\nkept[::4096] = kept[::4096]\ntime.sleep(1e6)"
LOOK_S = 0.01
SEEN_S = 10.0
"""Seconds for the watch to see the process; it does at the first look on a machine that is not busy."""
WORDS = {
    "seen": "sees",
    "written": "can write to",
    "left_over": "begins with files in /tmp:",
    "connected": "can connect to",
    "granted": "may call",
}


class Sandbox:
    """A pool of fences. Belongs to one event loop.

        async with Sandbox() as sandbox:
            await sandbox.run_python("print(6 * 7)")                                # ProgramOutcome(stdout="42\\n", …)
            await sandbox.call("def f(a, b): return a + b", "f", [[1, 2], [1, ""]]) # [Value(3), Failed("raised", …)]

    Lifecycle: `start` is optional, and else done by the first use; `close` takes all fences down, and what runs then is
    lost. Before anything runs, a program tries the fence from inside; if it has a hole, or cannot be built, every use
    raises `SandboxUnavailable`. So does the first fence that is given no control group where others were. Executions
    that find no worker free wait for one; their caller's own time stands still meanwhile. A call that is cancelled ends
    what it runs.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        num_workers: int = SandboxConfig.num_workers,
        reuse: bool = True,
        machine: FencePrograms | None = None,
    ) -> None:
        """`reuse=False`: a new fence and a new interpreter for each execution. `machine`: for tests."""
        self.limits = limits or Limits()
        self.reuse = reuse
        self._machine = machine
        self._checked: set[bool] = set()
        """Kinds of fences that a program has tried: with a control group (True), and without."""
        self.enforced = ""
        """A text that says which limits hold here, once a first fence stands: those of the weakest so far."""
        self._is_closed = False
        self._starting = asyncio.Lock()
        self.places: asyncio.LifoQueue[FenceWorker | None] = asyncio.LifoQueue()
        """Idle workers; None: one that is to be started."""
        self.alive: set[FenceWorker] = set()
        """Workers whose fence stands, idle ones too."""
        for _ in range(num_workers):
            self.places.put_nowait(None)

    @classmethod
    def of(cls, config: SandboxConfig) -> "Sandbox":
        return cls(Limits.of(config), num_workers=config.num_workers)

    async def __aenter__(self) -> "Sandbox":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def start(self) -> None:
        """Start a first fence and check it from inside. Raises `SandboxUnavailable`."""
        async with self._worker():
            pass

    def close(self) -> None:
        """Take all fences down, with what runs in them."""
        self._is_closed = True
        for worker in self.alive:
            worker.close()
        self.alive.clear()

    async def run_python(self, source: str, stdin: str | bytes = b"", wall_s: float | None = None) -> ProgramOutcome:
        """Run a program as `python FILE < STDIN`. `wall_s`: a deadline below that of the limits."""
        typed = stdin.encode(errors="surrogateescape") if isinstance(stdin, str) else stdin
        return outcome_of(await self.execute({"source": source}, typed, wall_s), self.limits)

    async def call(
        self, source: str, function: str, calls: Sequence[Sequence[Any]], wall_s: float | None = None
    ) -> list[CallResult]:
        """Run the code, then call its `function` (`solve`, or `Solution.solve`) with each list of arguments, in turn
        and in one process: the limits are for all of them. Arguments are plain data.

        Returns one result for each call. What ends the process fails the calls that come after it, too.
        """
        request = {"source": source, "function": function, "calls": [list(arguments) for arguments in calls]}
        return results_of(await self.execute(request, b"", wall_s), len(calls), self.limits)

    async def execute(self, request: dict[str, Any], stdin: bytes, wall_s: float | None) -> Ending:
        """Execute a request. It is made once more, behind a new fence, for an end that others may have caused: a
        process may have killed the fence, or the missing memory may be what an earlier execution behind it had and the
        kernel frees late.
        """
        left_s = self.limits.wall_s if wall_s is None else min(wall_s, self.limits.wall_s)
        async with self._worker() as worker:
            ending = await worker.execute(request, stdin, left_s)
            was_first = worker.num_executions == 1
        left_s -= ending.seconds
        reason = reason_of(ending, self.limits)
        is_own = reason != "lost" and (reason != "memory" or was_first)
        if is_own or left_s <= 0 or self._is_closed:
            return ending
        async with self._worker(new=True) as worker:
            return await worker.execute(request, stdin, left_s)

    @asynccontextmanager
    async def _worker(self, new: bool = False) -> AsyncIterator[FenceWorker]:
        """Take an idle worker, for one execution. `new`: one that has run nothing."""
        if self._is_closed:
            raise NotStarted("Sandbox: it is closed. Make another.")
        with time_limit_paused():
            worker = await self.places.get()
        kept: FenceWorker | None = None
        try:
            if worker is not None and new and worker.num_executions:
                worker.close()
                self.alive.discard(worker)
                worker = None
            if worker is None:
                with time_limit_paused():
                    worker = await standing(self._started)
            yield worker
            kept = worker if self.reuse and worker.is_open else None
        finally:
            if kept is None and worker is not None:
                worker.close()
                self.alive.discard(worker)
            self.places.put_nowait(kept)

    async def _started(self) -> FenceWorker:
        machine = self._machine = self._machine or FencePrograms.here()
        worker = await FenceWorker.start(machine, self.limits, rehearse=self.reuse)
        self.alive.add(worker)
        try:
            async with self._starting:
                has_cgroup = worker.cgroup is not None
                if has_cgroup not in self._checked:
                    await check(worker, machine)
                    self._checked.add(has_cgroup)
                    self.enforced = self.enforced if has_cgroup and self.enforced else worker.enforced
                    if not has_cgroup:
                        _LOG.warning("sandbox: %s. docs/sandbox.md says how to be given one", self.enforced)
        except BaseException:
            worker.close()
            self.alive.discard(worker)
            raise
        return worker


class BlockingSandbox:
    """A sandbox for callers without an event loop, such as rewards, which run in processes of their own: with one
    fence, used from one thread, with `Sandbox`'s calls. It ends with this process, however that ends."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._loop = asyncio.new_event_loop()  # not the thread's: the reward may be called by code that has one
        self.sandbox = Sandbox(limits, num_workers=1)
        self._end = weakref.finalize(self, self.sandbox.close)  # at this process's exit, if not before

    def start(self) -> None:
        """Start the fence. Raises `SandboxUnavailable` if code cannot be fenced in here."""
        self._loop.run_until_complete(self.sandbox.start())

    @property
    def enforced(self) -> str:
        """A text that says which limits hold here, once the fence has started."""
        return self.sandbox.enforced

    def close(self) -> None:
        self._end()
        self._loop.close()

    def run_python(self, source: str, stdin: str | bytes = b"", wall_s: float | None = None) -> ProgramOutcome:
        return self._loop.run_until_complete(self.sandbox.run_python(source, stdin, wall_s))

    def call(
        self, source: str, function: str, calls: Sequence[Sequence[Any]], wall_s: float | None = None
    ) -> list[CallResult]:
        return self._loop.run_until_complete(self.sandbox.call(source, function, calls, wall_s))


async def check(worker: FenceWorker, machine: FencePrograms) -> None:
    """Check a fence. Raises `SandboxUnavailable` with every hole that is found; `FenceKilled` if it is killed."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory, socket.socket(socket.AF_UNIX) as listener:
        name = f"penstock-{os.getpid()}-{os.urandom(8).hex()}"
        listener.bind(f"\0{name}")
        listener.listen(1)
        with socket.create_server(("127.0.0.1", 0)) as server:
            request = {
                "source": Path(probe.__file__).read_text(),
                "function": "probe",
                "calls": [
                    [[directory, *hidden_paths(machine, worker.view)], list(DEVICES), name, server.getsockname()[1]]
                ],
            }
            ending = await worker.execute(request, b"")
    result = results_of(ending, 1, worker.limits)[0]
    if not isinstance(result, Value):
        failure = FenceKilled if result.reason == "lost" else SandboxUnavailable
        raise failure(
            f"sandbox: the program that tries the fence from inside failed ({result.reason}: {result.text[-400:]}), so "
            "no code of a model runs."
        )
    facts = result.data | {"granted": [name for name in result.data["granted"] if name not in worker.allowed]}
    found = holes(facts, worker.limits_inside) + shared_namespaces(worker.keeper)
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


async def is_seen(worker: FenceWorker) -> bool:
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


def hidden_paths(machine: FencePrograms, view: WorkspaceView | None = None) -> list[str]:
    """Paths of the host that must not be seen inside, unless the interpreter's tree lies below them, or what a
    workspace shows: such a directory is there, with nothing else."""
    of_the_user = [os.path.expanduser(f"~/{name}") for name in (".ssh", ".cache", ".bashrc")]
    paths = [*HIDDEN, *of_the_user]
    there = [machine.prefix]
    if view is not None:
        paths = [path for path in paths if path not in OWN_IN_WORKSPACES and not _is_below(path, view.shown)]
        there += [Path(view.at), *view.shown]
    return [path for path in paths if not any(place.is_relative_to(path) for place in there)]


def _is_below(path: str, shown: Iterable[Path]) -> bool:
    return any(Path(path).is_relative_to(place) for place in shown)


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


def shared_namespaces(keeper: int) -> list[str]:
    """Namespaces of this process that a process inside is in too, as far as /proc tells."""
    found = []
    with suppress(PermissionError):
        for name in (*NAMESPACES, "mnt"):
            if os.readlink(f"/proc/{keeper}/ns/{name}") == os.readlink(f"/proc/self/ns/{name}"):
                found.append(f"its {name} namespace is this one")
    return found
