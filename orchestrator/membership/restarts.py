"""The restarts of a run that are under way, of its store and of its members, side by side.

    keep, with_store, …  ── notice a loss ──▶  a restart, a task of its own  ◀── wait for it ──  others that notice it

A restart belongs to no caller that waits for it: the deadline or the end of a caller does not end it. It ends when it
is done or has failed, when its member is to leave, or with the run. A member's restart that meets the loss of the store
waits for the restart of the store.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Restarts:
    """Lifecycle: `done` for each loss, from any task; `cancel` for members that leave, `end` with the run."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Restarts under way, by title."""

    async def joined(self, title: str) -> bool:
        """Wait for the restart of this title that is under way, as `done` does. Returns whether there was one."""
        if (task := self._tasks.get(title)) is None:
            return False
        await asyncio.shield(task)
        return True

    async def done(self, title: str, restart: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait until the restart of this title is done: the one under way, or this one. Raises what it fails with, and
        `CancelledError` where it was cancelled."""
        if (task := self._tasks.get(title)) is None:
            task = self._tasks[title] = asyncio.create_task(restart(), name=f"restart of {title}")
            task.add_done_callback(lambda ended: self._forget(title, ended))
        await asyncio.shield(task)

    def cancel(self, *titles: str) -> None:
        for title in titles:
            if title in self._tasks:
                self._tasks[title].cancel()

    def cancel_all_but(self, title: str) -> None:
        self.cancel(*(self._tasks.keys() - {title}))

    async def end(self) -> None:
        """Cancel what is under way, and wait until it has ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, title: str, task: "asyncio.Task[None]") -> None:
        del self._tasks[title]
        if not task.cancelled():
            task.exception()  # a failure that no caller waits for any more: the next one meets the loss itself
