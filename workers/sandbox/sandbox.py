"""Runs code that a model wrote, and returns how it ended and what data it returned. The entry to this folder.

    caller ─▶ Sandbox ─▶ Worker (a fence that stands ready) ═▶ keeper ─▶ one process an execution
                            outside ◀═══════════════════════▶ inside

Code may do anything to itself: what it returned is compared outside of the fence, as data (`execution.py`).
"""

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from penstock.conf.environment import SandboxConfig
from penstock.conf.errors import NotStarted
from penstock.workers.lifecycle.contained import waiting
from penstock.workers.sandbox.check import check
from penstock.workers.sandbox.execution import (
    CallResult,
    Ending,
    Limits,
    ProgramOutcome,
    outcome_of,
    reason_of,
    results_of,
)
from penstock.workers.sandbox.fence import Machine
from penstock.workers.sandbox.sandbox_worker import Worker

_LOG = logging.getLogger("penstock")


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
        machine: Machine | None = None,
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
        self.places: asyncio.LifoQueue[Worker | None] = asyncio.LifoQueue()
        """Idle workers; None: one that is to be started."""
        self.alive: set[Worker] = set()
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
    async def _worker(self, new: bool = False) -> AsyncIterator[Worker]:
        """Take an idle worker, for one execution. `new`: one that has run nothing."""
        if self._is_closed:
            raise NotStarted("Sandbox: it is closed. Make another.")
        with waiting():
            worker = await self.places.get()
        kept: Worker | None = None
        try:
            if worker is not None and new and worker.num_executions:
                worker.close()
                self.alive.discard(worker)
                worker = None
            if worker is None:
                with waiting():
                    worker = await self._started()
            yield worker
            kept = worker if self.reuse and worker.is_open else None
        finally:
            if kept is None and worker is not None:
                worker.close()
                self.alive.discard(worker)
            self.places.put_nowait(kept)

    async def _started(self) -> Worker:
        machine = self._machine = self._machine or Machine.here()
        worker = await Worker.start(machine, self.limits, rehearse=self.reuse)
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


def checked_here(all_limits: Iterable[Limits]) -> str:
    """A text that says what holds on this machine, once fences with each of these limits have been started, tried from
    inside and closed. Raises `SandboxUnavailable`."""
    enforced: list[str] = []
    for limits in all_limits:
        fence = BlockingSandbox(limits)
        try:
            fence.start()
            enforced.append(fence.enforced)
        finally:
            fence.close()
    return f"tried from inside, and no hole found; {'; '.join(dict.fromkeys(enforced))}"
