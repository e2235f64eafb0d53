"""Trains, from the run's start or from a checkpoint, and returns to the last one where members that are lost cannot be
replaced while the others go on. Used by `run.py`.

    fleet ─▶ controller ─ a failure that a new process may help with ─▶ the fleet ends ─▶ newest checkpoint ─▶ fleet …

What replaces single members is `faults/supervisor.py`; how often a run may return is `faults/recoveries.py`'s to say.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import PenstockError
from penstock.conf.run import RunConfig
from penstock.orchestrator.checkpoint import Checkpoint
from penstock.orchestrator.checkpointing.resuming import newest, rewind
from penstock.orchestrator.cluster import namespace_of
from penstock.orchestrator.controller import Controller, Outcome
from penstock.orchestrator.evaluation import Evaluator, HeldOut
from penstock.orchestrator.failures import first_line
from penstock.orchestrator.faults.causes import is_recoverable
from penstock.orchestrator.faults.recoveries import End, Recoveries
from penstock.orchestrator.fleet import Fleet
from penstock.orchestrator.node_agents import NodeAgents
from penstock.orchestrator.placement.actors import ActorPlan
from penstock.orchestrator.recording.run_directory import RunDirectory
from penstock.orchestrator.reporting.progress import Progress
from penstock.orchestrator.reporting.sinks import Sink
from penstock.orchestrator.reporting.status import note_connection


class Training:
    """Lifecycle: `run` once, connected to Ray."""

    def __init__(
        self,
        config: RunConfig,
        flow: Dataflow,
        plan: list[ActorPlan],
        directory: RunDirectory,
        model_path: str,
        namespace: str,
        progress: Progress,
        resumed: Checkpoint | None = None,
    ) -> None:
        """`namespace`: of the first fleet. `resumed`: what the run goes on from."""
        self._config, self._flow, self._plan = config, flow, plan
        self._directory, self._model_path, self._progress = directory, model_path, progress
        self._namespace, self._resumed, self._first = namespace, resumed, resumed
        self._recoveries = Recoveries(config.faults)

    def run(self, sinks: list[Sink]) -> Outcome:
        """`sinks`: for the numbers. Raises the failure that cannot be recovered from; of a return that fails, the one
        that it was made for."""
        config = self._config
        evaluator = Evaluator(HeldOut.of(config, self._model_path), config) if config.evaluation.every_steps else None
        failure: PenstockError | None = None
        while True:
            with self._fleet(failure) as fleet:
                controller = Controller(
                    fleet, config, self._flow, self._directory, self._progress, sinks, evaluator, self._recoveries
                )
                try:
                    return asyncio.run(controller.run())
                except PenstockError as error:
                    if not self._may_return(error, controller.outcome.num_steps):
                        raise
                    failure = error
            self._return(failure)

    @contextlib.contextmanager
    def _fleet(self, failure: PenstockError | None) -> Iterator[Fleet]:
        """One that has started. `failure`: that the run returns for."""
        agents = NodeAgents(self._directory.run_id, self._namespace, self._config.cluster, self._config.store.spill_dir)
        fleet = Fleet(
            self._plan, self._config, self._flow, self._model_path, self._namespace, agents, resumed=self._resumed
        )
        try:
            self._progress.phase(_starting_text(self._plan, self._config))
            try:
                fleet.create()
                self._directory.event("placed", actors=fleet.reservation.assignment.titles)
                fleet.start()
            except PenstockError as error:
                if failure is None:
                    raise
                self._directory.event("return_failed", error=type(error).__name__, message=str(error))
                raise failure from error
            if failure is not None:
                self._returned()
            yield fleet
        finally:
            self._progress.phase("stopping")
            fleet.close()

    def _may_return(self, failure: PenstockError, step: int) -> bool:
        """Whether the last checkpoint is to be returned to. `step`: the last that was logged."""
        if not is_recoverable(failure):
            return False
        decision = self._recoveries.beyond_help("the run", "", time.monotonic(), step)
        has_checkpoint = self._first is not None or self._has_own()
        if isinstance(decision, End) or not has_checkpoint:
            reason = decision.reason if isinstance(decision, End) else f"{decision.reason}, and there is no checkpoint"
            self._directory.event("given_up", reason=reason)
            return False
        self._directory.event("returning", from_step=step, error=type(failure).__name__, message=str(failure))
        self._progress.note(f"returning to the last checkpoint: {first_line(failure)}")
        return True

    def _has_own(self) -> bool:
        """A checkpoint of this run that can be read."""
        with contextlib.suppress(PenstockError):
            return newest(self._directory, self._config) is not None
        return False

    def _return(self, failure: PenstockError) -> None:
        """Set the run's directory back, and choose what the next fleet begins with. Raises the failure where that
        cannot be."""
        try:
            own = rewind(self._directory, self._config)
        except PenstockError as error:
            self._directory.event("return_failed", error=type(error).__name__, message=str(error))
            raise failure from error
        self._resumed = own if own is not None else self._first
        self._namespace = namespace_of(self._directory.run_id)
        note_connection(self._directory, self._namespace)

    def _returned(self) -> None:
        step = self._resumed.step if self._resumed is not None else 0
        seconds = self._recoveries.returned(time.monotonic())
        self._directory.event("returned", step=step, seconds=round(seconds, 3))
        self._progress.note(f"goes on after step {step}, {seconds:.1f} s after it was lost")


def _starting_text(plan: list[ActorPlan], config: RunConfig) -> str:
    roles = {actor.role for actor in plan}
    engine = f"the {config.rollout.engine} engine" + (" (about 30 s)" if config.rollout.engine == "vllm" else "")
    return f"starting {len(plan)} actors" + (f" and {engine}" if "rollout" in roles else "")
