"""A run from its configuration to its report: what `penstock run` and `penstock.run` do.

Everything that can be wrong without a cluster is checked before one is touched; whatever happens afterwards, the run
directory is left valid and no process is left behind.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from penstock.algorithms.catalogue import dataflow_of
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import PenstockError, TakenOver, is_refusal
from penstock.conf.run import RunConfig, WarmStartConfig
from penstock.network.machine import warning
from penstock.orchestrator.checkpointing.resuming import finished_run, open_run
from penstock.orchestrator.cluster.cluster import Cluster, check_placement, is_elsewhere
from penstock.orchestrator.cluster.placement.actors import ActorPlan, plan_actors
from penstock.orchestrator.cluster.placement.nodes import cluster_nodes, this_node
from penstock.orchestrator.cluster.ray_calls import is_recoverable
from penstock.orchestrator.configuration.completed import completed
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.memory_view import settled, with_memory
from penstock.orchestrator.configuration.validate import check_run, first_runs
from penstock.orchestrator.control.controller import TrainingResult
from penstock.orchestrator.control.lifecycle import RunLifecycle
from penstock.orchestrator.membership.handover import Identity, identity_of
from penstock.orchestrator.membership.takeover import LeftBehind, find
from penstock.orchestrator.observability.reporting.closing import print_unfinished
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.observability.reporting.report import write_report
from penstock.orchestrator.observability.reporting.sinks import Sink, opened_sinks
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.machine.files import sync


@dataclass(frozen=True)
class RunResult:
    """The place and the outcome of a run."""

    directory: Path
    """The run's directory on this machine: the working copy of a run at a URL."""
    outcome: TrainingResult
    seconds: float
    """Seconds that the run took; 0 where nothing was left to do."""
    url: str | None = None
    """The run's URL; None without a URL as output_dir."""

    @property
    def model(self) -> Path:
        """The HF directory of the final weights (`tracking.export_model`)."""
        return self.directory / "model"


def run(
    config: RunConfig, flow: Dataflow | None = None, *, sinks: Sequence[Sink] = (), quiet: bool = False
) -> RunResult:
    """Train. `flow`: a dataflow of the caller's own; None: the one that `config.algorithm` names. `sinks`: further
    places for the metrics, closed at the end. `quiet`: print nothing.

    Raises `ConfigError`, `DataError`, `ModelError`, `ResourceError` or `RunInUse` before any actor starts (and
    `CheckpointError` for a URL that does not answer), and other `PenstockError`s later.
    """
    config = completed(config)
    console = Console(quiet=quiet)
    if (done := finished_run(config)) is not None:
        return _nothing_left(done, console)
    start = time.monotonic()
    flow = dataflow_of(config, flow)
    plan = plan_actors(flow, config)
    tell = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    check_run(config, flow, plan, tell)
    cluster = Cluster(_with_warm_start(plan, config), config)
    try:
        directory, goes_on = open_run(config, partial(_left_behind, config, flow, cluster, tell))
    except BaseException:
        cluster.close()
        raise
    directory.failed_writes.tell_to(tell)
    try:
        with contextlib.closing(cluster):
            cluster.connect(directory)
            check_placement(plan, config)  # now, and not after the runs that come first
            if (told := warning()) is not None:
                tell(told)
            identity = identity_of(config, flow, this_node())
            config = settled(config, flow, plan, cluster_nodes(), tell)
            plan = with_memory(config, flow, plan, cluster_nodes())
            if goes_on is not None:
                before = goes_on.state if isinstance(goes_on, LeftBehind) else goes_on
                model_path, paths = before.model_path, before.model_paths | config.model.paths
                config = replace(config, model=replace(config.model, paths=paths))
            else:
                model_path = starting_model(config, directory)
                config = with_other_models(config, directory, model_path)
            outcome = _train(config, flow, plan, directory, model_path, console, sinks, goes_on, identity)
        directory.event("end", steps=outcome.num_steps, seconds=time.monotonic() - start)
    except TakenOver:
        directory.is_anothers = True
        raise
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt | asyncio.CancelledError)
        if is_refusal(error) and directory.is_unused:
            directory.discard()
            raise
        kind = "interrupted" if interrupted else "failed"
        may_recover = isinstance(error, PenstockError) and is_recoverable(error)
        directory.event(kind, error=type(error).__name__, message=str(error), may_recover=may_recover)
        with contextlib.suppress(OSError):  # a screen that is a file, on the disk that is full
            print_unfinished(config, directory, console)
        raise
    finally:
        _close(directory)
    return RunResult(directory.path, outcome, time.monotonic() - start, directory.url)


