"""`penstock simulate`: what is asked as a simulation, and its outcome as people read it."""

import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from rich.console import Console

from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import plan_actors
from penstock.orchestrator.cluster.placement.assignment import assign
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.configuration.memory_view import ACCELERATOR
from penstock.planner.calibration import Pilot, calibrated, read_pilot
from penstock.planner.cost_model import describe_kernel_sources
from penstock.planner.durations import ConstantDurations, Durations
from penstock.planner.hardware import GpuKind
from penstock.planner.lengths import Lengths
from penstock.planner.plan_inputs import lengths_of, search_of, uncounted_keys
from penstock.planner.processors import ProcessorDurations
from penstock.planner.search import Search
from penstock.planner.simulation.engines import FleetChanges
from penstock.planner.simulation.machine import CpuMachine
from penstock.planner.simulation.run_files import RunFiles, open_directory
from penstock.planner.simulation.simulated_evaluation import EvaluationPlan, mean_steps
from penstock.planner.simulation.simulated_members import SimulatedSamples
from penstock.planner.simulation.simulation import Simulation, SimulationResult

STEPS = 50
"""Most steps where nobody says: enough for the pipeline to settle."""
MANY_CPUS = 1e6
"""CPUs of a node, so that none is short of them: a cluster is described by its GPUs."""
LEAST_SHARE = 0.005
"""Least share of a side's time that is told."""


def run(written: RunConfig, asked: Namespace, console: Console) -> None:
    """Simulate what the command line asks for, print the outcome, and write the run's files where they are wanted.
    Raises `ConfigError`, `SimulationStuck`."""
    steps = asked.steps or min(STEPS, written.trainer.max_steps)
    if steps < 1:
        raise ConfigError(f"--steps {steps}: must be at least 1.")
    config = replace(written, trainer=replace(written.trainer, max_steps=steps))
    pilot = read_pilot(asked.pilot) if asked.pilot else None
    lengths = pilot.lengths if pilot is not None else lengths_of(config, asked.lengths)
    samples = SimulatedSamples(partial(lengths.of, seed=config.seed), lengths.prompt, asked.dropped)
    changes = parse_changes(asked.faults, asked.join)
    directory, epoch_s = open_directory(config, Path(asked.directory)) if asked.directory else (None, None)
    members = member_durations(config, asked, pilot)
    cores = members.ranks.cores() if isinstance(members.ranks, ProcessorDurations) else None
    evaluation = EvaluationPlan.of(config)
    simulation = Simulation(config, members.ranks, samples, changes, members.engines, cores, epoch_s, evaluation)
    files = RunFiles(simulation, directory) if directory is not None else None
    began = time.monotonic()
    try:
        found = simulation.run()
    finally:
        if files is not None:
            files.close()
    show(config, lengths, found, time.monotonic() - began, console)
    if members.notes:
        console.print(members.notes, highlight=False, markup=False, soft_wrap=True)
    if directory is not None:
        console.print(f"penstock ui {directory.path}", highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True)
class MemberDurations:
    """Durations of a run's members."""

    ranks: Durations
    engines: Sequence[Durations] = ()
    """Durations of each engine, where they are on several kinds of GPUs."""
    notes: str = ""
    """Where kernel times come from."""


def member_durations(config: RunConfig, asked: Namespace, pilot: Pilot | None) -> MemberDurations:
    """The durations of a file, of the cost model on a cluster, with a pilot's factors, or of a pilot on this machine's
    cores. Raises `ConfigError`, and `ResourceError` where the run has no room on a cluster of several kinds of GPUs."""
    if asked.durations is None and asked.cluster is None and pilot is not None and not pilot.has_gpus:
        return MemberDurations(CpuMachine.here(pilot, config).durations(config))
    if (asked.durations is None) == (asked.cluster is None):
        raise ConfigError(
            "nothing says how long things take, or two say so. Give --durations FILE with constants of yours, "
            "--cluster 2x8:h100 for the cost model of penstock plan, or --from RUN, a run on this machine's CPUs "
            "(docs/planning.md)."
        )
    if asked.durations is not None:
        return MemberDurations(ConstantDurations.read(asked.durations))
    search = search_of(config, asked.cluster, asked.lengths)
    if pilot is not None:
        search = calibrated(search, pilot)
    ranks, engines = gpu_kinds_of_members(config, search)
    memory = search.memory(config, ranks)
    of_kind = {kind: search.durations(memory, kind, ranks) for kind in {ranks, *engines}}
    notes = describe_kernel_sources(of_kind[kind].engine for kind in dict.fromkeys(engines or [ranks]))
    if keys := uncounted_keys(config):
        notes += f"\nNot counted: {', '.join(keys)}."
    return MemberDurations(of_kind[ranks], [of_kind[kind] for kind in engines], notes)


