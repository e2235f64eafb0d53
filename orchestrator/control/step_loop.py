"""The training steps of a run: makes optimizer steps on all ranks, commits each one, brings its weights to the engines,
and restarts the ranks where one of them is lost on the way.

    make      all ranks update ─▶ they begin to copy their state ─▶ they are free
    commit    all copies are there, on second nodes too ─▶ journal ─▶ the store hears of it: the rows of the step end
    publish   ranks write version n ─▶ they are free
    seal      all of it is written: step n + 1 may be committed
    load      every engine loads it        report_served ─▶ the store may admit prompts
    recover   a call failed ─▶ is it the store? ─▶ kill all ranks ─▶ take_back_batch: which step was committed last?
                                                                        │
              the newest version is whole ◀─ connect ◀─ its copies ◀─ new ranks

The ledger decides which step new ranks get, since a step is committed once the store knows of it, after all ranks have
copied their state: either every rank has the copy of the step, or the batch is formed again of the same groups, and
every rank has the copy of the step before. Ranks whose node is lost start elsewhere, from the copies of another node
(`recovery/memory_checkpoints.py`). Each rank reads its own (`workers/trainer/memory_checkpoint.py`).

With `faults.keep_beside` the ranks make step n + 1 while the copies of step n are made. Three rules keep it simple:

- No rank begins the copy of step n + 1 before step n is committed. So every rank has the copy of step n - 1 until then.
- No engine loads version n before step n is committed (`Controller._finish`).
- Ranks that are lost before step n is committed come back with step n - 1. The commit of step n has them make it again,
  and only then may anything else be asked of the ranks.

Otherwise the copies are part of the step, and it is committed before the next one is made.

With `max_staleness=0`, and where weights are streamed, `publish` includes the seal. A step is not committed before the
version of the step before is sealed. So new ranks have the step of the version that is not sealed, and publish it again
before they make another; or they have the step before, and publish it once they have made the step again.

The calls of the transfer are in `cluster/weight_sync.py`.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from penstock.conf.errors import DeadlineExceeded, MemoryCheckpointError, PartnerGone, PenstockError
from penstock.orchestrator.cluster.ray_calls import (
    Handles,
    Kind,
    call_all,
    held_back,
    is_recoverable,
    kind_of,
    try_all,
)
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.orchestrator.control.observer import Observer
from penstock.orchestrator.control.turns import DeviceTurns
from penstock.orchestrator.recovery.memory_checkpoints import MemoryCheckpoints
from penstock.orchestrator.recovery.restart import Recovery, title_of
from penstock.orchestrator.run_context import RunContext
from penstock.workers.runtime.serving import WAITING, Progress
from penstock.workers.trainer.step_report import StepReport
from penstock.workers.weights.engine_calls import Delivery

ROLE = "trainer"
RANKS = "the trainer's ranks"
"""Title of the restart of all ranks, with what they need before the next call. The start of their processes within it
is a restart of its own, which is counted and reported."""
PROGRESS_S = 10.0
"""Seconds within which a living rank reports its progress."""
T = TypeVar("T")
StepResult = tuple[Sequence[StepReport], dict[str, float]]
"""Reports of a committed step, and seconds of its phases."""


@dataclass(frozen=True)
class Incarnation:
    """The store and the ranks that a call of the ranks is made with: the number of those before them."""

    store: int
    ranks: int


@dataclass(frozen=True)
class StepAttempt:
    """A step that all ranks have made, and that may be lost before it is committed."""

    step: int
    reports: Sequence[StepReport]
    incarnation: Incarnation
    """The store that its batch came from, and the ranks that have made it."""


class StepLoop:
    """Lifecycle: for each step `make`, `publish`, `seal`, `load` and `report_served`, one after the other. The next
    step may be made once the version is published. Other calls of the ranks go through `retry`."""

    def __init__(
        self,
        context: RunContext,
        recovery: Recovery,
        weights: WeightSync,
        turns: DeviceTurns,
        states: MemoryCheckpoints,
        observer: Observer,
    ) -> None:
        self._config, self._fleet = context.config, context.fleet
        self._directory, self._progress = context.directory, context.progress
        self._restarts, self._store, self._supervisor = recovery.restarts, recovery.store, recovery.supervisor
        self._weights, self._turns, self._states, self._observer = weights, turns, states, observer
        self._base = self._fleet.resumed.step if self._fleet.resumed is not None else 0
        """The step that the run's actors were started after."""
        self._num_restarts = 0
        """Number of restarts of all ranks."""
        self._deciding = asyncio.Lock()
        """Held while a step is committed, and while the last committed one is looked up for new ranks."""
        self._newest: StepAttempt | None = None
        """The step that was made last."""
        self._committing: asyncio.Task[StepResult] | None = None
        """The commit of that step."""
        self._unsealed: int | None = None
        """The version that ranks have begun to publish."""
        self._delivery: Delivery | None = None
        """The delivery of the version that was sealed last."""
        self._is_sealed = asyncio.Event()
        self._loading: Delivery | None = None
        """The delivery that engines are about to load."""
        self._served = recovery.store.journal.last
        """The newest version that every engine serves, and the store knows of."""

    def weights_state(self) -> dict[str, Any]:
        """The version that the store knows of, and the one that each engine serves, for people."""
        loading = self._loading.version if self._loading is not None else None
        return {"told": self._served, "loading": loading, "serving": dict(self._weights.serving)}

    # Make and commit.

    async def make(self, step: int, tasks: asyncio.TaskGroup) -> "asyncio.Task[StepResult]":
        """Have all ranks make one update. Returns its commit, a task of the group, which is done already unless copies
        are made beside the next step. The ranks lease the batch themselves, as soon as it is complete."""
        self._newest = await self._attempt(step, self._committing)
        self._committing = tasks.create_task(held_back(self._commit(self._newest)))
        if not self._config.keeps_beside:
            await self._committing
        return self._committing

    async def _attempt(self, step: int, before: "asyncio.Task[StepResult] | None") -> StepAttempt:
        """Have all ranks make a step, and begin to copy their state once the step before is committed. If ranks or the
        store are lost before all ranks have done so, they make the step again. `before`: the commit of the step
        before."""
        ready = self._wait_for_newest if before is not None else self._wait_for_ranks
        while True:
            await ready()
            self._progress.phase(f"step {step}")
            incarnation = self.incarnation
            try:
                await self._turns.training(step)
                if await self._store.was_restarted(incarnation.store):  # it may lack samples, which engines make
                    continue
                reports = await self._update(step)
            except PenstockError as failure:
                await self.recover(failure, incarnation)
                continue
            if before is not None:
                await before
            await self._wait_for_ranks()
            if not self._are_present(incarnation):  # the new ones have the step before
                continue
            try:
                if self._config.keeps_beside:
                    await self._call_ranks("begin_keeping", step, f"begin to copy the state after step {step}")
            except PenstockError as failure:
                await self.recover(failure, incarnation)
                continue
            return StepAttempt(step, reports, incarnation)

    async def _update(self, step: int) -> list[StepReport]:
        self._restarts.step = step
        arguments = step, self._observer.is_sampled(step), self._fleet.owner.epoch
        timeout_s = self._config.trainer.step_timeout_s
        try:
            reports = await call_all(self._ranks, "step", *arguments, phase=f"step {step}", timeout_s=timeout_s)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error} The store: {await self._observer.described_store()}") from None
        if any(report is None for report in reports):
            raise PartnerGone(f"step {step}: the store closed while the trainers waited for their batch.")
        self._observer.updated(step, reports, time.time())
        self._report_not_kept(step, [report.no_memory_checkpoint for report in reports])
        return reports

    async def _commit(self, attempt: StepAttempt) -> StepResult:
        """Commit a step once its copies are there, and version n - 1 is sealed, which new ranks would have to publish
        before. Ranks that are lost until then make it again."""
        is_again = False
        while True:
            await self._wait_for_ranks()
            if not self._are_present(attempt.incarnation):
                attempt, is_again = await self._attempt(attempt.step, None), True
                self._newest = attempt
                continue
            incarnation = self.incarnation
            try:
                if is_again and attempt.step == self._unsealed:
                    await self._weights.begin(attempt.step)  # `seal` waits for the rest
                phases = await self._keep(attempt.step)
            except PenstockError as failure:
                await self.recover(failure, incarnation)
                continue
            if await self._record(attempt):
                tokens = sum(int(report.rows.response_tokens_N.sum()) for report in attempt.reports)
                self._restarts.trained(attempt.step, tokens, len(self._fleet.role("rollout")))
                return attempt.reports, phases

    async def _record(self, attempt: StepAttempt) -> bool:
        """Note the step in the journal, and tell the store. False: ranks were lost meanwhile, and the new ones have the
        step before."""
        await self.wait_for_seal(attempt.step)
        await self._wait_for_ranks()
        async with self._deciding:
            if not self._are_present(attempt.incarnation):
                return False
            await self._store.journal.note(attempt.step, attempt.reports)
            await self._store.trained(attempt.step, attempt.reports, attempt.incarnation.store)
        return True

    async def _keep(self, step: int) -> dict[str, float]:
        """Wait for the copies of a step, and have them brought to second nodes. Returns the seconds."""
        phases, start = {}, time.time()
        if self._config.keeps_beside:
            problems = await self._call_ranks("finish_keeping", step, f"copy the state after step {step}")
            self._report_not_kept(step, problems)
            phases["keep"] = time.time() - start
            self._directory.timeline.span("states", "keep", start, time.time(), step=step)
        if seconds := await self._states.copy(step):
            phases["partner"] = seconds
        return phases

    def _report_not_kept(self, step: int, problems: Sequence[str | None]) -> None:
        for problem in dict.fromkeys(filter(None, problems)):
            self._directory.event("state_not_kept", step=step, reason=problem)
            self._progress.note(problem)
            self._states.end()

    def _is_uncommitted(self, step: int) -> bool:
        newest, committing = self._newest, self._committing
        return newest is not None and newest.step == step and committing is not None and not committing.done()

    # Publish.

    async def publish(self, version: int) -> float:
        """Publish the ranks' weights as a version. Returns the seconds for which the ranks could not begin the next
        step."""
        start = time.time()

        async def begin() -> None:
            await self._wait_for_newest()
            await self._weights.begin(version)

        await self.retry(begin)
        self._unsealed = version
        self._is_sealed.clear()
        if self._config.max_staleness == 0 or not self._weights.publishes_beside:
            await self._seal(version)
        self._directory.timeline.span("trainer", "publish", start, time.time(), version=version)
        return time.time() - start

    async def seal(self) -> Delivery:
        """Wait until the version that was published last is sealed. Returns its delivery."""
        if (version := self._unsealed) is not None:
            start = time.time()
            await self._seal(version)
            self._directory.timeline.span("weights", "publish", start, time.time(), version=version)
        assert self._delivery is not None
        return self._delivery

    async def _seal(self, version: int) -> None:
        self._delivery = await self.retry(lambda: self._weights.finish(version))
        self._observer.published(self._delivery)
        self._unsealed = None
        self._is_sealed.set()

    async def wait_for_seal(self, before: int) -> None:
        """Wait until `seal`, which another task waits for, has ended for the versions before that one. At once where
        none is under way."""
        if (version := self._unsealed) is not None and version < before:
            start = time.time()
            await self._is_sealed.wait()
            self._directory.timeline.span("trainer", "wait for the version before", start, time.time(), version=version)

    async def load(self, delivery: Delivery) -> float:
        """Have every engine load the version. Returns the seconds."""
        await self._turns.generation()
        start, self._loading = time.time(), delivery
        while True:
            await self._turns.generation()  # again after a restart of the ranks
            incarnation, delivery = self.incarnation, self._loading
            try:
                seconds = await self._weights.load(delivery)
                break
            except PenstockError as failure:
                if kind_of(failure) is Kind.DEATH:  # of a node with ranks, before all of the version was elsewhere
                    await self.recover(failure, incarnation)
                await self._wait_for_ranks()  # ranks that come at this moment give up what is under way
                if self._loading is delivery:
                    raise
        self._loading = None
        for name, end in self._weights.loaded.items():
            self._directory.timeline.span(name, "load weights", start, end, version=delivery.version)
        return seconds

    async def report_served(self, version: int, max_active: int | None = None) -> None:
        """Tell the store that every engine serves a version. `max_active`: see `StoreClient.served`."""
        await self._store.served(version, max_active)
        self._served = version

    async def _republish(self, trained: int, failure: Exception) -> None:
        """Publish the version of that step again, if it is not sealed, or part of the newest one is gone. Raises the
        failure where the newest is another version, which no rank has any more."""
        if self._unsealed is not None and not self._is_uncommitted(self._unsealed):
            if trained != self._unsealed:
                raise failure
            await self._weights.begin(trained)  # `seal` waits for the rest
        elif not self._weights.needs_republication:
            return
        elif self._loading is None:
            if trained == self._served:  # else the next one comes at once
                await self._weights.load(await self._whole(trained))
        elif trained == self._loading.version:
            self._loading = await self._whole(trained)
        elif self._weights.has_lost_source:
            raise failure

    async def _whole(self, version: int) -> Delivery:
        await self._weights.begin(version)
        return await self._weights.finish(version)

    # Recover.

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(self._store.incarnation, self._num_restarts)

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """The answer of the ranks, or of those that take their place."""
        while True:
            incarnation = self.incarnation
            try:
                return await call()
            except PenstockError as failure:
                await self.recover(failure, incarnation)

    async def recover(self, failure: PenstockError, incarnation: Incarnation) -> None:
        """Wait until a failed call of the ranks can be made again: with another store, if it was lost, else with other
        ranks. `incarnation`: that of the call. Raises the failure where that cannot be."""
        if not is_recoverable(failure):
            raise failure
        if await self._store.wait_for_restart(failure, incarnation.store):
            return
        await self._restarts.wait_for(RANKS)
        if incarnation.ranks == self._num_restarts:
            await self._restarts.run(RANKS, partial(self._restart_ranks, failure))

    async def _restart_ranks(self, failure: Exception) -> None:
        while True:
            failure = await self._supervisor.named([name for name, _ in self._ranks], failure)
            if not is_recoverable(failure):
                raise failure
            trained = await self._replace_ranks(failure)
            try:
                await self._republish(trained, failure)
                return
            except PenstockError as another:
                if another is failure or not is_recoverable(another):
                    raise
                failure = another  # these ranks have failed as well

    async def _replace_ranks(self, failure: Exception) -> int:
        """Start new ranks, with the state after the last committed step, which is returned. Raises the failure where
        that cannot be."""
        team = [name for name, _ in self._ranks] or self._fleet.teams(ROLE)[0]
        if not self._weights.can_reconnect or (isinstance(failure, DeadlineExceeded) and await self._all_wait()):
            self._restarts.give_up(ROLE, title_of(team), failure)
            raise failure
        await self._fleet.owner.renew()  # the batch may be another command's
        self._fleet.kill(team)
        async with self._deciding:
            trained = await self._store.take_back_batch()
        if trained > self._base and not await self._states.are_available(trained):
            self._restarts.give_up(ROLE, title_of(team), failure)
            raise failure
        store = self._store.incarnation
        try:
            await self._supervisor.replace(ROLE, team, failure, partial(self._restore, trained))
        except MemoryCheckpointError as error:
            self._restarts.give_up(ROLE, title_of(team), failure)
            raise failure from error
        if store != self._store.incarnation:  # they may have been attached to the one before
            await self._fleet.attach_trainers()
        await self._weights.connect()
        if trained > self._base:
            with contextlib.suppress(PenstockError):  # a node that is gone by now is missed by the next step
                await self._states.copy(trained)
        self._num_restarts += 1
        return trained

    async def _restore(self, trained: int, ranks: Handles) -> None:
        """Give new ranks the state after a step."""
        if trained == self._base:  # the checkpoint that the run resumed from, which may be gone later
            await self._fleet.resume(ranks)
            return
        await self._states.bring(trained)
        timeout_s, epoch = self._config.trainer.collective_timeout_s, self._fleet.owner.epoch
        await call_all(ranks, "restore", trained, epoch, phase=f"restore step {trained}", timeout_s=timeout_s)

    async def _all_wait(self) -> bool:
        """Return whether every rank is there and waits for its batch: the ranks are not what is late."""
        found = await try_all(self._ranks, "progress", phase="look at the ranks", timeout_s=PROGRESS_S)
        return all(isinstance(progress, Progress) and progress.phase == WAITING for progress in found)

    async def _wait_for_ranks(self) -> None:
        """Wait until no restart of the ranks is under way, however it ends."""
        with contextlib.suppress(PenstockError):
            await self._restarts.wait_for(RANKS)

    async def _wait_for_newest(self) -> None:
        """Wait until the ranks have the state after the step that was made last, even if some of them were lost."""
        await self._wait_for_ranks()
        newest, committing = self._newest, self._committing
        if newest is None or committing is None or committing.done() or self._are_present(newest.incarnation):
            return
        await committing

    def _are_present(self, incarnation: Incarnation) -> bool:
        """Return whether the ranks are those of that incarnation, and no restart of them is under way."""
        return incarnation.ranks == self._num_restarts and not self._restarts.is_under_way(RANKS)

    @property
    def _ranks(self) -> Handles:
        return self._fleet.role(ROLE)

    async def _call_ranks(self, method: str, step: int, phase: str) -> list[Any]:
        timeout_s, epoch = self._config.trainer.collective_timeout_s, self._fleet.owner.epoch
        return await call_all(self._ranks, method, step, epoch, phase=phase, timeout_s=timeout_s)


async def known_result(reports: Sequence[StepReport]) -> StepResult:
    """The result of a step that the command before has made."""
    return reports, {}
