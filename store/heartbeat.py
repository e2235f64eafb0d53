"""Leases stay alive while their owner's process does: one task a client renews all that it holds.

So the deadline of a lease can be short (a dead worker's rows are soon somebody else's) however long the work on it
takes. A worker that lives but does not get on has deadlines of its own. Used by `store/client.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable

BEATS_PER_TIMEOUT = 3
"""A lease is renewed so many times before it would run out."""


class Heartbeat:
    """Beats while anything is held. Lives in the event loop of the client."""

    def __init__(self, renew: Callable[[list[int]], Awaitable[list[int]]]) -> None:
        """`renew`: takes lease ids, returns those that are over."""
        self._renew = renew
        self._open: dict[int, int] = {}
        """Lease -> rows whose result is due."""
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._open)

    def hold(self, lease_id: int, num_rows: int, timeout_s: float) -> None:
        """A lease has come that runs out after `timeout_s` unless it is renewed."""
        if not num_rows:
            return
        self._open[lease_id] = num_rows
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._beat(timeout_s / BEATS_PER_TIMEOUT))
            self._task.add_done_callback(self._stopped)

    def finished(self, lease_id: int, num_rows: int) -> None:
        """So many rows of a lease have their result."""
        left = self._open.get(lease_id, 0) - num_rows
        if left > 0:
            self._open[lease_id] = left
        else:
            self._open.pop(lease_id, None)

    def let_go(self, lease_id: int) -> None:
        self._open.pop(lease_id, None)

    async def _beat(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            if not self._open:
                return
            for lease_id in await self._renew(list(self._open)):
                self._open.pop(lease_id, None)

    def _stopped(self, task: "asyncio.Task[None]") -> None:
        """Nothing is held, or the store is gone, which whoever calls it next is told."""
        self._task = None
        if not task.cancelled():
            task.exception()
