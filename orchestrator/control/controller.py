"""The controller: a readable loop over a fleet and a store.

    Prompts ──▶ Store ◀──▶ Rollout-i, Reward-i, Compute-…, Scorer-reference-r      pull by leases, all the time
                  ▲
                  └──▶ Trainer-policy-r      one call a `step`: leases the batch, updates, reports
                            │ publish v+1 (shared memory): the next step may begin once the ranks have copies
                            ▼
                       Rollout-i.load        verify, pause, load, resume; then the store hears `served(v+1)`, which
                                             gives the Prompts their credits back

The controller waits only for the trainers; all others work on rows as they become ready, and no row passes through
here. The store is told of a step once all ranks have reported it and copied their state (`steps.py`). With
`max_staleness=0` the credits make it the synchronous loop: no prompt is admitted before the version is out. With k > 0
the same program overlaps: while the engines load version v+1, the trainers may already be at the next batch.

Members that die are replaced while the others go on (`membership/supervisor.py`). Any other failure in a task ends the
controller, with the error that explains the others (`cause_of`).

Engines and ranks that share the CPUs of one machine work at the same time or take turns, whichever makes a step
faster. Chosen by the seconds of steps, since a trial before the run knows neither how long responses will be nor who
else computes there.

    at the same time   up to `max_staleness` steps of prompts are ahead, threads as the trial has found for both
    in turns           the prompts of one step at a time: the ranks wait for engines, engines for the new version, and
                       each side has the threads with which it was fastest alone

Taking turns never makes a token staler. It pays where both sides keep all cores busy by themselves: what they do at the
same time then takes as long as one after the other, and longer by what they take from each other.

Has the ranks make steps, and has the steps count, also where ranks or the store are lost on the way.

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
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.conf.errors import DeadlineExceeded, PartnerGone, PenstockError
from penstock.metering.meters import Meters
from penstock.orchestrator.checkpointing.export import export_model
from penstock.orchestrator.checkpointing.saving import CheckpointWriter
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.owners import ThisProcess
from penstock.orchestrator.cluster.placement.threads import are_tried
from penstock.orchestrator.cluster.ray_calls import answers, cause_of, held_back, leaves, translate
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.orchestrator.control.colocation import DeviceTurns
from penstock.orchestrator.control.evaluation import HELDOUT, Evaluator
from penstock.orchestrator.control.observer import Observer
from penstock.orchestrator.control.process import Preemption
from penstock.orchestrator.control.versions import Versions
from penstock.orchestrator.membership.handover import Handover
from penstock.orchestrator.membership.liveness import Watch
from penstock.orchestrator.membership.members import Membership, catching_up
from penstock.orchestrator.membership.recoveries import Recoveries
from penstock.orchestrator.membership.restarts import Restarts
from penstock.orchestrator.membership.run_context import RunContext
from penstock.orchestrator.membership.scaling import AutoscalerFollower, ScalingListener
from penstock.orchestrator.membership.store_recovery import StepJournal, StoreRecovery
from penstock.orchestrator.membership.supervisor import EngineDirectory, Supervisor
from penstock.orchestrator.membership.takeover import TakeoverPoint
from penstock.orchestrator.membership.trainer_recovery import Incarnation, TrainerRecovery
from penstock.orchestrator.observability.reporting.metrics import joined, update_metrics
from penstock.orchestrator.observability.reporting.sinks import Sink
from penstock.orchestrator.recovery.memory_checkpoints import MemoryCheckpoints
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


TRIED, RESTS = 4, 60
"""Number of steps by which a way is measured, and of those before the other one is tried again: responses grow."""
FASTER = 0.95
"""Factor of a step's seconds at which the other way is taken: medians of so few steps differ by as much."""