def gpu_kinds_of_members(config: RunConfig, search: Search) -> tuple[GpuKind, list[GpuKind]]:
    """The kind of GPUs of the ranks, and that of each engine where there are several: as the run's own placement has
    them. Ranks on several kinds are as slow as the slowest."""
    kinds = {nodes.kind for nodes in search.cluster}
    if len(kinds) == 1:
        return kinds.pop(), []
    nodes, kind_of = list[Node](), dict[str, GpuKind]()
    for nodes_of_kind in search.cluster:
        kind = nodes_of_kind.kind
        for _ in range(nodes_of_kind.count):
            name, labels = f"node-{len(nodes)}", {ACCELERATOR: kind.ray_name or kind.name}
            nodes.append(Node(name, name, f"10.0.0.{len(nodes)}", MANY_CPUS, nodes_of_kind.gpus, labels))
            kind_of[name] = kind
    actors = plan_actors(search.flow, config)
    node_of = assign(actors, nodes, config).node_of
    ranks = {kind_of[node_of[actor.name].id] for actor in actors if actor.role == "trainer"}
    engines = [kind_of[node_of[actor.name].id] for actor in actors if actor.role == "rollout"]
    return min(ranks, key=lambda kind: kind.flops), engines


def parse_changes(faults: str | None, joins: list[str] | None) -> FleetChanges:
    """Read `HOURS` or `HOURS:SECONDS`, and `SECONDS:NUMBER` of each join. Raises `ConfigError`."""
    try:
        hours, _, replaced = (faults or "0").partition(":")
        pairs = [join.partition(":")[::2] for join in joins or ()]
        found = FleetChanges(float(hours) * 3600, float(replaced or 60), tuple((float(at), int(n)) for at, n in pairs))
    except ValueError:
        found = FleetChanges(-1.0)
    if found.mean_s < 0 or found.replaced_s < 0 or any(at < 0 or count < 1 for at, count in found.joins):
        raise ConfigError(
            f"--faults {faults or ''} --join {' '.join(joins or ())}: write hours, or hours and the seconds until "
            "another is there, as in --faults 24:120; and the second at which engines join, with their number, as in "
            "--join 600:4."
        )
    return found


def show(config: RunConfig, lengths: Lengths, found: SimulationResult, took_s: float, console: Console) -> None:
    """Print the outcome. `took_s`: seconds that the simulation took."""
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    engines = f"{config.rollout.least_workers:,} engines, " if found.engines else ""
    say(
        f"{found.num_steps:,} steps by {engines}{config.trainer.num_ranks:,} ranks, max_staleness="
        f"{config.max_staleness}; responses of {lengths.mean:,.0f} tokens in the mean. Simulated in {took_s:.1f} s."
    )
    say(f"seconds a step     {found.step_s:,.2f}")
    say(f"tokens/s           {found.tokens_per_s:,.0f}   samples/s {found.samples_per_s:,.2f}")
    if found.engines:
        say(f"engines            {shares(found.engines)}")
    say(f"ranks              {shares(found.ranks)}")
    rows = sum(found.staleness.values())
    by_age = ", ".join(f"{age}: {count / rows:.1%}" for age, count in found.staleness.items())
    if rows:
        say(f"staleness          {found.staleness_mean:.2f} a token; rows by their oldest token {by_age}")
    if found.dropped:
        say(f"dropped            {', '.join(f'{reason} {count:,}' for reason, count in found.dropped.items())}")
    if found.evaluations:
        say(f"evaluation         {evaluation_cost(config, found)}")
    if found.num_faults:
        say(f"members lost       {found.num_faults:,}")


def evaluation_cost(config: RunConfig, found: SimulationResult) -> str:
    """What an evaluation costs the steps beside it, and how long its result takes."""
    beside, others = mean_steps(found.steps_s, found.evaluations, config.max_staleness + 1)
    took_s = fmean(one.ended - one.due for one in found.evaluations)
    told = [f"a result after {took_s:,.2f} s"]
    told += [f"steps beside it {beside:,.2f} s"] if beside is not None else []
    told += [f"others {others:,.2f} s"] if others is not None else []
    return "; ".join(told)


def shares(found: Mapping[str, float]) -> str:
    """Shares of a side's time, the largest first."""
    told = sorted((item for item in found.items() if item[1] >= LEAST_SHARE), key=lambda item: -item[1])
    return ", ".join(f"{what} {share:.1%}" for what, share in told)
