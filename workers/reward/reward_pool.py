"""A pool of processes that score samples, each sample with a deadline that kills.

A reward worker has one pool. A reward that hangs, crashes, raises or returns no number costs its own sample only:
everything else in its batch is scored all the same.

The other end of a process is `reward_child.py`. asyncio's streams find the ends of lines and bound their length.
Libraries do not fit: `pebble` unpickles what a child sends, and a `multiprocessing.connection` that has begun to read a
message waits for its end, which blocks the whole event loop or a thread for each process.
"""

import asyncio
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from penstock.conf.errors import ConfigError, DeadlineExceeded, PenstockError, WorkerDied, how_ended
from penstock.conf.reward import RewardConfig
from penstock.workers.reward.reward_registry import RewardSpec
from penstock.workers.reward.reward_result import (
    MAX_BYTES,
    BadMessageError,
    RewardError,
    RewardResult,
    ScoringPool,
    answer_of,
    result_of,
)
from penstock.workers.runtime.async_tasks import cancel_all, time_limit_paused

T = TypeVar("T")
GRACE_S = 0.25
"""Seconds after the deadline for async rewards, which are timed in the child; the process is killed if even that does
not answer."""
Item = tuple[int, Any, str]
"""Position in the call, response, task as JSON."""
MOST_LOGGED = 100
"""Largest number of metrics that a function may log."""
Results = asyncio.Queue[tuple[int, RewardResult] | BaseException]