@dataclass
class Pace:
    """The choice. Pure: `note` each step. The present way is measured, then the other one, then the better goes on."""

    settles: int
    """Number of steps after a change that tell nothing: what was ahead is used up, or made."""
    takes_turns: bool = False
    _before: bool | None = None
    """The way before the other one was tried; None: the other one is not tried now."""
    _steps: int = 0
    """Number of steps since the last change or choice."""
    _due: int = 0
    """Number of steps after which the other way is tried."""
    _seconds: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """Seconds of the measured steps, at the same time and in turns."""

    def note(self, seconds: float | None) -> tuple[float, float] | None:
        """Note a step. `seconds`: None for one that had more to do than others, such as an evaluation. Returns the
        median seconds at the same time and in turns where the way has just been chosen by them."""
        self._steps += 1
        measured = self._seconds[self.takes_turns]
        if self._steps > self.settles and seconds is not None:
            measured.append(seconds)
        if self._before is None:
            del measured[:-TRIED]
            if len(measured) == TRIED and self._steps >= self._due:
                self._before, self.takes_turns, self._steps = self.takes_turns, not self.takes_turns, 0
                self._seconds[self.takes_turns] = []
            return None
        if len(measured) < TRIED:
            return None
        medians = {way: statistics.median(values) for way, values in self._seconds.items()}
        if medians[self.takes_turns] > FASTER * medians[self._before]:
            self.takes_turns = self._before
        self._before, self._steps = None, 0
        self._due = RESTS
        return medians[False], medians[True]


class CpuTurns:
    """Lifecycle: `after` each step, while the ranks wait for the next one."""

    def __init__(self, fleet: Fleet, note: Callable[[str], None]) -> None:
        """`note`: tells people what was chosen."""
        config = fleet.config
        self._fleet, self._note = fleet, note
        self._pace = Pace(config.max_staleness + 2, fleet.takes_turns) if _can_choose(fleet) else None
        self._last: float | None = None
        self._was_plain = True

    @property
    def max_active_groups(self) -> int | None:
        """Most groups between admission and publication; None: as many as the configuration has."""
        takes_turns = self._pace is not None and self._pace.takes_turns
        return self._fleet.config.trainer.groups_per_step if takes_turns else None

    async def after(self, now: float, *, is_plain: bool) -> None:
        """Note the end of a step. `now`: seconds of any clock. `is_plain`: neither an evaluation nor a checkpoint
        follows it, which the next step would have beside it."""
        if self._pace is None:
            return
        last, self._last = self._last, now
        counts, self._was_plain = is_plain and self._was_plain, is_plain
        before = self._pace.takes_turns
        if found := self._pace.note(now - last if counts and last is not None else None):
            together, turns = found
            way = "take turns" if self._pace.takes_turns else "work at the same time"
            self._note(
                f"engines and ranks {way} on the CPUs: {together:.2f} s a step at the same time, {turns:.2f} in turns"
            )
        if self._pace.takes_turns != before:
            self._fleet.takes_turns = self._pace.takes_turns
            await self._tell()

    async def _tell(self) -> None:
        """Tell engines and ranks their threads. One that is lost meanwhile is told when it is made again."""
        roles = ("rollout", "trainer")
        members = [member for role in roles for member in self._fleet.role(role)]
        calls = [(name, handle.use_threads.remote(self._fleet.threads_of(name))) for name, handle in members]
        try:
            await answers(calls, phase="use threads", timeout_s=self._fleet.config.rollout.start_timeout_s)
        except PenstockError:  # whoever watches the members replaces it
            return


def _can_choose(fleet: Fleet) -> bool:
    """Return whether the run has one kind of node, which all engines and ranks share, and steps enough to try."""
    if not are_tried(fleet.config) or len(fleet.trials) != 1 or fleet.config.trainer.max_steps < RESTS:
        return False
    (node,) = fleet.trials
    return (node.engines, node.ranks) == (len(fleet.role("rollout")), len(fleet.role("trainer")))


@dataclass
class TrainingResult:
    """The result of a run."""

    num_steps: int = 0
    accuracies: list[float] = field(default_factory=list)
    """Held-out accuracy, from the first evaluation to the last."""
    last_metrics: dict[str, Any] = field(default_factory=dict)


