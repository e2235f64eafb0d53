"""A child process of the reward pool, seen from the pool: start it, give it a batch, receive each result, kill it.

The other end is `child.py`. asyncio's streams find the ends of lines and bound their length. Libraries do not fit:
`pebble` unpickles what a child sends, and a `multiprocessing.connection` that has begun to read a message waits for its
end, which blocks the whole event loop or a thread for each process.
"""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from penstock.conf.errors import ConfigError, DeadlineExceeded, WorkerDied, how_ended
from penstock.workers.reward.registry import RewardSpec
from penstock.workers.reward.result import MAX_BYTES, BadMessageError, RewardResult, answer_of, result_of

T = TypeVar("T")
GRACE_S = 0.25
"""Seconds after the deadline for async rewards, which are timed in the child; the process is killed if even that does
not answer."""


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
            command = [sys.executable, "-m", "penstock.workers.reward.child", str(theirs.fileno())]
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
