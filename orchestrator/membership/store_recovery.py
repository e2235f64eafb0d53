"""Brings the store back when its process is lost, beside members that stay: another goes on from its last snapshot, and
is told what was trained since.

    snapshots, by themselves      every faults.store_snapshot_s
    a call fails ─▶ is the store there? ─▶ another from the snapshot ─▶ catch_up(rows trained since) ─▶ members serve it

Which rows each step has trained is in the journal of the run's steps. What was not trained comes again, with its number
and its seed (`store/ledger/ledger.py`).

    all ranks have made a step ─▶ note: the run's owner has it ─▶ the store is told

    rows      for a store that takes the place of a lost one      until a snapshot of the store has them
    reports   for the next command: to tell the store of them,    until the lines of their steps are written
              and to write their lines in metrics.jsonl

The owner keeps the reports in its memory, so a full disk stops no step. A step that was noted counts, whoever completes
it. A resume reads no journal: it begins with the snapshot of its checkpoint, and what came after is sampled again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from penstock.conf.errors import PenstockError, StoreDied
from penstock.orchestrator.cluster.fleet.fleet import StoreProcess
from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.cluster.ray_calls import PRESENT_S, Kind, answer, kind_of, look, outcomes
from penstock.orchestrator.membership.restarts import Restarts
from penstock.orchestrator.membership.run_context import RunContext
from penstock.store.service.store_actor import STORE
from penstock.workers.trainer.report import StepReport

ROLE, STAGE = "store", "train"
AGAIN_S = 5.0
"""Seconds until a first snapshot is tried again, where no others are taken."""
MOST_DOUBLINGS = 5
"""Most doublings of the pause after snapshots that failed: a slow disk is not kept busy by them."""
GRACE_S = 10.0
"""Extra seconds for the store, or a rank, which has the same deadline, ends its work then and says why."""
T = TypeVar("T")


class StepJournal:
    """Lifecycle: `note` each step once all ranks have made it; then `written` and `forget`, in any order."""

    def __init__(self, owner: Owner, last: int, unwritten: Mapping[int, Sequence[StepReport]] | None = None) -> None:
        """`last`: the last step before this process. `unwritten`: reports that the process before has noted, of steps
        whose lines are not written yet. A process after this one needs them, too."""
        self.last = last
        """The step that was made last."""
        self._owner = owner
        self._rows: dict[int, np.ndarray] = {}
        """Row ids by step."""
        self._unwritten: dict[int, Sequence[StepReport]] = dict(unwritten or {})

    async def note(self, step: int, reports: Sequence[StepReport]) -> None:
        """Note a step that all ranks have made, before the store is told of it. Raises `TakenOver`, and what a lost
        owner fails with."""
        self._rows[step] = np.concatenate([report.row_ids for report in reports])
        self._unwritten[step] = list(reports)
        self.last = step
        await self._owner.note(self._unwritten)

    def rows_after(self, step: int) -> list[list[int]]:
        """Row ids of each step after that one, in order."""
        return [self._rows[number].tolist() for number in range(step + 1, self.last + 1)]

    def forget(self, step: int) -> None:
        """Forget the rows of the steps up to that one: a snapshot of the store has them."""
        self._rows = {number: rows for number, rows in self._rows.items() if number > step}

    def written(self, step: int) -> None:
        """Note that the line of a step is written."""
        self._unwritten.pop(step, None)


class StoreRecovery:
    """Lifecycle: `trained` for each step and `served` for each version; `take_snapshots` until it is cancelled. Any
    other call of the store goes through `with_store`, or its failure is asked about by `recovered`."""

    def __init__(self, context: RunContext, restarts: Restarts, journal: StepJournal) -> None:
        self.incarnation = 0
        """Number of stores before this one."""
        self._fleet, self._store, self._restarts, self.journal = context.fleet, context.store, restarts, journal
        self._directory = context.directory
        self._epoch = self._fleet.owner.epoch
        self._every_s = context.config.faults.store_snapshot_s
        """Seconds between snapshots; 0: none is taken, and another store begins with what the run began with."""
        self._timeout_s = context.config.rollout.start_timeout_s
        """Deadline for a snapshot to be written, and to be read."""
        self._told = self._version = journal.last
        """The last step and the newest version that the store was told of."""
        resumed, begun = self._fleet.resumed, 0 if self._fleet.resumed is None else self._fleet.resumed.step
        self._is_known = journal.last == begun
        """True if the snapshot and the journal together are the store: not yet where another process has trained."""
        self._snapshot = resumed.store if resumed is not None and self._is_known else None
        self._snapshotting, self._looking = asyncio.Lock(), asyncio.Lock()

    async def with_store(self, call: Callable[[], Awaitable[T]]) -> T:
        """The answer of the store, or of the one that takes its place."""
        while True:
            incarnation = self.incarnation
            try:
                return await call()
            except PenstockError as failure:
                if not await self.recovered(failure, incarnation):
                    raise

    async def recovered(self, failure: Exception, incarnation: int) -> bool:
        """Return whether a call has failed because the store was lost, once there is another. `incarnation`: that of
        the store when the call began. Raises the failure where the store cannot be replaced, or a node is gone with all
        that is on it: no member can be helped alone then."""
        if kind_of(failure) is not Kind.CONSEQUENCE:  # as every call of a store that is gone fails
            return False
        async with self._looking:
            if incarnation != self.incarnation or await self._restarts.joined(STORE):
                return True
            if await self._is_there(failure):
                return False
            if not self._is_known:
                self._restarts.beyond_help(ROLE, STORE, failure)
                raise failure
            await self._restarts.run(STORE, lambda: self._restarts.start_anew(ROLE, STORE, failure, self._start))
            return True

    async def is_another(self, incarnation: int) -> bool:
        """Return whether the store is another than at that incarnation, once it is there."""
        return await self._restarts.joined(STORE) or incarnation != self.incarnation

    async def trained(self, step: int, reports: Sequence[StepReport], incarnation: int) -> None:
        """Tell the store that a step of the journal was trained: its rows end. `incarnation`: that of the store which
        its batch came from. One that takes its place hears of the step as of all that were trained since its
        snapshot."""
        if incarnation == self.incarnation and not self._restarts.is_under_way(STORE):
            told = [self._store.complete_shared(report.share) for report in reports if report.share is not None]
            try:
                await self._in_time(asyncio.gather(*told))
                self._told = step
                return
            except PenstockError as failure:
                if not await self.recovered(failure, incarnation):
                    raise
        await self._restarts.joined(STORE)
        await self.with_store(self._tell)

    async def served(self, version: int, max_active: int | None = None) -> None:
        """Tell the store that every engine serves a version, and of how many groups may be under way then."""
        await self.with_store(lambda: self._store.served(version, self._epoch, max_active))
        self._version = version

    async def settled(self) -> int:
        """Take back the batch that is under way. Returns the step that was trained last."""
        return int(await self.with_store(lambda: self._store.settle(STAGE, self._epoch)))

    async def take_snapshots(self) -> None:
        """Take snapshots. One that fails is left out: the one before stays, the next pause is longer, and the first
        failure in a row is an event, unless the store is gone, which its callers hear. The first is taken at once where
        the run goes on from a checkpoint, which may be gone after the next, or with a store that was there before this
        process."""
        number, num_failed = 1, 0
        pause_s = 0.0 if self._snapshot is not None or not self._is_known else self._every_s
        while self._every_s or not self._is_known:
            await asyncio.sleep(pause_s)
            try:
                async with self._snapshotting:
                    await self._take(number)
                number, num_failed = number + 1, 0  # only now: one that is not heard of pushes out no other
            except PenstockError as error:
                num_failed += 1
                if num_failed == 1 and kind_of(error) is not Kind.CONSEQUENCE:
                    self._directory.event("snapshot_failed", error=type(error).__name__, message=str(error))
            pause_s = (self._every_s or AGAIN_S) * 2 ** min(num_failed, MOST_DOUBLINGS)

    async def _is_there(self, failure: Exception) -> bool:
        """Return whether the store answers, and will go on to. Raises the failure if a node is gone."""
        agents = self._fleet.role("agent")
        asked = outcomes([(STORE, self._store.stats())], phase="look who is there", timeout_s=PRESENT_S)
        errors, (store,) = await asyncio.gather(look(agents), asked)
        for (name, _), error in zip(agents, errors, strict=True):
            if error is not None:
                self._restarts.beyond_help("agent", name, failure)
                raise failure
        return not isinstance(store, Exception) and not isinstance(failure, StoreDied)

    async def _start(self) -> None:
        """Start another store, and attach the ranks to it. Raises what starting it raised."""
        async with self._snapshotting:
            await self._process.replace(self._snapshot, self._timeout_s)
            await self._store.move(self._fleet.store)
            self._told = int(await self._in_time(self._store.settle(STAGE, self._epoch)))
            await self._tell()
            await self._fleet.attach_trainers()
            self.incarnation += 1
        self._restarts.started(STORE)

    async def _tell(self) -> None:
        """Tell the store of all steps that were trained and that it does not know."""
        last = self.journal.last
        steps = self.journal.rows_after(self._told)
        await self._in_time(self._store.catch_up(steps, self._version, self._epoch))
        self._told = last

    async def _take(self, number: int) -> None:
        told, place = self._told, await self._process.scratch(self._timeout_s)
        taken = self._store.snapshot(place, number, is_apart=True, timeout_s=self._timeout_s)
        self._snapshot = await self._in_time(taken, GRACE_S)
        self._is_known = True
        self.journal.forget(told)

    @property
    def _process(self) -> StoreProcess:
        assert self._fleet.store_process is not None  # who trains has one
        return self._fleet.store_process

    async def _in_time(self, call: Awaitable[Any], grace_s: float = 0.0) -> Any:
        timeout_s = self._timeout_s + grace_s
        return await answer(call, name=STORE, phase="bring the store back", timeout_s=timeout_s)
