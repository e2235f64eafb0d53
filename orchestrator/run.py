"""A run from its configuration to its report: what `penstock run` and `penstock.run` do.

Everything that can be checked without a cluster is checked first. However the run ends, its directory is valid and no
process survives it.
"""

import asyncio
import contextlib
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import PenstockError, TakenOver, is_refusal
from penstock.conf.run import RunConfig, WarmStartConfig
from penstock.network.host import warning
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.nodes import cluster_nodes, this_node
from penstock.orchestrator.cluster.ray_calls import is_recoverable
from penstock.orchestrator.cluster.ray_cluster import Cluster, check_placement, is_elsewhere
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.memory_view import resolve_auto
from penstock.orchestrator.configuration.resolved import ResolvedRun, plan_run, resolve, resolve_first
from penstock.orchestrator.configuration.validate import check_run
from penstock.orchestrator.control.controller import TrainingResult
from penstock.orchestrator.control.lifecycle import RunLifecycle
from penstock.orchestrator.control.process import own_event_loop
from penstock.orchestrator.observability.reporting.closing import print_unfinished
from penstock.orchestrator.observability.reporting.progress import ProgressDisplay
from penstock.orchestrator.observability.reporting.report import write_report
from penstock.orchestrator.observability.reporting.sinks import Sink, opened_sinks
from penstock.orchestrator.recovery.resume import finished_run, open_run
from penstock.orchestrator.recovery.takeover import Identity, OrphanedRun, find_orphan, identity_of
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.runtime.url_files import sync


@dataclass(frozen=True)
class RunResult:
    """The place and the outcome of a run. A notebook shows it with its curves."""

    directory: Path
    """The run's directory on this machine: the working copy of a run at a URL."""
    outcome: TrainingResult
    """`num_steps`, `accuracies` (held-out, from the first to the last) and `last_metrics`."""
    seconds: float
    """Seconds that the run took; 0 where nothing was left to do."""
    url: str | None = None
    """The run's URL; None without a URL as output_dir."""

    @property
    def model(self) -> Path:
        """The HF directory of the final weights (`tracking.export_model`)."""
        return self.directory / "model"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of each step, as metrics.jsonl has them: names such as `reward/mean`, and `step`."""
        return RunDirectory(self.directory).read_metrics()

    def plot(self, *names: str) -> Any:
        """Draw metrics by step, rewards and held-out accuracy unless others are named. Returns matplotlib's figure."""
        from matplotlib.figure import Figure  # late, and not pyplot, which keeps every figure

        figure, lines = Figure(figsize=(6, 3.2), layout="constrained"), self.metrics
        axes = figure.subplots()
        for name in names or ("reward/mean", "accuracy/heldout"):
            if points := [(line["step"], line[name]) for line in lines if line.get(name) is not None]:
                axes.plot(*zip(*points, strict=True), label=name)
        axes.set(xlabel="step", title=self.directory.name)
        axes.legend()
        return figure

    def _repr_html_(self) -> str:
        """The result as a notebook shows it."""
        self.plot().savefig(picture := BytesIO(), format="png")
        told = f"{self.directory.name}: {self.outcome.num_steps} steps in {self.seconds:,.0f} s, model in {self.model}"
        return f'<p>{escape(told)}</p><img src="data:image/png;base64,{b64encode(picture.getvalue()).decode()}">'


@own_event_loop()
def run(
    config: RunConfig, flow: Dataflow | None = None, *, sinks: Sequence[Sink] = (), quiet: bool = False
) -> RunResult:
    """Train. `flow`: a dataflow of the caller's own; None: the one that `config.algorithm` names. `sinks`: further
    places for the metrics, closed at the end. `quiet`: print nothing.

    Raises `ConfigError`, `DataError`, `ModelError`, `ResourceError` or `RunInUse` before any actor starts (and
    `CheckpointError` for a URL that does not answer), and other `PenstockError`s later.
    """
    asked, console = resolve(config, flow), Console(quiet=quiet)
    if (done := finished_run(asked.config)) is not None:
        return _finished_result(done, console)
    start = time.monotonic()
    tell = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    asked = plan_run(asked, tell)
    check_run(asked, tell)
    cluster = Cluster(_largest_plan(asked), asked.config)
    try:
        directory, resume_from = open_run(asked.config, partial(_orphan_of, asked, cluster, tell))
    except BaseException:
        cluster.close()
        raise
    directory.failed_writes.set_printer(tell)
    try:
        with contextlib.closing(cluster):
            cluster.connect(directory)
            check_placement(asked.plan, asked.config)  # now, and not after the runs that come first
            if (told := warning()) is not None:
                tell(told)
            identity = identity_of(asked.config, asked.flow, this_node())
            resolved = with_models(resolve_auto(asked, cluster_nodes(), tell), directory, resume_from)
            outcome = _train(resolved, directory, console, sinks, identity, resume_from)
        directory.event("end", steps=outcome.num_steps, seconds=time.monotonic() - start)
    except TakenOver:
        directory.owned_by_other = True
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
            print_unfinished(asked.config, directory, console)
        raise
    finally:
        _close(directory)
    return RunResult(directory.path, outcome, time.monotonic() - start, directory.url)


