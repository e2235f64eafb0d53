"""Event loops with clocks of their own, so that no test depends on how busy the machine is.

`run_virtually`: the clock jumps to the next timer, and hours of waiting cost nothing. Threads are not waited for by a
clock that jumps, so that what is given to one runs at once instead.

`run_ahead`: the machine's clock, which a test puts forward. A deadline may be so long then that a busy machine does not
miss it, and passes all the same when the test wants that.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Waits no time; says how long it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everybody waits for somebody else, and no timer will ever end it")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *arguments: Any) -> "asyncio.Future[Any]":  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - whoever awaits it raises it
            future.set_exception(error)
        return future


class LoopAhead(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.ahead_s = 0.0
        super().__init__()

    def time(self) -> float:
        return super().time() + self.ahead_s


def run_ahead(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does. It may call `put_forward`."""
    with asyncio.Runner(loop_factory=LoopAhead) as runner:
        return runner.run(main)


async def put_forward(seconds: float) -> None:
    """The clock of the loop, once what others have sent by now has been read and acted upon."""
    for _ in range(10):
        await asyncio.sleep(0)
    cast(LoopAhead, asyncio.get_running_loop()).ahead_s += seconds


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, in no time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
