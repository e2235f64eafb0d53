"""The loop of workers that answer prompts: groups out of the store, as many at a time as there is room for.

    lease groups ─▶ one task a group ─▶ write

The loop never waits for a group while another could start; the store's credits say how many there may be. A group that
the store has given to a second worker as well is aborted once the other one has answered it. It serves both prompts
with one response each and tasks of environments.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from penstock.conf.errors import WorkerFailed
from penstock.store.client.client import StoreClient
from penstock.store.client.lease import Lease
from penstock.store.data.rows import Rows
from penstock.workers.concurrent_tasks import BusyClock, cancel_all

Place = tuple[int, int]
"""A lease and a group of it."""
Roll = Callable[[StoreClient, Lease, int, Rows], Awaitable[None]]
"""Function that answers one group, by its id, and writes."""


class GroupLoop:
    """Lifecycle: `run` returns when the store is closed; then it may be called with another."""

    def __init__(
        self, stage: str, name: str, roll: Roll, *, max_groups: int, num_workers: int, hears_answers: bool
    ) -> None:
        """`num_workers`: of this kind, which share the groups. `hears_answers`: groups may be answered twice."""
        self._stage, self._name, self._roll = stage, name, roll
        self._max_groups, self._num_workers, self._hears = max_groups, num_workers, hears_answers
        self._clock = BusyClock()
        self._aborted: set[asyncio.Task[None]] = set()
        self.num_aborted = 0
        """Number of groups that another worker had as well and answered first."""

    @property
    def busy_s(self) -> float:
        """Seconds with at least one group in flight."""
        return self._clock.seconds()

    async def run(self, store: StoreClient) -> None:
        """Answer groups until the store is closed. Raises what a group fails with. However it ends, groups in flight
        are cancelled; a client that has retired finishes them first."""
        groups: dict[asyncio.Task[None], Place] = {}
        asking: asyncio.Task[Lease | None] | None = None
        hearing = await self._hearing(store)
        try:
            takes_more = True
            while takes_more or groups:
                if takes_more and asking is None and len(groups) < self._max_groups:
                    asking = asyncio.create_task(self._ask(store))
                waits = {*groups, *(task for task in (asking, hearing) if task is not None)}
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in groups if task in done]:
                    self._settle(task, groups.pop(task))
                if hearing is not None and hearing in done:
                    self._abort(groups, hearing.result() or ())
                    hearing = await self._hearing(store) if hearing.result() is not None else None
                if asking is not None and asking in done:
                    lease, asking = asking.result(), None
                    if lease is not None:
                        groups |= self._started(store, lease)
                    elif store.has_retired:
                        takes_more = False
                    else:
                        return
        finally:
            await cancel_all({*groups, *(task for task in (asking, hearing) if task is not None)})

    async def _ask(self, store: StoreClient) -> Lease | None:
        """Lease as many groups as there is room for when they come, and no more than the share of one worker."""
        most = self._max_groups
        return await store.lease(self._stage, most, self._name, max_held=most, num_peers=self._num_workers)

    async def _hearing(self, store: StoreClient) -> "asyncio.Task[list[Place] | None] | None":
        """A task that waits for the answers of other workers; None where groups are never answered twice."""
        if not self._hears or not (await store.spec()).straggler_factor:
            return None
        return asyncio.create_task(store.answered())

    def _settle(self, task: "asyncio.Task[None]", place: Place) -> None:
        """Raise what a group failed with. A cancellation from elsewhere would lose the group silently."""
        is_ours = task in self._aborted
        self._aborted.discard(task)
        if not task.cancelled():
            task.result()
        elif not is_ours:
            raise WorkerFailed(f"{self._name}: the task of group {place[1]} was cancelled by what it called.")

    def _abort(self, groups: "dict[asyncio.Task[None], Place]", answered: Sequence[Place]) -> None:
        """Cancel groups that another worker has answered first."""
        for task, place in groups.items():
            if place in answered and task.cancel():
                self.num_aborted += 1
                self._aborted.add(task)

    def _started(self, store: StoreClient, lease: Lease) -> "dict[asyncio.Task[None], Place]":
        """Start a task for each group of the lease."""
        tasks = {}
        for group_id, positions in lease.rows.groups():
            self._clock.enter()
            task = asyncio.ensure_future(self._roll(store, lease, group_id, lease.rows.select(positions)))
            task.add_done_callback(lambda _: self._clock.leave())
            tasks[task] = lease.id, group_id
        return tasks
