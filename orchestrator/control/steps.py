"""Has the ranks make steps, and has the steps count, also where ranks or the store are lost on the way.

    make ─▶ all ranks have made the update ─▶ they have begun to copy their state ─▶ they may go on
                                                      counted ─▶ all copies are there, on second nodes too ─▶ noted, and
                                                                 the store is told: the rows of the step end

With `faults.keep_beside` the ranks make step n + 1 while the copies of step n are made. Three rules keep recovery
simple:

- No rank begins the copy of step n + 1 before step n counts. So every rank has the copy of step n - 1 until then.
- Nobody loads version n before step n counts (`Controller._finish`).
- Ranks that are lost before step n counts have step n - 1 when they are back. Who makes step n count has them make it
  again, and only then may others ask the ranks for anything.

Otherwise the copies are part of the step, and a step counts before the next one is made.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.conf.errors import DeadlineExceeded, PartnerGone, PenstockError
from penstock.orchestrator.cluster.failures import held_back
from penstock.orchestrator.cluster.ray_calls import answers
from penstock.orchestrator.control.colocation import DeviceTurns
from penstock.orchestrator.control.observer import Observer
from penstock.orchestrator.control.versions import Versions
from penstock.orchestrator.membership.restarts import Restarts
from penstock.orchestrator.membership.run_context import RunContext
from penstock.orchestrator.membership.store_recovery import StoreRecovery
from penstock.orchestrator.membership.trainer_recovery import Incarnation, TrainerRecovery
from penstock.workers.trainer.report import StepReport

Counted = tuple[Sequence[StepReport], dict[str, float]]
"""Reports of a step that counts, and seconds of its phases."""


@dataclass(frozen=True)
class Made:
    """A step that all ranks have made."""

    step: int
    reports: Sequence[StepReport]
    incarnation: Incarnation
    """The store that its batch came from, and the ranks that have made it."""


class Steps:
    """Lifecycle: `make` each step, one after the other."""

    def __init__(
        self,
        context: RunContext,
        restarts: Restarts,
        stores: StoreRecovery,
        ranks: TrainerRecovery,
        versions: Versions,
        turns: DeviceTurns,
        observer: Observer,
        trained: Callable[[int, Sequence[StepReport]], None],
    ) -> None:
        """`trained`: called with each step that counts."""
        self._config, self._fleet = context.config, context.fleet
        self._directory, self._progress = context.directory, context.progress
        self._restarts, self._stores, self._ranks = restarts, stores, ranks
        self._versions, self._turns, self._observer, self._trained = versions, turns, observer, trained
        self._beside = context.config.keeps_beside
        self._newest: Made | None = None
        """The step that was made last."""
        self._counting: asyncio.Task[Counted] | None = None
        """What makes that step count."""
        versions.follow(self.present, self._counts_not_yet)

    async def make(self, step: int, tasks: asyncio.TaskGroup) -> "asyncio.Task[Counted]":
        """Have all ranks make one update. Returns what makes it count, a task of the group, which is done already
        unless copies are made beside the next step. The ranks lease the batch themselves, as soon as it is complete."""
        before = self._counting
        made = await self._made(step, before)
        self._newest = made
        self._counting = tasks.create_task(held_back(self._count(made)))
        if not self._beside:
            await self._counting
        return self._counting

    async def present(self) -> None:
        """Wait until the ranks have the state after the step that was made last, whoever of them was lost."""
        await self._ranks.when_back()
        newest, counting = self._newest, self._counting
        if newest is None or counting is None or counting.done() or self._ranks.are_those_of(newest.incarnation):
            return
        await counting

    def _counts_not_yet(self, step: int) -> bool:
        newest, counting = self._newest, self._counting
        return newest is not None and newest.step == step and counting is not None and not counting.done()

    async def _made(self, step: int, before: "asyncio.Task[Counted] | None") -> Made:
        """Have all ranks make a step, and begin to copy their state once the step before counts, which `before` waits
        for. If ranks or the store are lost before all ranks have done so, they take the step again."""
        ready = self.present if before is not None else self._ranks.when_back
        while True:
            await ready()
            self._progress.phase(f"step {step}")
            incarnation = self._ranks.incarnation
            try:
                await self._turns.training(step)
                if await self._stores.is_another(incarnation.store):  # it may lack samples, which engines make
                    continue
                reports = await self._update(step)
            except PenstockError as failure:
                await self._ranks.recovered(failure, incarnation)
                continue
            if before is not None:
                await before
            await self._ranks.when_back()
            if not self._ranks.are_those_of(incarnation):  # others have the step before
                continue
            try:
                await self._begin_keeping(step)
            except PenstockError as failure:
                await self._ranks.recovered(failure, incarnation)
                continue
            return Made(step, reports, incarnation)

    async def _update(self, step: int) -> list[StepReport]:
        self._restarts.step = step
        due, epoch = self._observer.is_sampled(step), self._fleet.owner.epoch
        calls = [(name, handle.step.remote(step, due, epoch)) for name, handle in self._fleet.role("trainer")]
        try:
            reports = await answers(calls, phase=f"step {step}", timeout_s=self._config.trainer.step_timeout_s)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error} The store: {await self._observer.described_store()}") from None
        if any(report is None for report in reports):
            raise PartnerGone(f"step {step}: the store closed while the trainers waited for their batch.")
        self._observer.updated(step, reports, time.time())
        self._tell_not_kept(step, [report.no_memory_checkpoint for report in reports])
        return reports

    async def _count(self, made: Made) -> Counted:
        """Have a step count: once its copies are there, and version n - 1 is sealed, which whoever takes the place of
        ranks before has to publish. Ranks that were lost before make it again."""
        is_again = False
        while True:
            await self._ranks.when_back()
            if self._ranks.are_those_of(made.incarnation):
                incarnation = self._ranks.incarnation
                try:
                    if is_again:
                        await self._versions.begin_again(made.step)
                    phases = await self._keep(made.step)
                except PenstockError as failure:
                    await self._ranks.recovered(failure, incarnation)
                    continue
                if await self._noted(made):
                    self._trained(made.step, made.reports)
                    return made.reports, phases
                continue
            made, is_again = await self._made(made.step, None), True
            self._newest = made

    async def _noted(self, made: Made) -> bool:
        """Note the step and tell the store. False: ranks were lost meanwhile, and others have the step before."""
        await self._versions.sealed(made.step)
        await self._ranks.when_back()
        async with self._ranks.deciding:  # whether the step counts: ranks that come are told the last one that does
            if not self._ranks.are_those_of(made.incarnation):
                return False
            await self._stores.journal.note(made.step, made.reports)
            await self._stores.trained(made.step, made.reports, made.incarnation.store)
        return True

    async def _begin_keeping(self, step: int) -> None:
        if self._beside:
            await self._all("begin_keeping", step, f"begin to copy the state after step {step}")

    async def _keep(self, step: int) -> dict[str, float]:
        """Wait for the copies of a step, and have them brought to second nodes. Returns the seconds."""
        phases, start = {}, time.time()
        if self._beside:
            self._tell_not_kept(step, await self._all("finish_keeping", step, f"copy the state after step {step}"))
            phases["keep"] = time.time() - start
            self._directory.timeline.span("states", "keep", start, time.time(), step=step)
        if seconds := await self._ranks.states.copy(step):
            phases["partner"] = seconds
        return phases

    async def _all(self, method: str, step: int, phase: str) -> list[str | None]:
        arguments = step, self._fleet.owner.epoch
        calls = [(name, getattr(handle, method).remote(*arguments)) for name, handle in self._fleet.role("trainer")]
        return await answers(calls, phase=phase, timeout_s=self._config.trainer.collective_timeout_s)

    def _tell_not_kept(self, step: int, problems: Sequence[str | None]) -> None:
        for problem in dict.fromkeys(filter(None, problems)):
            self._directory.event("state_not_kept", step=step, reason=problem)
            self._progress.note(problem)
            self._ranks.states.end()


async def known(reports: Sequence[StepReport]) -> Counted:
    """A step that counts, which the process before has had made."""
    return reports, {}
