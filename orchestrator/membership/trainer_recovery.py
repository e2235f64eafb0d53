"""Brings the trainer's ranks back when one of them is lost: all start again, beside warm engines and the store.

    kill all ranks ─▶ store.settle: which step was trained last? ─▶ new ranks ─▶ its copies (`workers/trainer/kept/`)

A step is trained once the store has been told so, after all ranks have copied their state. So the ledger decides:
either every rank has the copy of the step, or the batch is formed again of the same groups, and every rank has the copy
of the step before. Ranks whose node has left start elsewhere, from the copies that another node has
(`orchestrator/cluster/nodes/kept_states.py`).
"""

import contextlib
from collections.abc import Awaitable, Callable

from penstock.conf.errors import DeadlineExceeded, KeptStateError, PenstockError
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.fleet.roster import Members
from penstock.orchestrator.cluster.nodes.kept_states import KeptStates
from penstock.orchestrator.cluster.ray_calls import answers, is_recoverable, outcomes
from penstock.orchestrator.membership.supervisor import Supervisor, title_of
from penstock.store.client.client import StoreClient
from penstock.workers.progress import WAITING, Progress

ROLE, STAGE = "trainer", "train"
LOOK_S = 10.0
"""Seconds within which a rank that is alive says what it does."""


class TrainerRecovery:
    """Lifecycle: `recover` whenever the ranks have failed."""

    def __init__(
        self,
        fleet: Fleet,
        store: StoreClient,
        supervisor: Supervisor,
        states: KeptStates,
        base: int,
        met: Callable[[], Awaitable[None]] | None,
        timeout_s: float,
    ) -> None:
        """`base`: the step that the run's actors were started after. `met`: what new ranks and the engines do before
        weights go between them; None where ranks cannot be replaced. `timeout_s`: deadline for each to read its
        copies."""
        self.generation = 0
        """Number of times that ranks were replaced."""
        self._fleet, self._store, self._supervisor, self._states = fleet, store, supervisor, states
        self._base, self._met, self._timeout_s = base, met, timeout_s

    async def recover(self, failure: PenstockError) -> int:
        """Start new ranks, with the state after the last step that was trained, which is returned. Raises the failure
        where that cannot be."""
        team = [name for name, _ in self._fleet.role(ROLE)] or self._fleet.teams(ROLE)[0]
        if not is_recoverable(failure):
            raise failure
        await self._supervisor.check_partners(failure, self._supervisor.stores_before)
        if self._met is None or (isinstance(failure, DeadlineExceeded) and await self._all_wait()):
            self._supervisor.beyond_help(ROLE, title_of(team), failure)
            raise failure
        self._fleet.kill(team)
        trained = await self._supervisor.with_store(lambda: self._store.settle(STAGE))
        if trained > self._base and not await self._states.are_there(trained):
            self._supervisor.beyond_help(ROLE, title_of(team), failure)
            raise failure

        async def catch_up(members: Members) -> None:
            if trained == self._base:  # the checkpoint that the run goes on from, which may be gone later
                await self._fleet.resume(members)
                return
            await self._states.bring(trained)
            calls = [(name, handle.restore.remote(trained)) for name, handle in members]
            await answers(calls, phase=f"restore step {trained}", timeout_s=self._timeout_s)

        stores = self._supervisor.stores_before
        try:
            await self._supervisor.replace(ROLE, team, failure, catch_up)
        except KeptStateError as error:
            self._supervisor.beyond_help(ROLE, title_of(team), failure)
            raise failure from error
        if stores != self._supervisor.stores_before:  # they may have been attached to the one before
            await self._fleet.attach_trainers()
        await self._met()
        if trained > self._base:
            with contextlib.suppress(PenstockError):  # who is gone by now is missed by the next step
                await self._states.copy(trained)
        self.generation += 1
        return trained

    async def _all_wait(self) -> bool:
        """Return whether every rank is there and waits for its batch: others than the ranks are late."""
        calls = [(name, handle.progress.remote()) for name, handle in self._fleet.role(ROLE)]
        found = await outcomes(calls, phase="look at the ranks", timeout_s=LOOK_S)
        return all(isinstance(progress, Progress) and progress.phase == WAITING for progress in found)
