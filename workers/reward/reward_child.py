"""A process of the reward pool: `python -m penstock.workers.reward.reward_child FD`.

It talks over one socket, so that the reward's own output goes to the log and never into the protocol:

    pool ─▶ ("load", RewardSpec, sys.path, timeout_s)      child ─▶ ready or refused
    pool ─▶ ("score", responses, task JSON strings)        child ─▶ score or error of each sample, metrics, done

The pool's messages are pickles, which say where they end; the child's are those of `reward_result.py`.

`order` tells the pool which sample to blame when the process ends or hangs. "sequential": results come in the order of
the samples, so it is the first one without a result. "together": the samples share one call, so it may be any.
"""

import asyncio
import ctypes
import faulthandler
import io
import math
import pickle
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

from penstock.conf.errors import PenstockError
from penstock.workers.reward.reward_registry import RewardSpec
from penstock.workers.reward.reward_result import (
    MAX_NAME,
    RewardError,
    RewardResult,
    as_score,
    bounded,
    packed,
    packed_refusal,
    packed_result,
)
from penstock.workers.reward.signatures import RewardFunction, TaskColumns, with_task

PR_SET_PDEATHSIG = 1

Report = Callable[[int, RewardResult], None]
Send = Callable[[bytes], None]


class BatchScorer:
    """Scores batches with one function: samples in turn, a batch in one call, or async samples at the same time."""

    def __init__(self, function: RewardFunction, timeout_s: float) -> None:
        self.function = function
        self.timeout_s = timeout_s
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)

    @property
    def order(self) -> str:
        return "sequential" if self.function.one is not None and not self.function.is_async else "together"

    def score(self, responses: list[str], tasks: list[TaskColumns], report: Report) -> None:
        """Call `report(index, result)` once for each sample, as soon as it is known."""
        if self.function.many is not None:
            self._batch(responses, tasks, report)
        elif self.function.is_async:
            self.loop.run_until_complete(self._concurrently(responses, tasks, report))
        else:
            for index, (response, task) in enumerate(zip(responses, tasks, strict=True)):
                value = self._guarded(partial(self._one, response, task))
                report(index, value if isinstance(value, RewardError) else as_score(value))

    def _one(self, response: str, task: TaskColumns) -> Any:
        assert self.function.one is not None
        return self._settled(self.function.one(response, task))

    def _settled(self, value: Any) -> Any:
        return self.loop.run_until_complete(_awaited(value, self.timeout_s)) if isinstance(value, Awaitable) else value

    def _guarded(self, call: Callable[[], Any]) -> Any:
        """Return what the call returns, or the `RewardError` of what it raised. A user's function may raise
        anything."""
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - the reward is the user's
            return RewardError.of(error)

    def _batch(self, responses: list[str], tasks: list[TaskColumns], report: Report) -> None:
        """Score all samples in one call; if that fails as a whole, each sample in a call of its own, to find the bad
        one."""
        values = self._guarded(partial(self._many, responses, tasks))
        if not isinstance(values, RewardError):
            for index, value in enumerate(values):
                report(index, None if value is None else as_score(value))
        elif len(responses) == 1:
            report(0, values)
        else:
            for index, (response, task) in enumerate(zip(responses, tasks, strict=True)):
                self._batch([response], [task], partial(_at, report, index))

    def _many(self, responses: list[str], tasks: list[TaskColumns]) -> list[Any] | RewardError:
        assert self.function.many is not None
        values = self._settled(self.function.many(responses, tasks))
        if isinstance(values, RewardError):
            return values
        if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
            return RewardError(
                "bad_value", f"returned {type(values).__name__} {values!r:.80}; one number for each sample is due."
            )
        if len(values) != len(responses):
            return RewardError("bad_value", f"returned {len(values)} values for {len(responses)} sample(s).")
        return list(values)

    async def _concurrently(self, responses: list[str], tasks: list[TaskColumns], report: Report) -> None:
        async def score(index: int) -> None:
            assert self.function.one is not None
            value = await _awaited(self.function.one(responses[index], tasks[index]), self.timeout_s)
            report(index, value if isinstance(value, RewardError) else as_score(value))

        await asyncio.gather(*(score(index) for index in range(len(responses))))


def _at(report: Report, index: int, _: int, result: RewardResult) -> None:
    """Report the only sample of a batch as the one at `index` of another."""
    report(index, result)


async def _awaited(value: Awaitable[Any], timeout_s: float) -> Any:
    """Return what a user's awaitable gives, or the `RewardError` of what it raised."""

    async def guarded() -> Any:
        # Inside the task: asyncio ends the whole loop when a SystemExit leaves one.
        try:
            return await value
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the deadline cancels; without it the function has raised the error itself
            return RewardError.of(error)

    try:
        return await asyncio.wait_for(guarded(), timeout_s)
    except asyncio.CancelledError as error:
        return RewardError.of(error)  # the function has cancelled its own task
    except TimeoutError:
        return RewardError("timeout", f"no result within reward.timeout_s={timeout_s:g} s.")


def die_with_parent() -> None:
    """Have the kernel end this process with the thread that started it, even while a reward hangs (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(pool: BinaryIO, send: Send) -> None:
    """Serve the pool until it is gone (`EOFError`)."""
    _, spec, path, timeout_s = pickle.load(pool)
    sys.path[:] = path
    scorer = _loaded(spec, timeout_s, send)
    while scorer is not None:
        _, responses, tasks = pickle.load(pool)
        samples = [with_task(response, task) for response, task in zip(responses, tasks, strict=True)]
        scorer.score(
            [response for response, _ in samples], [columns for _, columns in samples],
            lambda index, result: send(packed_result(index, result)),
        )  # fmt: skip
        send(packed("done"))


def _log_metric(send: Send, name: str, value: float) -> None:
    """Send what a function logs. A value that is no number is left out."""
    if math.isfinite(number := float(value)):
        send(packed("metric", bounded(str(name), MAX_NAME), number))


def _loaded(spec: RewardSpec, timeout_s: float, send: Send) -> BatchScorer | None:
    try:
        scorer = BatchScorer(spec.resolve(partial(_log_metric, send)), timeout_s)
        spec.warm()
    except PenstockError as error:
        send(packed_refusal(str(error)))
        return None
    except BaseException as error:  # noqa: BLE001 - the import of the user's module may raise anything
        send(packed_refusal(f"reward.function: loading it failed: {RewardError.of(error).text}"))
        return None
    send(packed("ready", scorer.order))
    return scorer


def main() -> None:
    die_with_parent()
    faulthandler.enable()  # a segmentation fault says where, in the log
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what was printed is in the log when a deadline kills this process
    connection = socket.socket(fileno=int(sys.argv[1]))
    # A reward's own subprocesses must not hold the pool's socket open.
    connection.set_inheritable(False)
    with suppress(EOFError, ConnectionError):  # the pool is closed
        serve(connection.makefile("rb"), connection.sendall)


if __name__ == "__main__":
    main()
