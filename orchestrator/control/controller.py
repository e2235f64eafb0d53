"""The controller: a readable loop over a fleet and a store.

    Prompts ──▶ Store ◀──▶ Rollout-i, Reward-i, Compute-…, Scorer-reference-r      pull by leases, all the time
                  ▲
                  └──▶ Trainer-policy-r      one call a `step`: leases the batch, updates, reports
                            │ publish v+1 (shared memory): the next step may begin once the ranks have copies
                            ▼
                       Rollout-i.load        verify, pause, load, resume; then the store hears `served(v+1)`, which
                                             gives the Prompts their credits back

The controller waits only for the trainers; all other actors work on rows as they become ready, and no row passes
through here. A step is committed to the store once all ranks have reported it and copied their state (`step_loop.py`).
With `max_staleness=0` the credits make it the synchronous loop: no prompt is admitted before the version is out. With k
> 0 the same program overlaps: while the engines load version v+1, the trainers may already be at the next batch.

Members that die are replaced while the rest continues (`recovery/restart.py`). Any other failure in a task ends the
controller, with the error that explains the rest (`cause_of`).
"""

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.metering.meters import Meters
from penstock.orchestrator.checkpointing.checkpoints import CheckpointWriter
from penstock.orchestrator.checkpointing.export import export_model, replace_model
from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.cluster.ray_calls import cause_of, held_back, leaves, translate
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.orchestrator.control.engine_probe import EngineProbe
from penstock.orchestrator.control.evaluation import HELDOUT, Evaluator
from penstock.orchestrator.control.evaluations import LOST, Evaluations
from penstock.orchestrator.control.loans import EngineLoans
from penstock.orchestrator.control.members import EngineDirectory, Membership, catch_up_by_role
from penstock.orchestrator.control.observer import Observer
from penstock.orchestrator.control.process import Preemption
from penstock.orchestrator.control.scaling import AutoscalerFollower, ScalingListener
from penstock.orchestrator.control.step_loop import StepLoop, StepResult, known_result
from penstock.orchestrator.control.turns import CpuTurns, DeviceTurns
from penstock.orchestrator.observability.reporting.metrics import joined, update_metrics
from penstock.orchestrator.observability.reporting.sinks import Sink, end_run
from penstock.orchestrator.observability.reporting.trackers import OF_STEP
from penstock.orchestrator.recovery.decisions import RunFaults
from penstock.orchestrator.recovery.liveness import Watch
from penstock.orchestrator.recovery.memory_checkpoints import MemoryCheckpoints
from penstock.orchestrator.recovery.restart import Recovery, Restarts, StepJournal, StoreRestart, Supervisor
from penstock.orchestrator.recovery.takeover import Handover, TakeoverPoint
from penstock.orchestrator.run_context import RunContext
from penstock.workers.trainer.step_report import StepReport


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
        run_faults: RunFaults | None = None,
        wanted: dict[str, int] | None = None,
        handover: Handover | None = None,
        taken: TakeoverPoint | None = None,
        meters: Meters | None = None,
    ) -> None:
        """`run_faults` and `wanted`, the members asked for by role: of the whole run, also before this controller.
        `handover`: what it leaves for a process that takes the fleet over; `taken`: the point at which the process
        before has stopped. `meters`: those of the driver."""
        self.config, self.flow, self.fleet = context.config, context.flow, context.fleet
        config, fleet = self.config, self.fleet
        self.directory, self.progress, self.sinks = context.directory, context.progress, sinks
        self.evaluator, self.store = evaluator, context.store
        self.outcome = TrainingResult()
        base = fleet.resumed.step if fleet.resumed is not None else 0
        self._before = taken.step if taken is not None else base
        """The last step before this process."""
        self._taken = taken
        self._stop = False
        self._reached: int | None = None
        """The step that has reached the goal of the evaluation, if one has."""
        self._weights = WeightSync(fleet, config)
        self._probe = EngineProbe(fleet, self._weights, config.rollout.max_model_len)
        self._turns = DeviceTurns(fleet, self.store, config, self._weights.reload)
        self._pace = CpuTurns(fleet, self._report_pace)
        self._watch = Watch(fleet, config, self.directory)
        self._recovery = self._make_recovery(context, run_faults or RunFaults(config.faults), meters)
        self._restarts, self._journal = self._recovery.restarts, self._recovery.store.journal
        self.members = Membership(context, self._recovery, catch_up_by_role(config, self._weights), wanted)
        self._engines = EngineDirectory(fleet)
        self.loans = EngineLoans(fleet, config, self._weights.catch_up, self._engines.tell)
        self._saving = CheckpointWriter(context)
        self._evaluations = Evaluations(
            context, evaluator, self.loans, self._weights, self._saving, self._report_evaluation,
            lambda: self.is_preempted,
        )  # fmt: skip
        if config.finishes_sequences:
            self._weights.update = self.loans.update
        self._observer = Observer(
            context, self._recovery, self._watch, lambda: self._loop.weights_state(), self._counters, sinks
        )
        self._loop = self._make_loop(context)
        self._handover = handover if handover is not None else Handover(Owner(), lambda owner: b"")
        time_s = config.faults.preemption_s if config.checkpoint.every_steps else 0.0
        self._preemption = Preemption(time_s, self.progress.note)

    def _make_recovery(self, context: RunContext, run_faults: RunFaults, meters: Meters | None) -> Recovery:
        """What restarts members and the store."""
        restarts = Restarts(self.directory, self.progress.note, run_faults, meters)
        unwritten = self._taken.unwritten if self._taken is not None else {}
        store = StoreRestart(context, restarts, StepJournal(self.fleet.owner, self._before, unwritten))
        supervisor = Supervisor(context, restarts, store, self._watch.tokens_in_flight, self._turns.hold)
        return Recovery(restarts, store, supervisor)

    def _make_loop(self, context: RunContext) -> StepLoop:
        """What makes steps and versions, and restarts the ranks."""
        faults, fleet = self.config.faults, self.fleet
        share = faults.partner_share if faults.keep_state and self._weights.can_reconnect else 0.0
        timeout_s = self.config.trainer.collective_timeout_s
        states = MemoryCheckpoints(lambda: fleet.state_nodes, share, timeout_s, self._report_copies_ended)
        return StepLoop(context, self._recovery, self._weights, self._turns, states, self._observer)

    @property
    def is_preempted(self) -> bool:
        """True once a scheduler has signalled the run to end."""
        return self._preemption.is_due

    async def run(self) -> TrainingResult:
        """Make all steps. Raises the failure that explains the rest."""
        try:
            with self._preemption.handle_signals():
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
            self.members.begin(tasks)
            self.members.until_end(self._handover.run())
            for work in self._observer.tasks():
                self.members.until_end(work)
            self.members.until_end(self._recovery.store.take_snapshots())
            self.members.serve("prompts", "compute", "scorer", "reward")
            await tasks.create_task(held_back(self._steps(tasks)))
            await self._handover.leave()
            self._recovery.supervisor.close()
            self.members.close()
            await self._recovery.store.retry(lambda: self.store.close("the run is complete"))
            await self.members.ended()
            watching.cancel()

    async def _steps(self, tasks: asyncio.TaskGroup) -> None:
        self._evaluations.start(tasks)
        await (self._weights.connect() if self._taken is None else self._loop.retry(self._weights.connect))
        if self._before:
            await self._catch_up()
        else:
            await self._turns.generation()
        # No sooner: engines begin with version 0, and a resumed store has groups that are too young for its tokens.
        await self._evaluations.reserve()
        self.members.serve("rollout")
        if self.flow.has_environment:
            await self._engines.tell()
            self.members.until_end(self._engines.run())
            self.members.serve("environment")
        self._take_scaling_requests()
        if not self._before and not (self._taken is not None and self._taken.metrics):
            await self._first_evaluation()
        self._observer.begin()
        self._restarts.begin_steps(self._before, len(self.fleet.role("rollout")))
        finishing: asyncio.Task[None] | None = None
        unwritten = dict(self._taken.unwritten) if self._taken is not None else {}
        first = self._before if self._before in unwritten else self._before + 1
        await self._recall_goal()
        for step in range(first, self.config.trainer.max_steps + 1):
            if (self._stop and step not in unwritten) or self._preemption.is_due:
                break
            if step in unwritten:
                committed = tasks.create_task(known_result(unwritten[step]))
            else:
                committed = await self._loop.make(step, tasks)
            if finishing is not None:
                await finishing
            phases = await self._record(step, committed)
            await self.fleet.owner.renew()  # ranks that another command drives may be at the next step
            phases["publish"] = await self._loop.publish(step)
            finishing = tasks.create_task(held_back(self._finish(step, committed, phases)))
            if self.config.max_staleness == 0 or self._may_stop(step):
                await finishing
            await self._observer.close(step)
            evaluates = self._evaluates(step) or bool(self._evaluations.awaited)
            is_plain = not (evaluates or self._saving.is_due(step))
            await self._pace.after(time.monotonic(), is_plain=is_plain)
        if finishing is not None:
            await finishing
        await self._evaluations.finish(is_preempted=self._preemption.is_due)
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
        self.members.until_end(self.members.grant_again())
        if agents := self.fleet.role("agent"):
            self.members.until_end(ScalingListener(agents[0][1], self.members, self.config).run())
        if self.config.rollout.follows_cluster and self.flow.of_kind("rollout"):
            follower = AutoscalerFollower(
                self.fleet.capacity, self.members, self.config, lambda: self.outcome.last_metrics, self.progress.note
            )
            self.members.until_end(follower.run())

    async def _catch_up(self) -> None:
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
            await self._loop.retry(lambda: self._saving.adopt(due, metrics))
            if not is_done:  # the loop continues with this step
                return
        await self._loop.publish(self._before)
        await self._loop.load(await self._loop.seal())
        await self._loop.report_served(self._before)
        await self._resume_evaluations(self._before, self._before)

    def _report_copies_ended(self, reason: str) -> None:
        self.directory.event("state_not_copied", step=self._restarts.step, reason=reason)
        self.progress.note(reason)

    def _report_pace(self, text: str) -> None:
        self.directory.event("paced", step=self._restarts.step, text=text)
        self.progress.note(text)

    async def _record(self, step: int, committed: Awaitable[StepResult]) -> dict[str, float]:
        """Write the samples of the step and begin its checkpoint, where they are due: both are of a committed step.
        Returns the seconds that they cost, by phase."""
        if not (self._observer.is_sampled(step) or self._saving.is_due(step)):
            return {}
        reports, _ = await committed
        await self._observer.sample(step, reports)
        return await self._save_if_due(step, reports)

    async def _save_if_due(self, step: int, reports: Sequence[StepReport]) -> dict[str, float]:
        """Begin the checkpoint after step `step` if it is due. Returns the seconds that it cost, by phase."""
        if not self._saving.is_due(step):
            return {}
        await self._observer.flush()
        rows = joined([report.rows for report in reports])
        metrics, start = update_metrics(step, step, rows, reports[0].metrics), time.time()
        seconds = await self._loop.retry(lambda: self._saving.begin(step, metrics))
        self.directory.timeline.span("trainer", "save", start, time.time(), step=step)
        return {"checkpoint": seconds}

    async def _finish(self, step: int, committed: Awaitable[StepResult], phases: dict[str, float]) -> None:
        """Bring the version that the step made to the engines, once the step is committed; evaluate if due, tell the
        store, write the numbers. `phases`: seconds of what the step had besides its update."""
        reports, kept = await committed
        phases |= kept
        started = time.monotonic()
        async with asyncio.TaskGroup() as beside:
            probing = beside.create_task(self._probe.compare(reports))
            sealing = beside.create_task(held_back(self._loop.seal()))
        delivery = sealing.result()
        phases["publish"] += time.monotonic() - started
        await self._evaluations.before_load()
        async with self.loans.serving:
            phases["publish"] += await self._loop.load(delivery)
            evaluated, evaluation_s = await self._evaluate_if_due(step)  # of one version: prompts come after it
            await self._loop.report_served(step, self._pace.max_active_groups)
        phases |= {"evaluation": evaluation_s} if evaluated else {}
        measured = probing.result() | evaluated
        self.outcome.last_metrics = await self._observer.written(step, reports, phases, measured)
        self._stop = self._stop or end_run(self.sinks)
        self._journal.written(step)
        self.outcome.num_steps = step
        if step == self._before:  # the command before had not finished it
            await self._resume_evaluations(step - 1, step)
        if self._evaluates(step) and self._evaluations.is_beside(step):
            self._saving.await_score(step)
            await self._evaluations.begin(step)
            await self._handover.keep()

    async def _resume_evaluations(self, done: int, newest: int) -> None:
        """Begin what a command before has not measured up to step `done`; the checkpoint stays until that is known.
        `newest`: the version of the engines."""
        await self._evaluations.resume(done, newest)
        awaited, is_beside = self._evaluations.awaited, self._evaluations.is_beside(done)
        if not (awaited or is_beside) and self._evaluates(done) and await self._saving.lacks_score(done):
            evaluated, seconds = await self._evaluate()
            self._saving.scored(done, evaluated)
            self._emit_evaluation(done, evaluated, seconds)
        if is_beside and done not in awaited and self._saving.awaits_score(done):
            line = next((line for line in self.directory.read_metrics() if line["step"] == done), {})
            in_environment = self.config.environment.name is not None
            names = self.config.evaluation.metrics(in_environment=in_environment, policies=self.config.trainer.policies)
            self._saving.scored(done, {name: line[name] for name in names if name in line})  # reported before

    def _counters(self) -> dict[str, float]:
        counters = self._restarts.metrics() | self.directory.failed_writes.metrics()
        if self._evaluations.is_beside(0):
            counters[LOST] = float(self._evaluations.num_lost)
        if self.config.checkpoint.every_steps:
            counters["checkpoint/failed"] = float(self._saving.failed)
        return counters

    async def _first_evaluation(self) -> None:
        """Measure the accuracy before training, as step 0."""
        if self.evaluator is None:
            return
        self.progress.phase("evaluating the model as it is")
        evaluated, seconds = await self._evaluate()
        self._evaluations.measured_before(seconds)
        self._emit_evaluation(0, evaluated, seconds)

    def _report_evaluation(self, step: int, evaluated: Mapping[str, float], seconds: float) -> None:
        """Report what was measured of a version while later steps were trained; empty if that is lost."""
        self._saving.scored(step, evaluated)
        if not evaluated:
            lost = {OF_STEP: step, LOST: float(self._evaluations.num_lost)}
            self._observer.emit(step, {"step": step, "policy_version": step, **lost})
            return
        self.outcome.accuracies.append(evaluated[HELDOUT])
        self._emit_evaluation(step, evaluated, seconds)
        if not self._saving.has_failed(step):
            self._stop_if_reached(step, evaluated)
        elif self._has_reached(evaluated):
            self.progress.note(
                f"evaluation.stop_at_accuracy is reached after step {step}, whose checkpoint could not be written: "
                "training goes on"
            )
        if step == self._reached:
            self._saving.await_score(step)  # its checkpoint is the result

    def _emit_evaluation(self, step: int, evaluated: Mapping[str, float], seconds: float) -> None:
        of_step = {OF_STEP: step} if self._evaluations.is_beside(0) else {}
        measured = {**of_step, **evaluated, "timing_s/evaluation": seconds}
        self._observer.emit(step, {"step": step, "policy_version": step, **measured})

    def _evaluates(self, step: int) -> bool:
        return self.evaluator is not None and self.config.evaluates(step)

    def _may_stop(self, step: int) -> bool:
        """Return whether the run may end with this step. Nothing is trained then until it is measured, so that what is
        exported and saved is what reached the goal; beside training, the checkpoint of the step is."""
        is_beside, goal = self._evaluations.is_beside(step), self.config.evaluation.stop_at_accuracy
        return goal is not None and self._evaluates(step) and not is_beside

    async def _evaluate_if_due(self, step: int) -> tuple[dict[str, float], float]:
        if not self._evaluates(step) or self._evaluations.is_beside(step):
            return {}, 0.0
        evaluated, seconds = await self._evaluate()
        self._saving.scored(step, evaluated)
        evaluated |= {OF_STEP: step} if self._evaluations.is_beside(0) else {}
        self._stop_if_reached(step, evaluated)
        return evaluated, seconds

    def _stop_if_reached(self, step: int, evaluated: Mapping[str, float]) -> None:
        accuracy, goal = evaluated[HELDOUT], self.config.evaluation.stop_at_accuracy
        if not self._has_reached(evaluated) or step >= self.config.trainer.max_steps or self._reached is not None:
            return
        self._stop, self._reached = True, step
        self.directory.event("stopped_early", step=step, accuracy=accuracy, goal=goal)
        self.progress.note(
            f"held-out accuracy {accuracy:.1%} has reached evaluation.stop_at_accuracy={goal:g} after step {step}: "
            "ending here"
        )

    async def _recall_goal(self) -> None:
        """End the run if a command before has reached the goal. What was measured beside training counts where its
        checkpoint is there."""
        self._stop = self._stop or (self._taken is not None and self._has_reached(self._taken.metrics))
        for line in self.directory.read_metrics() if self._before and self._evaluations.is_beside(0) else []:
            step = int(line["step"])
            is_goal = OF_STEP in line and 0 < step <= self._before and self._has_reached(line)
            if is_goal and self._reached is None and await self._saving.has(step):
                self._stop, self._reached = True, step
                self._saving.await_score(step)  # its checkpoint is the result

    def _has_reached(self, evaluated: Mapping[str, Any]) -> bool:
        """Return whether the goal is reached, by what was measured after a step."""
        goal = self.config.evaluation.stop_at_accuracy
        return goal is not None and (evaluated.get(HELDOUT) or 0.0) >= goal

    async def _evaluate(self) -> tuple[dict[str, float], float]:
        assert self.evaluator is not None
        start = time.time()
        async with self.members.staying:
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
        reached, done = self._reached, self.outcome.num_steps
        if reached is not None and reached != done and await self._saving.has(reached):
            # steps were trained while it was measured
            await asyncio.to_thread(replace_model, self._saving.directory(reached), self.directory.model)
        else:
            if reached not in (None, done):
                self.progress.note(f"step {reached} has no complete checkpoint: the model after step {done} is written")
            await export_model(self.fleet, str(self.directory.model))
        self.directory.event("model_exported", path=str(self.directory.model))
