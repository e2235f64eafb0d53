"""An event loop whose seconds pass faster: a step of 30 s of waiting takes one or two, and what is computed takes what
it takes.

Deadlines and pauses of asyncio go by this clock. What reads `time.monotonic` itself, as the watch does to judge
silence, sees real seconds, and so never too many.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """A selector that waits so many times less than it is asked to."""

    def __init__(self, speed: float) -> None:
        super().__init__()
        self._speed = speed

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(timeout if timeout is None else timeout / self._speed)


class FastLoop(asyncio.SelectorEventLoop):
    """A loop with a fast clock. `speed`: seconds of its clock in one of the wall's."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        super().__init__(_Selector(speed))

    def time(self) -> float:
        return super().time() * self._speed


def run_fast(main: Callable[[], Coroutine[Any, Any, T]], speed: float) -> T:
    """Run as `asyncio.run` does, on a fast loop."""
    with asyncio.Runner(loop_factory=lambda: FastLoop(speed)) as runner:
        return runner.run(main())
