"""Calls of actors: every wait has a deadline, and every failure arrives as one of Penstock's own errors, which says
whether a new process can help (`is_recoverable`).

Processes that wait for each other fail together, and which failure comes first is chance: a rank's "another rank is
gone" arrives before Ray reports the death. So a failure that may be a consequence is held back for `CAUSE_GRACE_S`, and
`cause_of` picks the one that explains the rest:

    user's data or code, settings, bugs  ▸  the death of a process  ▸  deadlines  ▸  a partner or the store is gone
"""

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from itertools import zip_longest
from typing import Any, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from penstock.conf.errors import (
    DeadlineExceeded,
    LeaseExpired,
    PartnerGone,
    PenstockError,
    WorkerDied,
    WorkerFailed,
    is_device_failure,
)
from penstock.store.errors import RowsLost, RowsUnreachable, StoreClosed, StoreUnreachable

Handles = Sequence[tuple[str, Any]]
"""Names and handles of actors."""
MEMORY_KEYS = {
    "Rollout": "lower rollout.kv_cache_gib, or rollout.gpu_memory_utilization on a GPU",
    "Trainer": "lower trainer.max_tokens_per_microbatch, or raise trainer.num_ranks",
    "Scorer": "lower trainer.max_tokens_per_microbatch, or raise trainer.num_ranks",
    "Reward": "lower reward.num_processes",
    "Store": "lower store.max_bytes or store.shared_memory_mib",
}
"""Keys that an actor's memory depends on, by the first word of its name."""
START = "start"
"""Phase in which processes start, for which Ray may have to make a runtime environment first."""
PRESENT_S = 15.0
"""Seconds within which a living actor answers."""
GRACE_S = 10.0
"""Extra seconds for an actor that has the same deadline, ends its work then and says why."""
CAUSE_GRACE_S = 3.0
"""Seconds that a consequence waits for its cause: Ray tells of a death within a second on a machine that is not
overloaded."""
MAX_OTHERS = 5
MAX_OTHER_CHARS = 200
_NO_ITEM = object()
T = TypeVar("T")
_F = TypeVar("_F", bound="asyncio.Future[Any] | concurrent.futures.Future[Any]")


class Kind(IntEnum):
    """Kinds of failures: lower ones explain higher ones."""

    ERROR = 0
    """An error of the user's data or code, of settings, or a bug: it would come again."""
    DEATH = 1
    LATE = 2
    CONSEQUENCE = 3
    """A partner, the store or a node is gone."""


def kind_of(error: BaseException) -> Kind:
    if isinstance(error, PartnerGone | StoreClosed | StoreUnreachable | RowsUnreachable | RowsLost):
        return Kind.CONSEQUENCE
    if isinstance(error, DeadlineExceeded | LeaseExpired):
        return Kind.LATE
    if isinstance(error, WorkerDied) and not isinstance(error, WorkerFailed):
        return Kind.DEATH
    return Kind.ERROR


def is_cause(error: BaseException) -> bool:
    """Return whether an error needs no other failure to be explained."""
    return kind_of(error) <= Kind.DEATH


def cause_of(failures: Sequence[BaseException]) -> BaseException:
    """The failure that explains the rest, the first of its kind; its message lists them in short."""
    cause = min(failures, key=kind_of)  # the first of several that are equal
    told = {_line(cause)}
    others = [line for line in dict.fromkeys(map(_line, failures)) if line not in told]
    if not others:
        return cause
    listed = [f"  {line}" for line in others[:MAX_OTHERS]]
    listed += [f"  and {len(others) - MAX_OTHERS} more"] if len(others) > MAX_OTHERS else []
    text = "\n".join(["What failed with it:", *listed])
    if isinstance(cause, PenstockError):
        return type(cause)(f"{cause}\n{text}")
    cause.add_note(text)
    return cause


def leaves(failures: BaseExceptionGroup[Any]) -> list[Any]:
    """Failures in an exception group, in order, also of groups within it."""
    found: list[Any] = []
    for error in failures.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


async def held_back(work: Awaitable[T], grace_s: float = CAUSE_GRACE_S) -> T:
    """Await work and return its result. In a task group, an error that may be a consequence is raised once another task
    has failed, or after the grace."""
    try:
        return await work
    except PenstockError as error:
        if not is_cause(error):
            with contextlib.suppress(asyncio.CancelledError):  # the task group ends: this failure is part of it
                await asyncio.sleep(grace_s)
        raise