def _orphan_of(
    run: ResolvedRun, cluster: Cluster, tell: Callable[[str], None], directory: RunDirectory
) -> OrphanedRun | None:
    """The actors that a dead command has left of the run, if any. Raises `ResourceError` if no cluster answers."""
    if not (directory.cluster_file.is_file() and is_elsewhere()):
        return None
    cluster.connect(directory)
    return find_orphan(directory, identity_of(run.config, run.flow, this_node()), run.config.faults.lease_s, tell)


def _close(directory: RunDirectory) -> None:
    """Write the report, upload what is missing at the run's URL, and release the directory; only the last, if another
    process has it by now."""
    advice = f"`penstock report {directory.place}` makes it."
    with (
        contextlib.closing(directory),
        contextlib.suppress(PenstockError),
        directory.failed_writes.tolerating("report", advice),
    ):
        if not directory.owned_by_other:
            write_report(directory.path)


def _finished_result(directory: RunDirectory, console: Console) -> RunResult:
    """The result of a finished run, which is not changed."""
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
    run: ResolvedRun,
    directory: RunDirectory,
    console: Console,
    sinks: Sequence[Sink],
    identity: Identity,
    resume_from: Checkpoint | OrphanedRun | None,
) -> TrainingResult:
    """Train with the run's display and its sinks, which learn how the run ends, and are closed."""
    progress = ProgressDisplay(run.config, directory.path.name, console=console, failed_writes=directory.failed_writes)
    directory.failed_writes.set_printer(progress.note)
    lifecycle = RunLifecycle(run, directory, progress, identity, resume_from)
    with contextlib.closing(progress), opened_sinks(run.config, directory, sinks) as all_sinks:
        return lifecycle.run(all_sinks)


def with_models(
    run: ResolvedRun, directory: RunDirectory, resume_from: Checkpoint | OrphanedRun | None = None
) -> ResolvedRun:
    """The run with the models that training starts from: those of what it resumes from, or new ones, which are made
    one run after the other."""
    config = run.config
    if resume_from is not None:
        before = resume_from.state if isinstance(resume_from, OrphanedRun) else resume_from
        model_path, paths = before.model_path, before.model_paths | config.model.paths
    else:
        model_path, paths = _starting_model(config, directory), dict(config.model.paths)
        start = [f"model.path={model_path}", "evaluation.every_steps=0"]
        for name, first in config.other_models.items():
            if name not in paths:
                paths[name] = _run_warm_start(first, name, config, directory, start)
    return replace(run, config=replace(config, model=replace(config.model, paths=paths)), model_path=model_path)


def _starting_model(config: RunConfig, directory: RunDirectory) -> str:
    """The model that training starts from: the given one, the warm start's, or a fresh one."""
    if config.model.path is not None:
        return config.model.path
    if config.warm_start.recipe is not None:
        return _run_warm_start(config.warm_start, "warm_start", config, directory)
    build_fresh_model(directory.initial_model, config.model.fresh, config.seed)
    sync(str(directory.initial_model))
    return str(directory.initial_model)


def _run_warm_start(
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


def _largest_plan(run: ResolvedRun) -> list[ActorPlan]:
    """The plan that a local Ray must hold: the largest of all runs' plans, as they come one after the other."""
    plans = [run.plan, *(resolve_first(first).plan for first in run.first_runs)]
    return max(plans, key=lambda actors: (sum(a.num_gpus for a in actors), sum(a.num_cpus for a in actors)))
