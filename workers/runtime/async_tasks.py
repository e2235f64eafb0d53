"""Tasks of asyncio: a worker's concurrent ones, and those that run code of users, which end nothing but themselves.

In asyncio a `SystemExit` that leaves a task ends the whole loop, and a `CancelledError` that no caller has asked for
looks like a cancellation from outside. Here both become `UserCodeExit`, an error like any other. What a user's code
starts in tasks of its own is contained as well, on loops whose task factory is `contained_task_factory`. Callbacks that
it gives the loop (`call_soon`, `add_done_callback`) are not: a `SystemExit` in one of them ends the loop.

The time limit of a user's code stands still while the code waits for what it shares with others (`time_limit_paused`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
_IS_USERS = ContextVar("is_users", default=False)
"""True in a task that runs a user's code."""
_BUDGETS: ContextVar[tuple["TimeBudget", ...]] = ContextVar("budgets", default=())
"""Times that a task runs in: of an attempt, say, and of a tool that it calls."""


async def run_all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all calls; returns when all have returned. The first failure is raised, once the others are cancelled and
    have ended."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel all tasks; returns when they have ended. What they raise meanwhile is dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class BusyClock:
    """Seconds in which at least one of the overlapping intervals was open."""

    def __init__(self) -> None:
        self._open = 0
        self._since = 0.0
        self._total = 0.0

    @contextmanager
    def interval(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        if not self._open:
            self._since = time.monotonic()
        self._open += 1

    def leave(self) -> None:
        self._open -= 1
        if not self._open:
            self._total += time.monotonic() - self._since

    def seconds(self) -> float:
        return self._total + (time.monotonic() - self._since if self._open else 0.0)


class UserCodeExit(Exception):
    """The error for a user's code that raised what would have ended more than itself. The message says what."""


class UserCodeTimeout(Exception):
    """The error for a user's code that did not end in time."""


class TimeBudget:
    """The time limit of a user's code, in seconds. The time in which it waits for its turn does not count
    (`time_limit_paused`).

    Lifecycle: a task by `start_contained`, then `ends_in_time`, once.
    """

    def __init__(self, seconds: float) -> None:
        self.loop = asyncio.get_running_loop()
        self._left_s, self._num_waits = seconds, 0
        self._over: asyncio.Future[None] = self.loop.create_future()
        self._go_on()

    async def ends_in_time(self, task: "asyncio.Task[Any]") -> bool:
        """Return whether the task ends in its time: known as soon as it has ended, or its time is over. It is not
        cancelled then."""
        ends: list[asyncio.Future[Any]] = [task, self._over]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._timer.cancel()
        return task.done()

    def hold(self) -> None:
        """Stop the time until `release`. Waits may overlap."""
        if not self._num_waits:
            self._timer.cancel()
            self._left_s = max(0.0, self._ends - self.loop.time())
        self._num_waits += 1

    def release(self) -> None:
        self._num_waits -= 1
        if not self._num_waits:
            self._go_on()

    def _go_on(self) -> None:
        self._ends = self.loop.time() + self._left_s
        self._timer = self.loop.call_at(self._ends, self._end)

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)


@contextmanager
def time_limit_paused() -> Iterator[None]:
    """Stop the time limit of the code that waits in the block for what others use: of a tool as of the attempt that
    calls it. Only on the loop that they run on: a tool in a thread has its whole time there."""
    loop = asyncio.get_running_loop()
    held = [budget for budget in _BUDGETS.get() if budget.loop is loop]
    for budget in held:
        budget.hold()
    try:
        yield
    finally:
        for budget in held:
            budget.release()


async def run_contained(call: Awaitable[T], timeout_s: float | None = None) -> T:
    """Run a user's awaitable in a task of its own; return or raise what it does. An awaitable that ignores that its
    time is over, or that its caller is cancelled, is left running. `timeout_s`: its time. Raises `UserCodeTimeout`,
    `UserCodeExit`."""
    budget = TimeBudget(timeout_s) if timeout_s is not None else None
    task = start_contained(call, budget)
    try:
        in_time = await budget.ends_in_time(task) if budget is not None else bool(await asyncio.wait([task]))
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(silence_failure)
    if not in_time:
        raise UserCodeTimeout(f"it took longer than {timeout_s:g} s")
    return contained_result(task)


async def call_user_code(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Call a user's function. This is a coroutine, so that a plain function that raises is contained as well."""
    return await function(*arguments)


def start_contained(call: Awaitable[T], budget: TimeBudget | None = None) -> asyncio.Task[T]:
    """Start a task in which a user's code runs."""
    return asyncio.create_task(_Contained(_users(call, budget)))


def contained_result(task: asyncio.Task[T]) -> T:
    """The result of such a task that is done, and that was not cancelled from outside. Raises `UserCodeExit` too."""
    if task.cancelled():
        raise UserCodeExit("CancelledError: it was cancelled by its own doing.")
    return task.result()


def silence_failure(task: "asyncio.Future[Any]") -> None:
    """Retrieve the task's failure, so that asyncio does not report it."""
    if task.done() and not task.cancelled():
        task.exception()


def contained_task_factory(loop: asyncio.AbstractEventLoop, call: Any, **keywords: Any) -> asyncio.Task[Any]:
    """A task factory: `loop.set_task_factory(contained_task_factory)`."""
    context = keywords.get("context")
    is_users = _IS_USERS.get() if context is None else context.get(_IS_USERS, False)
    return asyncio.Task(_Contained(call) if is_users else call, loop=loop, **keywords)


async def _users(call: Awaitable[T], budget: TimeBudget | None) -> T:
    _IS_USERS.set(True)
    if budget is not None:
        _BUDGETS.set((*_BUDGETS.get(), budget))
    return await call


class _Contained(Coroutine[Any, Any, T]):
    """Coroutine whose steps raise nothing that ends a loop. It is a class, so that a task that is cancelled before its
    first step leaves no coroutine that was never awaited."""

    def __init__(self, call: Coroutine[Any, Any, T]) -> None:
        self._call = call

    def send(self, value: Any) -> Any:
        return self._step(self._call.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._call.throw, *error)

    def close(self) -> None:
        self._call.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._call.__await__()

    def _step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return step(*arguments)
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:
            raise UserCodeExit(f"{type(error).__name__}: {error}") from error
