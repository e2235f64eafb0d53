"""A worker's concurrent tasks: start them, end them, and count the seconds in which any of them ran."""

import asyncio
import time
from collections.abc import Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


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
