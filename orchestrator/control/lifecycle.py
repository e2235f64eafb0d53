"""Trains, from the run's start or from a checkpoint, and returns to the last one (to the start, if none was taken yet)
where members that are lost cannot be replaced while the others go on.

    fleet ─▶ controller ─ a failure that a new process may help with ─▶ the fleet ends ─▶ newest checkpoint ─▶ fleet …

`membership/supervisor.py` replaces single members; `membership/recoveries.py` decides how often a run may return.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator

from ray.exceptions import RayError

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import PenstockError, TakenOver
from penstock.conf.run import RunConfig
from penstock.conf.weights import takes_newcomers
from penstock.metering.meters import Meters
from penstock.metering.ray_export import exporting
from penstock.orchestrator.checkpointing.resuming import damage_of, fall_back, newest, rewind
from penstock.orchestrator.cluster.cluster import (
    is_elsewhere,
    is_over,
    namespace_of,
    raise_if_over,
    while_it_lives,
)
from penstock.orchestrator.cluster.connection import note_connection
from penstock.orchestrator.cluster.ray_calls import first_line
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.fleet.trials import try_fences, try_threads
from penstock.orchestrator.cluster.nodes.agents import NodeAgents
from penstock.orchestrator.cluster.owners import Owner, RunOwner, ThisProcess
from penstock.orchestrator.cluster.placement.actors import (
    DRIVER,
    ActorPlan,
    answers_are_needed,
    needed,
    origin_of,
)
from penstock.orchestrator.cluster.placement.threads import read_trials
from penstock.orchestrator.cluster.ray_calls import is_recoverable
from penstock.orchestrator.configuration.prerequisites import limits_of_code
from penstock.orchestrator.control import process
from penstock.orchestrator.control.controller import Controller, TrainingResult
from penstock.orchestrator.control.evaluation import Evaluator
from penstock.orchestrator.membership.handover import Handover, Identity, RunState, pack
from penstock.orchestrator.membership.recoveries import End, Recoveries
from penstock.orchestrator.membership.run_context import RunContext
from penstock.orchestrator.membership.takeover import LeftBehind, TakeoverPoint, take_up
from penstock.orchestrator.observability.actor_logs import Logs
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.observability.reporting.sinks import Sink
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.orchestrator.run_directory.run_directory import RunDirectory


class RunLifecycle:
    """Lifecycle: `run` once, connected to Ray."""

    def __init__(
        self,
        config: RunConfig,
        flow: Dataflow,
        plan: list[ActorPlan],
        directory: RunDirectory,
        model_path: str,
        progress: ProgressDisplay,
        identity: Identity,
        goes_on: Checkpoint | LeftBehind | None = None,
    ) -> None:
        """`identity`: that of a command that may go on with the run. `goes_on`:
        what the run goes on from."""
        self._config, self._flow, self._plan = config, flow, plan
        self._directory, self._model_path, self._progress = directory, model_path, progress
        self._identity = identity
        self._left = goes_on if isinstance(goes_on, LeftBehind) else None
        """Actors that a dead command has left, until they are taken up."""
        resumed = goes_on.state.resumed if isinstance(goes_on, LeftBehind) else goes_on
        self._resumed = self._first = resumed
        self._namespace = self._left.state.namespace if self._left is not None else namespace_of(directory)
        self._recoveries = Recoveries(config.faults)
        self._wanted: dict[str, int] = dict(self._left.state.wanted) if self._left is not None else {}
        """Numbers of members that people have asked for, by role."""
        self._has_started = self._left is not None
        self._cause: PenstockError | None = None
        """The failure that the run returns for, until it has returned."""
        self._from_step = 0
        """The step that the run returns from."""

    def run(self, sinks: list[Sink]) -> TrainingResult:
        """Train. `sinks`: those of the metrics. Raises the failure that cannot be recovered from; if a return fails,
        the failure that it was made for."""
        note_connection(self._directory, self._namespace)
        with exporting(origin_of(self._config, self._namespace, DRIVER, DRIVER)) as meters:
            return self._run(sinks, meters)

    def _run(self, sinks: list[Sink], meters: Meters) -> TrainingResult:
        config = self._config
        evaluator = None
        if config.evaluation.every_steps:
            asks = answers_are_needed(self._flow, config, held_out=True)
            evaluator = Evaluator.of(config, self._model_path, needs_answer=asks)
        while True:
            step, is_told_to_end = 0, False
            try:
                left, self._left = self._left, None
                with self._fleet(left) as fleet:
                    taken = self._taken(fleet, left) if left is not None else None
                    context = RunContext.of(config, fleet, self._directory, self._progress)
                    controller = Controller(
                        context, sinks, evaluator, self._recoveries, self._wanted, self._handover(fleet), taken, meters
                    )
                    try:
                        return process.run(controller.run(), raise_if_over)
                    finally:
                        step, is_told_to_end = controller.outcome.num_steps, controller.is_told_to_end
            except PenstockError as error:
                if is_told_to_end and is_recoverable(error):
                    raise KeyboardInterrupt from error
                if self._fell_back(error, step, starts_from_it=left is None):
                    continue
                if not self._may_return(error, step):
                    if self._cause is None:
                        raise
                    raise self._cause from error
                self._cause = self._cause or error
            self._return()

    @contextlib.contextmanager
    def _fleet(self, left: LeftBehind | None) -> Iterator[Fleet]:
        """A fleet that has started: `left` behind, or new."""
        config, owner = self._config, left.owner if left is not None else self._new_owner()
        spill_dir = config.store.spill_dir
        agents = NodeAgents(self._directory.full_name, self._namespace, config.cluster, spill_dir, owner)
        fleet = Fleet(
            self._plan, config, self._flow, self._model_path, agents, resumed=self._resumed,
            trials=read_trials(self._directory),
        )  # fmt: skip
        logs, is_anothers = Logs(fleet, self._directory), False
        try:
            if left is not None:
                fleet.take_over(left.state.fleet, left.handles)
                yield fleet
                return
            self._progress.phase(_starting_text(self._plan, self._config))
            began = time.monotonic()
            fleet.create()
            cpus, gpus = needed(self._plan)
            self._directory.event("placed", actors=fleet.reservation.assignment.titles, cpus=cpus, gpus=gpus)
            logs.meet(config.rollout.start_timeout_s)
            if is_elsewhere() and (all_limits := limits_of_code(config)):
                for held in try_fences(fleet, all_limits):
                    self._progress.note(held)
            fleet.start()
            try_threads(fleet, self._directory)
            self._directory.event("serving", seconds=round(time.monotonic() - began, 3))
            self._has_started = True
            if self._cause is not None:
                self._returned()
            yield fleet
        except TakenOver:
            is_anothers = True
            raise
        except PenstockError as error:  # which may come of a refusal: the store's comes as a `StoreError`
            try:
                owner.confirm()
            except TakenOver as refusal:
                is_anothers = True
                raise refusal from error
            raise
        finally:
            self._progress.phase("stopping")
            if is_anothers or is_over():
                fleet.let_go()
            else:
                while_it_lives(lambda: _end(logs, fleet))

    def _new_owner(self) -> Owner:
        """The owner of the next fleet."""
        if self._config.faults.lease_s and is_elsewhere() and takes_newcomers(self._config):
            timeout_s = self._config.rollout.start_timeout_s
            return RunOwner.start(self._namespace, self._config.faults.lease_s, timeout_s)
        return ThisProcess()

    def _handover(self, fleet: Fleet) -> Handover:
        """The handover of a fleet to a command that may come after this one."""
        resumed, namespace, paths = self._resumed, self._namespace, dict(self._config.model.paths)

        def describe(owner: RunOwner) -> bytes:
            state = RunState(namespace, self._model_path, paths, resumed, dict(self._wanted), fleet.state(owner))
            return pack(self._identity, state)

        return Handover(fleet.owner, describe)

    def _taken(self, fleet: Fleet, left: LeftBehind) -> TakeoverPoint:
        """The point at which the command before has left off, with its ranks idle. Raises what the store fails with."""
        self._progress.phase("taking over what the command before has left")
        began = time.monotonic()
        step = asyncio.run(take_up(fleet, left.reports))
        seconds = time.monotonic() - began
        self._directory.event("serving", seconds=round(seconds, 3))
        self._progress.note(
            f"goes on after step {step} with the actors of the command before, of which nothing was heard for "
            f"{left.silent_s:.0f} s"
        )
        return TakeoverPoint.of(step, left.reports, self._directory.read_metrics())

    def _may_return(self, failure: PenstockError, step: int) -> bool:
        """Return whether the run is to return to its last checkpoint. `step`: the last that was logged.

        A failure in a run's very first start is told at once: it comes of the settings more often than not. A run that
        takes no checkpoints ends with what it has; one that has taken none yet begins again.
        """
        if self._cause is not None:
            self._directory.event("return_failed", error=type(failure).__name__, message=str(failure))
        if not (is_recoverable(failure) and self._has_started) or is_over():
            return False
        now = time.monotonic()
        if self._cause is not None:
            decision = self._recoveries.return_failed(first_line(failure), now, self._from_step)
        else:
            decision, self._from_step = self._recoveries.beyond_help("the run", "", now, step), step
        has_checkpoint = self._first is not None or self._has_own()
        if isinstance(decision, End) or not (has_checkpoint or self._config.checkpoint.every_steps):
            reason = decision.reason if isinstance(decision, End) else f"{decision.reason}, and it takes no checkpoints"
            self._directory.event("given_up", reason=reason)
            return False
        about = {"from_step": self._from_step, "error": type(failure).__name__, "message": str(failure)}
        self._directory.event("returning", **about)
        place = "the last checkpoint" if has_checkpoint else "the beginning, as no checkpoint was taken yet"
        self._progress.note(f"returning to {place}: {first_line(failure)}")
        return True

    def _fell_back(self, failure: PenstockError, step: int, *, starts_from_it: bool) -> bool:
        """Fall back to the checkpoint before, if the one that the fleet was to start from is damaged. Returns whether
        it did. `step`: the last that was logged. `starts_from_it`: a fleet that was taken over does not."""
        if self._resumed is None or step > self._resumed.step:
            return False
        damage = damage_of(self._resumed, failure, starts_from_it)
        own = fall_back(self._directory, self._config, self._resumed, damage) if damage is not None else None
        if own is not None:
            self._first = own if self._first is self._resumed else self._first
            self._begin_with(own)
        return own is not None

    def _has_own(self) -> bool:
        """Return whether this run has a checkpoint of its own that can be read."""
        with contextlib.suppress(PenstockError):
            return newest(self._directory, self._config) is not None
        return False

    def _return(self) -> None:
        """Set the run's directory back, and choose what the next fleet begins with. Raises what the run returns for
        where that cannot be."""
        try:
            own = rewind(self._directory, self._config)
        except PenstockError as error:
            self._directory.event("return_failed", error=type(error).__name__, message=str(error))
            assert self._cause is not None
            raise self._cause from error
        self._begin_with(own if own is not None else self._first)

    def _begin_with(self, resumed: Checkpoint | None) -> None:
        """Choose what the next fleet goes on from."""
        self._resumed = resumed
        self._namespace = namespace_of(self._directory)
        note_connection(self._directory, self._namespace)

    def _returned(self) -> None:
        step = self._resumed.step if self._resumed is not None else 0
        seconds = self._recoveries.returned(time.monotonic())
        steps, tokens = self._recoveries.time.trained_after(step)
        self._cause = None
        self._directory.event("returned", step=step, seconds=round(seconds, 3), steps_again=steps, tokens_again=tokens)
        self._progress.note(f"goes on after step {step}, {seconds:.1f} s after it was lost")


def _end(logs: Logs, fleet: Fleet) -> None:
    with contextlib.suppress(PenstockError, RayError):  # of a fleet that was never there
        logs.last()
    fleet.close()


def _starting_text(plan: list[ActorPlan], config: RunConfig) -> str:
    roles = {actor.role for actor in plan}
    engine = f"the {config.rollout.engine} engine" + (" (about 30 s)" if config.rollout.engine == "vllm" else "")
    return f"starting {len(plan)} actors" + (f" and {engine}" if "rollout" in roles else "")
