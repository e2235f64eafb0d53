"""Trains: starts a fleet, or takes one over, and has a controller drive it. Where no restart can help, the run returns
to its last checkpoint (to its beginning, if none was taken yet).

    fleet ─▶ controller ─ a failure that a new process may help with ─▶ the fleet ends ─▶ newest checkpoint ─▶ fleet …

`recovery/restart.py` replaces single members; `recovery/resume.py` decides about returns.

Before the first step a new fleet tries what its nodes can do. `try_fences` tries the sandbox for code of models, where
the cluster was there before the run. `try_threads` finds numbers of CPU threads for engines and ranks that share the
cores of a node and run at the same time:

    an engine's decode steps ─┐
                              ├─ seconds a token, by threads ─▶ placement/threads.py: best ─▶ use_threads, threads.json
    the ranks' micro-batch   ─┘

No other process computes meanwhile, and nothing that is tried is trained. A run that is resumed keeps what was found.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial

from penstock.conf.errors import PenstockError, TakenOver
from penstock.conf.run import RunConfig
from penstock.conf.weights import takes_newcomers
from penstock.metering.meters import Meters
from penstock.metering.ray_export import exporting
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.node_agents import NodeAgents
from penstock.orchestrator.cluster.owners import Owner, RunOwner
from penstock.orchestrator.cluster.placement.actors import (
    DRIVER,
    ActorPlan,
    answers_are_needed,
    needed,
    origin_of,
)
from penstock.orchestrator.cluster.placement.threads import (
    SharedNode,
    Trial,
    are_tried,
    best,
    counts_to_try,
    read_trials,
    shared_nodes,
    write_trials,
)
from penstock.orchestrator.cluster.ray_calls import get_all, get_from_all, is_recoverable
from penstock.orchestrator.cluster.ray_cluster import (
    is_elsewhere,
    is_over,
    namespace_of,
    raise_if_over,
    while_it_lives,
)
from penstock.orchestrator.cluster.ray_connection import note_connection
from penstock.orchestrator.configuration.prerequisites import limits_of_code
from penstock.orchestrator.configuration.resolved import ResolvedRun
from penstock.orchestrator.control import process
from penstock.orchestrator.control.controller import Controller, TrainingResult
from penstock.orchestrator.control.evaluation import Evaluator
from penstock.orchestrator.control.turns import thread_calls
from penstock.orchestrator.observability.actor_logs import Logs, end_fleet
from penstock.orchestrator.observability.manifest import ManifestWriter
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.observability.reporting.sinks import Sink
from penstock.orchestrator.recovery.decisions import RunFaults
from penstock.orchestrator.recovery.ended_ranks import naming_failures
from penstock.orchestrator.recovery.resume import CheckpointReturn
from penstock.orchestrator.recovery.takeover import (
    Handover,
    Identity,
    OrphanedRun,
    RunState,
    TakeoverPoint,
    pack,
    settle_ranks,
)
from penstock.orchestrator.run_context import RunContext
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.sandbox.execution import Limits


class RunLifecycle:
    """Lifecycle: `run` once, connected to Ray."""

    def __init__(
        self,
        run: ResolvedRun,
        directory: RunDirectory,
        progress: ProgressDisplay,
        identity: Identity,
        resume_from: Checkpoint | OrphanedRun | None = None,
    ) -> None:
        """`identity`: that of a command that may continue the run."""
        self._config, self._flow, self._plan, self._model_path = run.config, run.flow, run.plan, run.model_path
        self._directory, self._progress, self._identity = directory, progress, identity
        orphan = resume_from if isinstance(resume_from, OrphanedRun) else None
        self._orphan = orphan
        """Actors of a command that has died, until they are taken over."""
        self._namespace = orphan.state.namespace if orphan is not None else namespace_of(directory)
        self._faults = RunFaults(run.config.faults)
        self._wanted: dict[str, int] = dict(orphan.state.wanted) if orphan is not None else {}
        """Numbers of members that people have asked for, by role."""
        resumed = resume_from.state.resumed if isinstance(resume_from, OrphanedRun) else resume_from
        self._return = CheckpointReturn(
            directory, run.config, progress.note, self._faults, resumed, has_started=orphan is not None
        )

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
            step, is_preempted = 0, False
            try:
                orphan, self._orphan = self._orphan, None
                with self._fleet(orphan) as fleet:
                    taken = self._take_over(fleet, orphan) if orphan is not None else None
                    context = RunContext.of(config, fleet, self._directory, self._progress)
                    controller = Controller(
                        context, sinks, evaluator, self._faults, self._wanted, self._handover(fleet), taken, meters
                    )
                    try:
                        return process.run(controller.run(), raise_if_over)
                    finally:
                        step, is_preempted = controller.outcome.num_steps, controller.is_preempted
            except PenstockError as error:
                if is_preempted and is_recoverable(error):
                    raise KeyboardInterrupt from error
                self._return.after(error, step, has_read_checkpoint=orphan is None)
            self._namespace = namespace_of(self._directory)
            note_connection(self._directory, self._namespace)

    @contextlib.contextmanager
    def _fleet(self, orphan: OrphanedRun | None) -> Iterator[Fleet]:
        """A fleet that serves: the orphaned one, or a new one."""
        config, owner = self._config, orphan.owner if orphan is not None else self._new_owner()
        spill_dir = config.store.spill_dir
        agents = NodeAgents(self._directory.full_name, self._namespace, config.cluster, spill_dir, owner)
        fleet = Fleet(
            self._plan, config, self._flow, self._model_path, agents, resumed=self._return.resumed,
            trials=read_trials(self._directory),
        )  # fmt: skip
        logs, is_taken = Logs(fleet, self._directory), False
        try:
            if orphan is not None:
                fleet.take_over(orphan.state.fleet, orphan.handles)
                yield fleet
                return
            self._progress.phase(_starting_text(self._plan, self._config))
            began = time.monotonic()
            fleet.create(self._progress.phase)
            cpus, gpus = needed(self._plan)
            self._directory.event("placed", actors=fleet.reservation.assignment.titles, cpus=cpus, gpus=gpus)
            logs.meet(config.rollout.start_timeout_s)
            if is_elsewhere() and (all_limits := limits_of_code(config)):
                for held in try_fences(fleet, all_limits):
                    self._progress.note(held)
            with naming_failures(fleet, self._directory):
                fleet.start()
            try_threads(fleet, self._directory)
            self._directory.event("serving", seconds=round(time.monotonic() - began, 3))
            self._return.done()
            with ManifestWriter(fleet, self._config, self._model_path, self._directory).writing():
                yield fleet
        except TakenOver:
            is_taken = True
            raise
        except PenstockError as error:  # which may come of a refusal: the store's comes as a `StoreError`
            try:
                owner.confirm()
            except TakenOver as refusal:
                is_taken = True
                raise refusal from error
            raise
        finally:
            self._progress.phase("stopping")
            if is_taken or is_over():
                fleet.detach()
            else:
                while_it_lives(partial(end_fleet, fleet, logs))

    def _new_owner(self) -> Owner:
        """The owner of the next fleet."""
        if self._config.faults.lease_s and is_elsewhere() and takes_newcomers(self._config):
            timeout_s = self._config.rollout.start_timeout_s
            return RunOwner.start(self._namespace, self._config.faults.lease_s, timeout_s)
        return Owner()

    def _handover(self, fleet: Fleet) -> Handover:
        """The handover of a fleet to a command that may come after this one."""
        resumed, namespace, paths = self._return.resumed, self._namespace, dict(self._config.model.paths)

        def describe(owner: RunOwner) -> bytes:
            state = RunState(namespace, self._model_path, paths, resumed, dict(self._wanted), fleet.state(owner))
            return pack(self._identity, state)

        return Handover(fleet.owner, describe)

    def _take_over(self, fleet: Fleet, orphan: OrphanedRun) -> TakeoverPoint:
        """The point at which the command before has stopped, with its ranks idle. Raises what the store fails with."""
        self._progress.phase("taking over the actors of the command before")
        began = time.monotonic()
        step = asyncio.run(settle_ranks(fleet, orphan.reports))
        seconds = time.monotonic() - began
        self._directory.event("serving", seconds=round(seconds, 3))
        self._progress.note(
            f"continues after step {step} with the actors of the command before, which has been silent for "
            f"{orphan.silent_s:.0f} s"
        )
        return TakeoverPoint.of(step, orphan.reports, self._directory.read_metrics())


def _starting_text(plan: list[ActorPlan], config: RunConfig) -> str:
    roles = {actor.role for actor in plan}
    seconds = config.rollout.capabilities.start_s
    engine = f"the {config.rollout.engine} engine" + (f" (about {seconds:g} s)" if seconds else "")
    return f"starting {len(plan)} actors" + (f" and {engine}" if "rollout" in roles else "")


PHASE = "trying numbers of threads"
RUN_CODE = ("reward", "environment")
"""Roles that run code."""


def try_threads(fleet: Fleet, directory: RunDirectory) -> None:
    """Try, and use what is found. Raises what an engine or a rank fails with, `DeadlineExceeded`."""
    if not are_tried(fleet.config):
        return
    found = shared_nodes(fleet.plan, fleet.reservation.assignment, fleet.cores)
    for node, members in found.items():
        if node not in fleet.trials:
            fleet.trials[node] = _try_thread_counts(fleet, node, members)
    if found:
        get_all(thread_calls(fleet), phase=PHASE, timeout_s=fleet.config.rollout.start_timeout_s)
        write_trials(directory, fleet.trials)


def _try_thread_counts(fleet: Fleet, node: SharedNode, members: Sequence[ActorPlan]) -> Trial:
    """Try on one node. `members`: an engine, and the ranks there. Ranks on other nodes compute along, as always."""
    engine, ranks = members[0], members[1:]
    config, timeout_s = fleet.config, fleet.config.rollout.start_timeout_s
    groups = (config.max_staleness + 1) * config.trainer.groups_per_step // len(fleet.role("rollout"))
    counts = counts_to_try(config.rollout.num_threads, node.cores)
    one = [(engine.name, fleet.actors[engine.name])]
    (engine_s,) = get_from_all(one, "try_threads", counts, groups, phase=PHASE, timeout_s=timeout_s)
    counts, all_ranks = counts_to_try(config.trainer.num_threads, node.cores), fleet.role("trainer")
    found = get_from_all(all_ranks, "try_threads", counts, phase=PHASE, timeout_s=timeout_s)
    answers = dict(zip((name for name, _ in all_ranks), found, strict=True))
    rank_s = {count: max(answers[rank.name][count] for rank in ranks) for count in counts}
    return Trial(best(node, engine_s, rank_s), engine_s, rank_s)


def try_fences(fleet: Fleet, all_limits: Sequence[Limits]) -> list[str]:
    """Try the sandbox. Returns a line for all nodes on which the same holds. Raises `SandboxUnavailable` naming a node,
    `DeadlineExceeded`."""
    timeout_s = fleet.config.rollout.start_timeout_s
    facts, members = fleet.agents.facts(timeout_s), fleet.agents.members
    homes = [fleet.node_of(name) for role in RUN_CODE for name, _ in fleet.role(role)]
    nodes = [node for node in dict.fromkeys(homes) if node in members]
    agents, phase = [members[node] for node in nodes], "trying the sandbox"
    hosts: dict[str, list[str]] = {}
    for node, held in zip(
        nodes, get_from_all(agents, "try_fences", all_limits, phase=phase, timeout_s=timeout_s), strict=True
    ):
        hosts.setdefault(held, []).append(facts[node].host)
    return [f"sandbox on {', '.join(names)}: {held}" for held, names in hosts.items()]
