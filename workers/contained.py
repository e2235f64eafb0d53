"""Runs code of users so that what leaves its tasks ends nothing but them.

In asyncio a `SystemExit` that leaves a task ends the whole loop, and a `CancelledError` that nobody has asked for looks
like a wish from outside. Here both become `CodeEnded`, an error like any other. What a user's code starts in tasks of
its own is contained as well, on loops whose task factory is `containing`. Callbacks that it gives the loop
(`call_soon`, `add_done_callback`) are not: a `SystemExit` in one of them ends the loop.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

_IS_USERS = ContextVar("is_users", default=False)
"""Whether a task is a user's."""


class CodeEnded(Exception):
    """A user's code raised what would have ended more than itself. The message says what."""


class TookTooLong(Exception):
    """A user's code did not end in time."""


async def contained(call: Awaitable[T], timeout_s: float | None = None) -> T:
    """What a user's awaitable gives or raises, in a task of its own. One that does not hear that its time is over, or
    that its caller is cancelled, is left to itself. Raises `TookTooLong`, `CodeEnded`."""
    task = started(call)
    try:
        done, _ = await asyncio.wait([task], timeout=timeout_s)
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(heard)
    if not done:
        raise TookTooLong(f"it took longer than {timeout_s:g} s")
    return result_of(task)


async def called(function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """What a user's function gives. As a coroutine, so that a plain function that raises where it is called is
    contained as well."""
    return await function(*arguments)


def started(call: Awaitable[T]) -> asyncio.Task[T]:
    """A task in which a user's code runs."""
    return asyncio.create_task(_Contained(_users(call)))


def result_of(task: asyncio.Task[T]) -> T:
    """The result of such a task that is done, and that nobody has cancelled from outside. Raises `CodeEnded` too."""
    if task.cancelled():
        raise CodeEnded("CancelledError: it was cancelled by its own doing.")
    return task.result()


def heard(task: "asyncio.Future[Any]") -> None:
    """Its failure is known: asyncio need not report it."""
    if task.done() and not task.cancelled():
        task.exception()


def containing(loop: asyncio.AbstractEventLoop, call: Any, **keywords: Any) -> asyncio.Task[Any]:
    """A task factory: `loop.set_task_factory(containing)`."""
    context = keywords.get("context")
    is_users = _IS_USERS.get() if context is None else context.get(_IS_USERS, False)
    return asyncio.Task(_Contained(call) if is_users else call, loop=loop, **keywords)


async def _users(call: Awaitable[T]) -> T:
    _IS_USERS.set(True)
    return await call


class _Contained(Coroutine[Any, Any, T]):
    """A coroutine whose steps raise nothing that ends a loop. A class, so that a task that is cancelled before its
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
            raise CodeEnded(f"{type(error).__name__}: {error}") from error