def _left_behind(
    config: RunConfig, flow: Dataflow, cluster: Cluster, tell: Callable[[str], None], directory: RunDirectory
) -> LeftBehind | None:
    """The actors that a dead command has left of the run, if any. Raises `ResourceError` if no cluster answers."""
    if not (directory.cluster_file.is_file() and is_elsewhere()):
        return None
    cluster.connect(directory)
    return find(directory, identity_of(config, flow, this_node()), config.faults.lease_s, tell)


def _close(directory: RunDirectory) -> None:
    """Write the report, bring what is missing to the run's URL, and release the directory; only the last, if another
    process has it by now."""
    advice = f"`penstock report {directory.place}` makes it."
    with (
        contextlib.closing(directory),
        contextlib.suppress(PenstockError),
        directory.failed_writes.tolerating("report", advice),
    ):
        if not directory.is_anothers:
            write_report(directory.path)


def _nothing_left(directory: RunDirectory, console: Console) -> RunResult:
    """The result of a finished run, which stays as it is."""
    lines = directory.read_metrics()
    accuracies = [line["accuracy/heldout"] for line in lines if line.get("accuracy/heldout") is not None]
    last = lines[-1] if lines else {}
    outcome = TrainingResult(int(last.get("step", 0)), accuracies, last)
    console.print(
        f"{directory.path.name} has come to its end: {outcome.num_steps} steps. Nothing is left to do; raise "
        "trainer.max_steps to go on.",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    return RunResult(directory.path, outcome, 0.0, directory.url)


def _train(
    config: RunConfig,
    flow: Dataflow,
    plan: list[ActorPlan],
    directory: RunDirectory,
    model_path: str,
    console: Console,
    sinks: Sequence[Sink],
    goes_on: Checkpoint | LeftBehind | None,
    identity: Identity,
) -> TrainingResult:
    """Train, with the run's display and its sinks, which are told how it ends, and closed."""
    progress = ProgressDisplay(config, directory.path.name, console=console, failed_writes=directory.failed_writes)
    directory.failed_writes.tell_to(progress.note)
    lifecycle = RunLifecycle(config, flow, plan, directory, model_path, progress, identity, goes_on)
    with contextlib.closing(progress), opened_sinks(config, directory, sinks) as all_sinks:
        return lifecycle.run(all_sinks)


def starting_model(config: RunConfig, directory: RunDirectory) -> str:
    """The model that training starts from: the given one, the warm start's, or a fresh one."""
    if config.model.path is not None:
        return config.model.path
    if config.warm_start.recipe is not None:
        return _made_by(config.warm_start, "warm_start", config, directory)
    build_fresh_model(directory.initial_model, config.model.fresh, config.seed)
    sync(str(directory.initial_model))
    return str(directory.initial_model)


def with_other_models(config: RunConfig, directory: RunDirectory, model_path: str) -> RunConfig:
    """Make the models of `other_models`, one run after the other, from the model that this run starts from, and note
    where they are."""
    paths = dict(config.model.paths)
    for name, first in config.other_models.items():
        if name not in paths:
            start = [f"model.path={model_path}", "evaluation.every_steps=0"]
            paths[name] = _made_by(first, name, config, directory, start)
    return replace(config, model=replace(config.model, paths=paths))


def _made_by(
    first: WarmStartConfig, name: str, config: RunConfig, directory: RunDirectory, start: Sequence[str] = ()
) -> str:
    """Run a recipe below the run's directory, on the same problems. Returns its model's directory."""
    overrides = [
        f"recipe={first.recipe}", f"seed={config.seed}", f"name={name}", f"output_dir={directory.path}",
        f"evaluation.seed={config.evaluation.seed}", f"evaluation.num_problems={config.evaluation.num_problems}",
        f"cluster.wait_s={config.cluster.wait_s}", *start, *first.overrides,
        *(["resume=auto"] if config.resume == "auto" else []),
    ]  # fmt: skip
    return str(run(load_config(overrides)).model)


def _with_warm_start(plan: list[ActorPlan], config: RunConfig) -> list[ActorPlan]:
    """The plan that a local Ray must hold: the largest of all runs' plans, as they come one after the other."""
    plans = [plan]
    for start in first_runs(config):
        first = load_config([f"recipe={start.recipe}", *start.overrides])
        plans.append(plan_actors(dataflow_of(first), first))
    return max(plans, key=lambda actors: (sum(a.num_gpus for a in actors), sum(a.num_cpus for a in actors)))
