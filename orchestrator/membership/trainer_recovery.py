"""Brings the trainer's ranks back when one of them is lost: all start again, beside warm engines and the store.

    a call fails ─▶ is it the store? ─▶ kill all ranks ─▶ store.settle: which step was trained last?
                                                             │
    the newest version is whole ◀─ connect ◀─ its copies ◀─ new ranks

A step is trained once the store has been told so, after all ranks have copied their state. So the ledger decides:
either every rank has the copy of the step, or the batch is formed again of the same groups, and every rank has the copy
of the step before. Ranks whose node has left start elsewhere, from the copies that another node has
(`orchestrator/recovery/memory_checkpoints.py`). Each rank reads its own (`workers/trainer/memory_checkpoint/`).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from penstock.conf.errors import DeadlineExceeded, MemoryCheckpointError, PenstockError
from penstock.orchestrator.cluster.ray_calls import Handles, answers, is_recoverable, outcomes
from penstock.orchestrator.membership.restarts import Restarts, title_of
from penstock.orchestrator.membership.run_context import RunContext
from penstock.orchestrator.membership.store_recovery import StoreRecovery
from penstock.orchestrator.membership.supervisor import Supervisor
from penstock.orchestrator.recovery.memory_checkpoints import MemoryCheckpoints
from penstock.workers.lifecycle.progress import WAITING, Progress

ROLE = "trainer"
RANKS = "the trainer's ranks"
"""Title of the restart of all ranks, with what they need before they go on. The start of their processes within it is a
restart of its own, which is counted and told."""
LOOK_S = 10.0
"""Seconds within which a rank that is alive says what it does."""
T = TypeVar("T")


@dataclass(frozen=True)
class Incarnation:
    """The store and the ranks that a call of the ranks is made with: the number of those before them."""

    store: int
    ranks: int


class TrainerRecovery:
    """Lifecycle: calls of the ranks go through `with_ranks`, or their failure is given to `recovered`."""

    def __init__(
        self,
        context: RunContext,
        restarts: Restarts,
        stores: StoreRecovery,
        supervisor: Supervisor,
        states: MemoryCheckpoints,
        connect: Callable[[], Awaitable[None]] | None,
    ) -> None:
        """`connect`: what new ranks and the engines do before weights go between them; None where ranks cannot be
        replaced."""
        self._fleet, self._restarts, self._stores, self._supervisor = context.fleet, restarts, stores, supervisor
        self.states, self._connect = states, connect
        self._base = self._fleet.resumed.step if self._fleet.resumed is not None else 0
        """The step that the run's actors were started after."""
        self._timeout_s = context.config.trainer.collective_timeout_s
        """Deadline for ranks to read their copies."""
        self._num_before = 0
        self.deciding = asyncio.Lock()
        """Held while a step comes to count, and while ranks that are to come are told the last step that does."""
        self.republish: Callable[[int, PenstockError], Awaitable[None]] = _nothing
        """Called with the step that new ranks have and the failure that they have come for, before they make another
        step: publishes a version that is not sealed or not whole again. Raises the failure where that cannot be."""

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self._stores.incarnation, self._num_before)

    def are_those_of(self, incarnation: Incarnation) -> bool:
        """Return whether the ranks are those of that incarnation, and no restart of them is under way."""
        return incarnation.ranks == self._num_before and not self._restarts.is_under_way(RANKS)

    async def with_ranks(self, call: Callable[[], Awaitable[T]]) -> T:
        """The answer of the ranks, or of those that take their place."""
        while True:
            incarnation = self.incarnation
            try:
                return await call()
            except PenstockError as failure:
                await self.recovered(failure, incarnation)

    async def recovered(self, failure: PenstockError, incarnation: Incarnation) -> None:
        """Wait until a call of the ranks that has failed can be made again: with another store, if it was lost, else
        with other ranks. `incarnation`: that of the call. Raises the failure where that cannot be."""
        if not is_recoverable(failure):
            raise failure
        if await self._stores.recovered(failure, incarnation.store):
            return
        await self._restarts.joined(RANKS)
        if incarnation.ranks == self._num_before:
            await self._restarts.run(RANKS, partial(self._bring_back, failure))

    async def when_back(self) -> None:
        """Wait until no restart of the ranks is under way, however it ends."""
        with contextlib.suppress(PenstockError):
            await self._restarts.joined(RANKS)

    async def _bring_back(self, failure: PenstockError) -> None:
        while True:
            trained = await self._replace(failure)
            try:
                await self.republish(trained, failure)
                return
            except PenstockError as another:
                if another is failure:
                    raise
                if not is_recoverable(another):
                    raise
                failure = another  # these ranks have failed as well

    async def _replace(self, failure: PenstockError) -> int:
        """Start new ranks, with the state after the last step that was trained, which is returned. Raises the failure
        where that cannot be."""
        team = [name for name, _ in self._fleet.role(ROLE)] or self._fleet.teams(ROLE)[0]
        if self._connect is None or (isinstance(failure, DeadlineExceeded) and await self._all_wait()):
            self._restarts.beyond_help(ROLE, title_of(team), failure)
            raise failure
        await self._fleet.owner.renew()  # the batch may be another command's
        self._fleet.kill(team)
        async with self.deciding:
            trained = await self._stores.settled()
        if trained > self._base and not await self.states.are_there(trained):
            self._restarts.beyond_help(ROLE, title_of(team), failure)
            raise failure

        async def catch_up(members: Handles) -> None:
            if trained == self._base:  # the checkpoint that the run goes on from, which may be gone later
                await self._fleet.resume(members)
                return
            await self.states.bring(trained)
            calls = [(name, handle.restore.remote(trained, self._fleet.owner.epoch)) for name, handle in members]
            await answers(calls, phase=f"restore step {trained}", timeout_s=self._timeout_s)

        store = self._stores.incarnation
        try:
            await self._supervisor.replace(ROLE, team, failure, catch_up)
        except MemoryCheckpointError as error:
            self._restarts.beyond_help(ROLE, title_of(team), failure)
            raise failure from error
        if store != self._stores.incarnation:  # they may have been attached to the one before
            await self._fleet.attach_trainers()
        await self._connect()
        if trained > self._base:
            with contextlib.suppress(PenstockError):  # who is gone by now is missed by the next step
                await self.states.copy(trained)
        self._num_before += 1
        return trained

    async def _all_wait(self) -> bool:
        """Return whether every rank is there and waits for its batch: others than the ranks are late."""
        calls = [(name, handle.progress.remote()) for name, handle in self._fleet.role(ROLE)]
        found = await outcomes(calls, phase="look at the ranks", timeout_s=LOOK_S)
        return all(isinstance(progress, Progress) and progress.phase == WAITING for progress in found)


async def _nothing(trained: int, failure: PenstockError) -> None:
    """Do nothing, where no version is brought to anyone."""