class RewardProcess:
    """A child process with the function loaded.

        process = await RewardProcess.start(spec, timeout_s=10, start_timeout_s=60)
        await process.score(responses, tasks, report, log)     # report(index, result) as results come, log(name, value)
        process.kill()

    `score` raises `DeadlineExceeded` when the batch is not taken or no result comes for `timeout_s`, and `WorkerDied`
    when the process ends or sends what is none of its messages. Either way the process is of no use any more: kill it
    and start another.
    """

    def __init__(
        self,
        child: "subprocess.Popen[bytes]",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        timeout_s: float,
    ) -> None:
        self.child, self.reader, self.writer, self.timeout_s = child, reader, writer, timeout_s
        self.order = "together"
        self.busy_s = 0.0

    @classmethod
    async def start(cls, spec: RewardSpec, timeout_s: float, start_timeout_s: float) -> "RewardProcess":
        """Start a process with the function. Raises `ConfigError` if the function cannot be loaded, `DeadlineExceeded`
        if that takes too long."""
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "penstock.workers.reward.reward_child", str(theirs.fileno())]
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        process = cls(child, *await asyncio.open_connection(sock=ours, limit=MAX_BYTES), timeout_s)
        try:
            process._send(("load", spec, sys.path, timeout_s))
            kind, text = await asyncio.wait_for(process._received(answer_of), start_timeout_s)
        except TimeoutError:
            process.kill()
            raise DeadlineExceeded(
                f"reward.function: loading it in a new process took longer than {start_timeout_s:g} s. Make its "
                "import faster."
            ) from None
        except (asyncio.CancelledError, WorkerDied):
            process.kill()
            raise
        if kind == "refused":
            process.kill()
            raise ConfigError(text)
        process.order = text
        return process

    @property
    def is_alive(self) -> bool:
        return self.child.poll() is None

    async def score(
        self,
        responses: Sequence[Any],
        tasks: Sequence[str],
        report: Callable[[int, RewardResult], None],
        log: Callable[[str, float], None],
    ) -> None:
        """Score a batch; `tasks` are JSON strings. Results are reported as they come, in any order. `log`: takes
        metrics that the function logs."""
        started = time.perf_counter()
        due = set(range(len(responses)))
        next_result = partial(result_of, due=due)
        try:
            self._send(("score", list(responses), list(tasks)))
            deadline_s = self.timeout_s + (GRACE_S if self.order == "together" else 0.0)
            async with asyncio.timeout(deadline_s) as deadline:
                await self._sent()
                while (result := await self._received(next_result)) is not None:
                    if isinstance(result[0], str):
                        log(*result)
                        continue
                    due.remove(result[0])
                    report(*result)
                    deadline.reschedule(asyncio.get_running_loop().time() + deadline_s)
            if due:
                raise WorkerDied(f"the reward process left {len(due)} of {len(responses)} sample(s) without a result.")
        except TimeoutError:
            raise DeadlineExceeded(f"no result within reward.timeout_s={self.timeout_s:g} s.") from None
        finally:
            self.busy_s += time.perf_counter() - started

    def kill(self) -> None:
        """End the process and all processes that it started, now. May be called twice."""
        if self.child.poll() is None:
            # The child leads a session of its own, so its process group holds its own subprocesses and nothing else.
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
        self.writer.transport.abort()  # what was not taken is not for anybody any more

    def _send(self, message: Any) -> None:
        self.writer.write(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    async def _sent(self) -> None:
        """Wait until the process has taken nearly all that was sent."""
        try:
            await self.writer.drain()
        except ConnectionError:
            raise WorkerDied(f"the reward process ended while it took its batch: {await self._ending()}") from None

    async def _received(self, meaning: Callable[[bytes], T]) -> T:
        """Read the next line, by its meaning."""
        try:
            return meaning(await self.reader.readuntil())
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerDied(f"the reward process ended: {await self._ending()}") from None
        except asyncio.LimitOverrunError:
            said = f"sent a line of more than {MAX_BYTES:,} bytes"
        except BadMessageError as error:
            said = str(error)
        raise WorkerDied(
            f"the reward process {said}: the reward function, or what it imports, writes to a connection that is not "
            "its own."
        )

    async def _ending(self) -> str:
        """The way the process ended, as text. Its socket closes a moment before the process can be waited for."""
        for _ in range(100):
            if (code := self.child.poll()) is not None:
                return how_ended(code)
            await asyncio.sleep(0.01)
        return "it closed its connection"


class RewardPool(ScoringPool):
    """Scores samples in `num_processes` processes.

    Lifecycle: `start` loads the function in every process (or raises `ConfigError`); `score` and `stream` may be called
    concurrently from then on; `close` ends the processes. They also end when this one does.

        async with RewardPool(RewardSpec.of("digits"), num_processes=2) as pool:
            await pool.score(["42", "no"], ["{}", "{}"])      # [1.0, 0.0]
    """

    def __init__(
        self, spec: RewardSpec, *, num_processes: int = 1, timeout_s: float = 10.0, start_timeout_s: float = 120.0
    ) -> None:
        """`timeout_s`: deadline of each sample. `start_timeout_s`: deadline of loading the function in a process."""
        self.spec, self.num_processes, self.num_lanes = spec, num_processes, num_processes
        self.timeout_s, self.start_timeout_s = timeout_s, start_timeout_s
        self.timeouts = 0
        """Number of samples that missed their deadline here (an async reward's own loop times its samples itself)."""
        self.last_loss = ""
        """The reason why a process was lost last: "timeout" or "crash"."""
        self.logged: dict[str, tuple[float, int]] = {}
        self._idle: asyncio.Queue[RewardProcess | PenstockError] = asyncio.Queue()
        self.alive: set[RewardProcess] = set()
        """Processes that have started, idle ones too."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._largest_batch = 2**31
        self._busy_of_dead_s = 0.0

    @classmethod
    def of(cls, config: RewardConfig, spec: RewardSpec | None = None) -> "RewardPool":
        """Make the pool that the configuration asks for. `spec`: instead of the function that the configuration
        names."""
        spec = spec or RewardSpec.of(config.function, config.options)
        return cls(spec, num_processes=config.num_processes, timeout_s=config.timeout_s)

    async def __aenter__(self) -> "RewardPool":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start every process and load the function in it. Raises `ConfigError`, `DeadlineExceeded` or `WorkerDied`."""
        try:
            await asyncio.gather(*(self._start_one() for _ in range(self.num_processes)))
        except PenstockError:
            await self.close()
            raise

    async def close(self) -> None:
        """Kill the processes. Calls in progress are cancelled."""
        await cancel_all(list(self._tasks))
        for process in self.alive:
            process.kill()
        self.alive.clear()

    @property
    def busy_s(self) -> float:
        """Seconds that processes spent scoring, added up."""
        return self._busy_of_dead_s + sum(process.busy_s for process in self.alive)

    async def stream(self, responses: Sequence[Any], tasks: Sequence[str]) -> AsyncIterator[tuple[int, RewardResult]]:
        """Yield `(index, result)` for each response, as they come. `tasks` are JSON strings, one a response.

        Raises `PenstockError` if a process cannot be replaced.
        """
        ready: Results = asyncio.Queue()
        items = list(zip(range(len(responses)), responses, tasks, strict=True))
        calls = [self._spawn(self._score_part(part, ready)) for part in self._parts(items)]
        for call in calls:
            call.add_done_callback(partial(_forward_failure, ready))
        try:
            for _ in items:
                result = await ready.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
            # A process is idle a moment after its last result; cancelling its call before that would cost its life.
            await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()

    def _parts(self, items: list[Item]) -> list[list[Item]]:
        size = min(max(1, math.ceil(len(items) / self.num_processes)), self._largest_batch)
        return [items[first : first + size] for first in range(0, len(items), size)]

    def _spawn(self, coroutine: Any) -> "asyncio.Task[Any]":
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _score_part(self, items: list[Item], ready: Results) -> None:
        """Score one process's share, going on in another process with what a lost one left."""
        left = await self._score_batch(items, ready)
        timeouts = self.timeouts
        apart = len(left) > 1
        while left:
            left = [rest for batch in left for rest in await self._score_batch(batch, ready)]
        if apart and self.timeouts == timeouts and self.last_loss == "timeout":
            # Each sample was in time on its own, so the function needs longer for many: smaller batches suit it.
            self._largest_batch = max(1, len(items) // 2)

    async def _score_batch(self, batch: list[Item], ready: Results) -> list[list[Item]]:
        """Score in one process and return the batches that are still to do, none unless the process was lost."""
        process = await self.take()
        unscored = dict(enumerate(batch))
        whole = False

        def report(position: int, result: RewardResult) -> None:
            ready.put_nowait((unscored.pop(position)[0], result))

        try:
            await process.score([item[1] for item in batch], [item[2] for item in batch], report, self._log)
            whole = True
        except DeadlineExceeded as error:
            lost = RewardError("timeout", str(error))
        except WorkerDied as error:
            lost = RewardError("crash", str(error))
        finally:
            self.give_back(process, whole)
        if not unscored:
            return []
        left = list(unscored.values())
        self.last_loss = lost.kind
        if process.order == "sequential" or len(batch) == 1:
            self.timeouts += lost.kind == "timeout"
            ready.put_nowait((left[0][0], lost))
            return [left[1:]] if left[1:] else []
        return [[item] for item in left]

    def _log(self, name: str, value: float) -> None:
        if name in self.logged or len(self.logged) < MOST_LOGGED:
            total, count = self.logged.get(name, (0.0, 0))
            self.logged[name] = total + value, count + 1

    async def take(self) -> RewardProcess:
        """Take an idle process; one that ended while it was idle is replaced, and no sample blamed."""
        while True:
            with time_limit_paused():
                process = await self._idle.get()
            if isinstance(process, PenstockError):
                self._idle.put_nowait(process)
                raise process
            if process.is_alive:
                return process
            self.give_back(process, whole=False)

    def give_back(self, process: RewardProcess, whole: bool) -> None:
        if whole:
            self._idle.put_nowait(process)
            return
        self.alive.discard(process)
        self._busy_of_dead_s += process.busy_s
        process.kill()
        self.replaced += 1
        self._spawn(self._replace())

    async def _start_one(self) -> None:
        process = await RewardProcess.start(self.spec, self.timeout_s, self.start_timeout_s)
        self.alive.add(process)
        self._idle.put_nowait(process)

    async def _replace(self) -> None:
        try:
            await self._start_one()
        except PenstockError as error:
            self._idle.put_nowait(error)


def _forward_failure(ready: Results, call: "asyncio.Task[Any]") -> None:
    """Pass on the failure of a call that ended without results to the caller that waits for them, whatever ended it."""
    failure = WorkerDied("the reward pool is closed") if call.cancelled() else call.exception()
    if failure is not None:
        ready.put_nowait(failure)