def run_in_thread(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own: a notebook has an event loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def first_line(error: object) -> str:
    """The first line of an error's message that is not blank."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {first_line(error)}"
    return text if len(text) <= MAX_OTHER_CHARS else text[: MAX_OTHER_CHARS - 1] + "…"


def translate(error: Exception, name: str) -> Exception:
    """The error that an actor raised, without Ray's wrapping. Its death, the failure of its GPU, and all other errors
    of Ray come as `WorkerDied`. Errors of this process are returned as they are."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, PenstockError):
            return cause
        if isinstance(cause, RayActorError | OutOfMemoryError):
            return PartnerGone(f"an actor that {name} depends on has died: {cause}")
        kind = WorkerDied if is_device_failure(cause) else WorkerFailed
        return kind(f"{name} failed with {type(cause).__name__}: {cause}\n{_tail(str(error))}")
    if isinstance(error, RayActorError):
        return WorkerDied(
            f"{name} has died ({_reason(str(error))}). Its log is in Ray's session directory on its node "
            f"(/tmp/ray/session_latest/logs if Ray was started there). {_usual_reason(name)}"
        )
    if isinstance(error, OutOfMemoryError):
        return WorkerDied(
            f"{name} was ended by Ray's memory monitor, as its node ran out of memory: "
            f"{MEMORY_KEYS.get(name.partition('-')[0], 'place fewer actors on it')}, or use nodes with more memory "
            f"({_summary(error)})."
        )
    if isinstance(error, RayError):
        return WorkerDied(f"{name} did not answer: {type(error).__name__}: {_summary(error)}")
    return error


def is_recoverable(error: Exception) -> bool:
    """Return whether a new process can help: after deaths of processes, missed deadlines, partners and nodes that are
    gone, and other errors of Ray. Errors of data, settings, the user's code or Penstock's own would come again."""
    return kind_of(translate(error, "a member")) is not Kind.ERROR


async def answer(ref: Awaitable[Any], *, name: str, phase: str, timeout_s: float) -> Any:
    """The result of one actor call. Raises `DeadlineExceeded` naming the actor that did not answer, and the phase."""
    try:
        async with asyncio.timeout(timeout_s):  # `wait_for` may swallow a cancellation that comes with the answer
            return await ref
    except RayError as error:  # first: what an actor raises is also of its cause's type, which may be TimeoutError
        raise translate(error, name) from None
    except TimeoutError:
        raise _late(name, phase, timeout_s) from None


async def answers(
    calls: Sequence[tuple[str, Awaitable[Any]]], *, phase: str, timeout_s: float | Sequence[float]
) -> list[Any]:
    """The results of several actor calls, in order. `timeout_s`: of all, or of each. Raises the failure that explains
    the rest: one that may be a consequence waits for the rest, at most `CAUSE_GRACE_S`."""
    tasks = [_future_of(ref) for _, ref in calls]
    wait = _Wait([name for name, _ in calls], phase, timeout_s)
    try:
        while left := wait.left_s(tasks):
            await asyncio.wait(wait.pending(tasks), timeout=left, return_when=asyncio.FIRST_EXCEPTION)
        return wait.results(tasks)
    finally:
        for task in tasks:
            task.cancel()


async def call_all(members: Handles, method: str, *arguments: Any, phase: str, timeout_s: float) -> list[Any]:
    """Call a method of all members, with the same arguments and one deadline. Returns and raises as `answers` does."""
    return await answers(_calls_of(members, method, arguments), phase=phase, timeout_s=timeout_s)


async def try_all(members: Handles, method: str, *arguments: Any, phase: str, timeout_s: float) -> list[Any]:
    """Call a method of all members as `call_all` does. Returns `outcomes`."""
    return await outcomes(_calls_of(members, method, arguments), phase=phase, timeout_s=timeout_s)


def get_from_all(members: Handles, method: str, *arguments: Any, phase: str, timeout_s: float) -> list[Any]:
    """Call a method of all members as `call_all` does, for synchronous callers."""
    return get_all(_calls_of(members, method, arguments), phase=phase, timeout_s=timeout_s)


def _calls_of(members: Handles, method: str, arguments: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(name, getattr(handle, method).remote(*arguments)) for name, handle in members]


def deal(members: Handles, call: Callable[[Any, slice], Any]) -> list[tuple[str, Any]]:
    """Calls that deal items out to members in turn. `call`: makes the call of a handle with its slice of the items."""
    shares = [slice(index, None, len(members)) for index in range(len(members))]
    return [(name, call(handle, share)) for (name, handle), share in zip(members, shares, strict=True)]


def undeal(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The items in their order, of the members' answers to calls of `deal`.

    >>> undeal([["a", "c"], ["b"]])
    ['a', 'b', 'c']
    """
    return [item for row in zip_longest(*parts, fillvalue=_NO_ITEM) for item in row if item is not _NO_ITEM]


async def answers_or_end(calls: Sequence[tuple[str, Awaitable[Any]]], *, phase: str, timeout_s: float) -> list[Any]:
    """The results of calls as from `answers`, which only this caller needs. Where it raises, at the deadline or because
    it is cancelled, they end in their actors too: else an engine samples to the end in vain."""
    try:
        return await answers(calls, phase=phase, timeout_s=timeout_s)
    except BaseException:
        for _, ref in calls:
            if isinstance(ref, ray.ObjectRef):
                ray.cancel(ref, recursive=False)
        raise


async def outcomes(calls: Sequence[tuple[str, Awaitable[Any]]], *, phase: str, timeout_s: float) -> list[Any]:
    """Outcomes of several actor calls that do not depend on each other, in order: each one's result, or the error that
    it failed with."""
    tasks = [_future_of(ref) for _, ref in calls]
    try:
        if tasks:  # one deadline for all: a timer a call is a third of what a thousand calls cost
            await asyncio.wait(tasks, timeout=timeout_s)
        return [_outcome(task, name, phase, timeout_s) for (name, _), task in zip(calls, tasks, strict=True)]
    finally:
        for task in tasks:
            task.cancel()


def failed(results: Mapping[str, Any]) -> list[str]:
    """Names of the actors whose call failed, of `outcomes` by name: each can be replaced. Raises an error that
    another actor would have, too."""
    errors = {name: result for name, result in results.items() if isinstance(result, Exception)}
    for error in errors.values():
        if not is_recoverable(error):
            raise error
    return list(errors)


def _outcome(task: "asyncio.Future[Any]", name: str, phase: str, timeout_s: float) -> Any:
    """The result or the error of a call. Raises what is no failure of a call, such as a cancellation."""
    error = task.exception() if task.done() else TimeoutError()
    if error is None:
        return task.result()
    if isinstance(error, TimeoutError) and not isinstance(error, RayError):
        return _late(name, phase, timeout_s)
    if not isinstance(error, Exception):
        raise error
    return translate(error, name)


def _late(name: str, phase: str, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"{phase}: {name} did not answer within {timeout_s:g} s.{_way_to_wait(phase, name)}")


def _way_to_wait(phase: str, name: str) -> str:
    """The key that gives processes more time to start, with what they may have waited for; empty for other phases."""
    if phase != START:
        return ""
    environment = ray.get_runtime_context().runtime_env if ray.is_initialized() else ()
    given = ", ".join(name for name in environment if not name.startswith("_"))
    made = f" Ray makes the job's runtime_env ({given}) on each node before the first process starts." if given else ""
    compiling = ", or rollout.compile_timeout_s where it compiles," if name.startswith("Rollout-") else ""
    return f"{made} Raise rollout.start_timeout_s{compiling} if it needs longer."


async def look(members: Iterable[tuple[str, Any]]) -> list[Exception | None]:
    """Look which actors are there, in order: None, or the error of one that does not answer within `PRESENT_S`."""
    found = await try_all(list(members), "stats", phase="look who is there", timeout_s=PRESENT_S)
    return [said if isinstance(said, Exception) else None for said in found]


async def in_thread(call: Callable[[], T], give_back: Callable[[T], Any]) -> T:
    """The result of a call that blocks, made beside the event loop. If the caller is cancelled, the result is given
    back once it is there."""
    task = asyncio.ensure_future(asyncio.to_thread(call))

    def ended(task: "asyncio.Future[T]") -> None:
        if not task.cancelled() and task.exception() is None:
            give_back(task.result())

    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(ended)
        raise


def get_all(calls: Iterable[tuple[str, Any]], *, phase: str, timeout_s: float | Sequence[float]) -> list[Any]:
    """The results of calls as from `answers`, for synchronous callers."""
    calls = list(calls)
    futures: list[concurrent.futures.Future[Any]] = [ref.future() for _, ref in calls]
    wait = _Wait([name for name, _ in calls], phase, timeout_s)
    while left := wait.left_s(futures):
        concurrent.futures.wait(wait.pending(futures), left, return_when=concurrent.futures.FIRST_EXCEPTION)
    return wait.results(futures)


class _Wait:
    """The time to wait for calls that may fail together, and their results.

    Lifecycle: wait for the `pending` ones while there are seconds `left_s`, then ask for the `results`.
    """

    def __init__(self, names: Sequence[str], phase: str, timeout_s: float | Sequence[float]) -> None:
        """`timeout_s`: of all calls, or of each."""
        self._names, self._phase, self._began = names, phase, time.monotonic()
        self._timeouts = [timeout_s] * len(names) if isinstance(timeout_s, int | float) else list(timeout_s)
        self._end = float("inf")
        """The time at which a failure is raised that may be a consequence."""

    def pending(self, futures: Sequence[_F]) -> list[_F]:
        return [future for future in futures if not future.done()]

    def left_s(self, futures: Sequence[_F]) -> float:
        """Seconds left; 0 once all have answered, the time is over, or a failure is there that no other explains."""
        failures = self._failures(futures)
        if not self.pending(futures) or any(map(is_cause, failures)):
            return 0.0
        if failures:
            self._end = min(self._end, time.monotonic() + CAUSE_GRACE_S)
        shortest_s = min(limit for limit, future in zip(self._timeouts, futures, strict=True) if not future.done())
        return max(0.0, min(self._end, self._began + shortest_s) - time.monotonic())

    def results(self, futures: Sequence[_F]) -> list[Any]:
        """Results in order. Raises what failed, or `DeadlineExceeded` naming the actors that did not answer."""
        failures = self._failures(futures)
        calls = zip(self._timeouts, self._names, futures, strict=True)
        left = [(limit_s, name) for limit_s, name, future in calls if not future.done()]
        if left and not failures:
            shortest_s = min(left)[0]
            late = [name for limit_s, name in left if limit_s == shortest_s]
            raise _late(", ".join(late), self._phase, shortest_s)
        if failures:
            raise cause_of(failures) from None
        return [future.result() for future in futures]

    def _failures(self, futures: Sequence[_F]) -> list[Exception]:
        """Failures of the calls that are over. Raises what is no failure of a call, such as a cancellation."""
        found = []
        for name, future in zip(self._names, futures, strict=True):
            error = future.exception() if future.done() else None
            if isinstance(error, Exception):
                found.append(translate(error, name))
            elif error is not None:
                raise error
        return found


def _usual_reason(name: str) -> str:
    """The usual reason of an actor's death, and what can be done about it, by its role."""
    kind = name.partition("-")[0]
    keys = MEMORY_KEYS.get(kind)
    return f"Out of memory is the usual reason: {keys}." if keys else "Out of memory is the usual reason."


def _future_of(call: Awaitable[Any]) -> "asyncio.Future[Any]":
    """The future of a call. Ray's answer is a future already: to wait for it by a task of its own costs twice as
    much."""
    if isinstance(call, ray.ObjectRef):
        return asyncio.wrap_future(call.future())
    return call if asyncio.isfuture(call) else asyncio.ensure_future(_as_coroutine(call))


async def _as_coroutine(call: Awaitable[Any]) -> Any:
    return await call


def _reason(death: str) -> str:
    """The reason that Ray gives for an actor's death. If its constructor failed: what that raised, which comes last."""
    lines = [line.strip() for line in death.splitlines() if line.strip()]
    return lines[-1] if lines and "creation task" in lines[0] else _summary(death)


def _summary(error: object) -> str:
    return first_line(error) or "no reason given"


def _tail(text: str, num_lines: int = 12) -> str:
    return "\n".join(text.splitlines()[-num_lines:])
