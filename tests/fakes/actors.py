"""Fake handles of Ray actors. `handle.method.remote(...)` calls an object of this process, or gives an answer that the
test has set."""

import asyncio
import inspect
from collections.abc import Generator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from penstock.conf.errors import WorkerDied


class Call(NamedTuple):
    name: str
    """Name of the actor."""
    method: str
    arguments: tuple[Any, ...] = ()


class FakeRef:
    """What a call returns. It is awaited, or waited for as a `future()`."""

    def __init__(self, future: "Future[Any]") -> None:
        self._future = future

    def future(self) -> "Future[Any]":
        return self._future

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._future).__await__()


async def never(*_: Any) -> None:
    """The answer of an actor that is silent."""
    await asyncio.Event().wait()


class FakeHandle:
    """An actor's handle, which records each call. `kill` has the actor die."""

    outlives_callers = False
    """Whether calls go on when nobody waits for them any more, as after the caller's death."""

    def __init__(
        self, actor: Any = None, name: str = "an actor", calls: list[Call] | None = None, /, **answers: Any
    ) -> None:
        """`calls`: where calls are recorded; one list may serve many handles. `answers`: by method, in place of the
        actor's own: a function, or what it would return: an error, a future, or any other value. Without an actor, all
        others are None."""
        self.actor, self.name, self.answers = actor, name, answers
        self.calls: list[Call] = [] if calls is None else calls
        self.is_dead = False
        self._under_way: dict[asyncio.Future[Any], asyncio.Future[Any]] = {}

    def kill(self) -> None:
        """End the actor. Who waits for an answer hears of its death."""
        self.is_dead = True
        for task, answer in self._under_way.items():
            task.cancel()
            if not answer.done():
                answer.set_exception(self._death())

    def __getattr__(self, method: str) -> Any:
        if self.is_dead:
            answer: Any = self._death()
        elif method in self.answers or self.actor is None:
            answer = self.answers.get(method)
        else:
            answer = getattr(self.actor, method)
        return SimpleNamespace(remote=partial(self._call, method, answer))

    def _death(self) -> WorkerDied:
        return WorkerDied(f"{self.name} has died")

    def _call(self, method: str, answer: Any, *arguments: Any) -> "FakeRef | asyncio.Future[Any]":
        self.calls.append(Call(self.name, method, arguments))
        future: Future[Any] = Future()
        try:
            result = answer(*arguments) if callable(answer) else answer
            if isinstance(result, Exception):
                raise result
        except Exception as error:  # noqa: BLE001 - whoever awaits it raises it
            future.set_exception(error)
            return FakeRef(future)
        if inspect.isawaitable(result):
            return self._answer_later(asyncio.ensure_future(result))
        if isinstance(result, Future):
            return FakeRef(result)
        future.set_result(result)
        return FakeRef(future)

    def _answer_later(self, task: "asyncio.Future[Any]") -> "asyncio.Future[Any]":
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def ended(task: "asyncio.Future[Any]") -> None:
            self._under_way.pop(task, None)
            if answer.done() or task.cancelled():
                return
            if (error := task.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

        self._under_way[task] = answer
        answer.add_done_callback(lambda done: task.cancel() if done.cancelled() and not self.outlives_callers else None)
        task.add_done_callback(ended)
        return answer