class Controller:
    """Lifecycle: made over a started fleet, `run` once. The files and displays it writes to belong to the caller."""

    def __init__(
        self,
        context: RunContext,
        sinks: list[Sink],
        evaluator: Evaluator | None = None,
        recoveries: Recoveries | None = None,
        wanted: dict[str, int] | None = None,
        handover: Handover | None = None,
        taken: TakeoverPoint | None = None,
        meters: Meters | None = None,
    ) -> None:
        """`recoveries` and `wanted`, the members asked for by role: of the whole run, also before this controller.
        `handover`: what it leaves for a process that goes on with the fleet; `taken`: the point at which the process
        before has left off. `meters`: those of the driver."""
        self.config, self.flow, self.fleet = context.config, context.flow, context.fleet
        config, fleet = self.config, self.fleet
        self.directory, self.progress, self.sinks = context.directory, context.progress, sinks
        self.evaluator, self.store = evaluator, context.store
        self.outcome = TrainingResult()
        base = fleet.resumed.step if fleet.resumed is not None else 0
        self._before = taken.step if taken is not None else base
        """The last step before this process."""
        self._taken = taken
        self._handover = handover if handover is not None else Handover(ThisProcess(), lambda owner: b"")
        self._weights = WeightSync(fleet, config)
        self._turns = DeviceTurns(fleet, self.store, config, self._weights.reload)
        self._saving = CheckpointWriter(context)
        self._recoveries = recoveries if recoveries is not None else Recoveries(config.faults)
        faults = config.faults
        self._restarts = Restarts(self.directory, self.progress.note, self._recoveries, meters)
        unwritten = taken.unwritten if taken is not None else {}
        self._journal = StepJournal(fleet.owner, self._before, unwritten)
        self._stores = StoreRecovery(context, self._restarts, self._journal)
        self._watch = Watch(fleet, config, self.directory)
        self._supervisor = Supervisor(
            context, self._restarts, self._stores, self._watch.tokens_in_flight, self._turns.of
        )
        catch_up = catching_up(config, self._weights)
        self._members = Membership(context, self._restarts, self._stores, self._supervisor, catch_up, wanted)
        connect = self._weights.connect if "rollout" in catch_up or not self._weights.has_engines else None
        share = faults.partner_share if faults.keep_state and connect is not None else 0.0
        timeout_s = config.trainer.collective_timeout_s
        states = MemoryCheckpoints(lambda: fleet.state_nodes, share, timeout_s, self._no_more_copies)
        self._ranks = TrainerRecovery(context, self._restarts, self._stores, self._supervisor, states, connect)
        self._versions = Versions(
            self._weights, self._ranks, self._turns, self._stores, self.directory.timeline, self._before,
            beside=config.max_staleness > 0,
        )  # fmt: skip
        self._pace = CpuTurns(fleet, self._paced)
        self._engines = EngineDirectory(fleet)
        self._stop = False
        time_s = faults.preemption_s if config.checkpoint.every_steps else 0.0
        self._preemption = Preemption(time_s, self.progress.note)
        self._observer = Observer(
            context, self._restarts, self._stores, self._watch, self._versions, self._counters, sinks
        )
        self._making = Steps(
            context, self._restarts, self._stores, self._ranks, self._versions, self._turns, self._observer,
            self._trained,
        )  # fmt: skip

    @property
    def is_told_to_end(self) -> bool:
        """True once a scheduler has told the run to end."""
        return self._preemption.is_due

    async def run(self) -> TrainingResult:
        """Make all steps. Raises the failure that explains the others."""
        try:
            with self._preemption.heeded():
                await self._run()
        except BaseExceptionGroup as failures:
            raise cause_of([translate(error, "Store") for error in leaves(failures)]) from None
        finally:
            await self._saving.give_up()
            await self._restarts.end()
        return self.outcome

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch.run())
            self._members.begin(tasks)
            self._members.until_end(self._handover.run())
            for work in self._observer.tasks():
                self._members.until_end(work)
            self._members.until_end(self._stores.take_snapshots())
            self._members.serve("prompts", "compute", "scorer", "reward")
            await tasks.create_task(held_back(self._steps(tasks)))
            await self._handover.leave()
            self._supervisor.close()
            self._members.close()
            await self._stores.with_store(lambda: self.store.close("the run is complete"))
            await self._members.ended()
            watching.cancel()

    async def _steps(self, tasks: asyncio.TaskGroup) -> None:
        await (self._weights.connect() if self._taken is None else self._ranks.with_ranks(self._weights.connect))
        if self._before:
            await self._go_on()
        else:
            await self._turns.generation()
        # No sooner: engines begin with version 0, and a resumed store has groups that are too young for its tokens.
        self._members.serve("rollout")
        if self.flow.has_environment:
            await self._engines.tell()
            self._members.until_end(self._engines.run())
            self._members.serve("environment")
        self._take_scaling_requests()
        if not self._before and not (self._taken is not None and self._taken.metrics):
            await self._first_evaluation()
        self._observer.begin()
        self._recoveries.time.begin(self._before, len(self.fleet.role("rollout")), time.monotonic())
        finishing: asyncio.Task[None] | None = None
        unwritten = dict(self._taken.unwritten) if self._taken is not None else {}
        first = self._before if self._before in unwritten else self._before + 1
        self._stop = self._has_reached(self._taken.metrics) if self._taken is not None else False
        for step in range(first, self.config.trainer.max_steps + 1):
            if self._stop or self._preemption.is_due:
                break
            if step in unwritten:
                counted = tasks.create_task(known(unwritten[step]))
            else:
                counted = await self._making.make(step, tasks)
            if finishing is not None:
                await finishing
            phases = await self._record(step, counted)
            await self.fleet.owner.renew()  # ranks that another command drives may be at the next step
            phases["publish"] = await self._versions.publish(step)
            finishing = tasks.create_task(held_back(self._finish(step, counted, phases)))
            if self.config.max_staleness == 0 or self._may_stop(step):
                await finishing
            await self._observer.close(step)
            is_plain = not (self._evaluates(step) or self._saving.is_due(step))
            await self._pace.after(time.monotonic(), is_plain=is_plain)
        if finishing is not None:
            await finishing
        await self._observer.finish()
        done, is_over = self.outcome.num_steps, self._stop or self.outcome.num_steps == self.config.trainer.max_steps
        if (self._stop or self._preemption.is_due) and done and self._saving.is_due(done, is_last=True):
            await self._saving.begin(done, self.outcome.last_metrics, is_last=True)
        if self._preemption.is_due and not is_over:
            await self._saving.finish()
            self.directory.event("preempted", step=done)
            await self._preemption.leave()
        await self._end()

    def _take_scaling_requests(self) -> None:
        """Let members join and leave from now on."""
        self._members.until_end(self._members.grant_again())
        if agents := self.fleet.role("agent"):
            self._members.until_end(ScalingListener(agents[0][1], self._members, self.config).run())
        if self.config.rollout.follows_cluster and self.flow.of_kind("rollout"):
            follower = AutoscalerFollower(
                self.fleet.capacity, self._members, self.config, lambda: self.outcome.last_metrics, self.progress.note
            )
            self._members.until_end(follower.run())

    async def _go_on(self) -> None:
        """Bring a resumed run up to date: the engines have the starting model, and the store may know of fewer
        versions."""
        self.outcome.num_steps = self._before
        if self._taken is not None:
            self._observer.begin()
            is_done = self._before not in self._taken.unwritten
            for step in sorted(self._taken.unwritten.keys() - {self._before}):
                await self._observer.written_before(step, self._taken.unwritten[step])
                self._journal.written(step)
            due, metrics = (self._before if is_done else None), self._taken.metrics
            await self._ranks.with_ranks(lambda: self._saving.adopt(due, metrics))
            if not is_done:  # the loop goes on with it
                return
        await self._versions.publish(self._before)
        await self._versions.load(await self._versions.seal())
        await self._versions.tell(self._before)

    def _no_more_copies(self, reason: str) -> None:
        self.directory.event("state_not_copied", step=self._restarts.step, reason=reason)
        self.progress.note(reason)

    def _paced(self, text: str) -> None:
        self.directory.event("paced", step=self._restarts.step, text=text)
        self.progress.note(text)

    def _trained(self, step: int, reports: Sequence[StepReport]) -> None:
        tokens = sum(int(report.rows.response_tokens_N.sum()) for report in reports)
        self._recoveries.time.trained(step, tokens, time.monotonic(), len(self.fleet.role("rollout")))

    async def _record(self, step: int, counted: Awaitable[Counted]) -> dict[str, float]:
        """Write the samples of the step and begin its checkpoint, where they are due: both are of a step that counts.
        Returns the seconds that they cost, by phase."""
        if not (self._observer.is_sampled(step) or self._saving.is_due(step)):
            return {}
        reports, _ = await counted
        await self._observer.sample(step, reports)
        return await self._save_if_due(step, reports)

    async def _save_if_due(self, step: int, reports: Sequence[StepReport]) -> dict[str, float]:
        """Begin the checkpoint after step `step` if it is due. Returns the seconds that it cost, by phase."""
        if not self._saving.is_due(step):
            return {}
        await self._observer.flush()
        rows = joined([report.rows for report in reports])
        metrics, start = update_metrics(step, step, rows, reports[0].metrics), time.time()
        seconds = await self._ranks.with_ranks(lambda: self._saving.begin(step, metrics))
        self.directory.timeline.span("trainer", "save", start, time.time(), step=step)
        return {"checkpoint": seconds}

    async def _finish(self, step: int, counted: Awaitable[Counted], phases: dict[str, float]) -> None:
        """Bring the version that the step made to the engines, once the step counts; evaluate if due, tell the store,
        write the numbers. `phases`: seconds of what the step had besides its update."""
        reports, kept = await counted
        phases |= kept
        started = time.monotonic()
        delivery = await self._versions.seal()
        phases["publish"] += time.monotonic() - started
        phases["publish"] += await self._versions.load(delivery)
        evaluated, evaluation_s = await self._evaluate_if_due(step)  # of one version: prompts of the next come after it
        await self._versions.tell(step, self._pace.max_active_groups)
        phases |= {"evaluation": evaluation_s} if evaluated else {}
        self.outcome.last_metrics = await self._observer.written(step, reports, phases, evaluated)
        self._journal.written(step)
        self.outcome.num_steps = step

    def _counters(self) -> dict[str, float]:
        counters = self._recoveries.metrics(time.monotonic()) | self.directory.failed_writes.metrics()
        if self.config.checkpoint.every_steps:
            counters["checkpoint/failed"] = float(self._saving.failed)
        return counters

    async def _first_evaluation(self) -> None:
        """Measure the accuracy before training, as step 0."""
        if self.evaluator is None:
            return
        self.progress.phase("evaluating the model as it is")
        evaluated, seconds = await self._evaluate()
        self._observer.emit(0, {"step": 0, "policy_version": 0, **evaluated, "timing_s/evaluation": seconds})

    def _evaluates(self, step: int) -> bool:
        every, last = self.config.evaluation.every_steps, step == self.config.trainer.max_steps
        return self.evaluator is not None and (step % every == 0 or last)

    def _may_stop(self, step: int) -> bool:
        """Return whether the run may end with this step. Nothing is trained then until it is measured, so that what is
        exported and saved is what reached the goal."""
        return self.config.evaluation.stop_at_accuracy is not None and self._evaluates(step)

    async def _evaluate_if_due(self, step: int) -> tuple[dict[str, float], float]:
        if not self._evaluates(step):
            return {}, 0.0
        evaluated, seconds = await self._evaluate()
        accuracy, goal = evaluated[HELDOUT], self.config.evaluation.stop_at_accuracy
        if self._has_reached(evaluated) and step < self.config.trainer.max_steps:
            self._stop = True
            self.directory.event("stopped_early", step=step, accuracy=accuracy, goal=goal)
            self.progress.note(
                f"held-out accuracy {accuracy:.1%} has reached evaluation.stop_at_accuracy={goal:g}: ending here"
            )
        return evaluated, seconds

    def _has_reached(self, evaluated: Mapping[str, Any]) -> bool:
        """Return whether the goal is reached, by what was measured after a step."""
        goal = self.config.evaluation.stop_at_accuracy
        return goal is not None and (evaluated.get(HELDOUT) or 0.0) >= goal

    async def _evaluate(self) -> tuple[dict[str, float], float]:
        assert self.evaluator is not None
        start = time.time()
        async with self._members.staying:
            evaluated = await self.evaluator.measure(self.fleet)
        self.outcome.accuracies.append(evaluated[HELDOUT])
        self.directory.timeline.span("engines", "evaluate", start, time.time())
        return evaluated, time.time() - start

    async def _end(self) -> None:
        """Finish the last checkpoint, then export the model, which can be made of a checkpoint, but not the reverse.
        Both are tried, whether or not the first fails. Raises what they failed with."""
        failures: list[BaseException] = []
        try:
            await self._saving.finish(strict=True)
        except PenstockError as error:
            failures.append(error)
        try:
            if self.config.tracking.export_model:
                await self._export()
        except PenstockError as error:
            failures.append(error)
        if failures:
            raise cause_of(failures)

    async def _export(self) -> None:
        self.progress.phase("writing the model")
        await export_model(self.fleet, str(self.directory.model))
        self.directory.event("model_exported", path=str(self.directory.model))
