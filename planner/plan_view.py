"""`penstock plan`: the best plans, and how people read them.

the closed form chooses the first of each class ─▶ the simulator plays them ─▶ a table, why others lost, what would
be better still, the command that runs the best ─▶ `--probe`: measured beside predicted seconds
"""

import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.memory_view import required_host_bytes
from penstock.orchestrator.configuration.run_memory import GIB
from penstock.planner.calibration import (
    Probe,
    calibrated,
    fastest_probe,
    parse_probes,
    probe,
    read_pilot,
    run_in_process,
)
from penstock.planner.candidates import with_keys
from penstock.planner.cost_model import describe_kernel_sources
from penstock.planner.hardware import with_prices
from penstock.planner.lengths import Lengths
from penstock.planner.plan_inputs import (
    nodes_here,
    overrides_of,
    parse_hours,
    search_of,
    uncounted_keys,
    write_overrides,
)
from penstock.planner.search import (
    SCORER,
    Plan,
    Search,
    cheapest,
    find_speedups,
    ordinary_first,
    plan_of,
)
from penstock.planner.simulation import machine
from penstock.planner.simulation.simulated_members import SimulatedSamples
from penstock.planner.simulation.simulation import Simulation, SimulationResult
from penstock.planner.steady import Estimate

PLAYED = 4
"""Plans that are simulated: the closed form rarely ranks the best one lower (docs/planning.md)."""
STEPS = 8
"""Steps that count: more change a mean by less than plans differ."""
MOST_ROWS = 8
WIDTH = 110
"""Columns of the output at least."""
LIMITS = {
    "generation": "engines decide",
    "training": "ranks decide",
    "weights": "the weight sync decides",
    "stages": "rewards or scorers decide",
    "staleness": "the bound on staleness decides",
    "turns": "one after the other",
}


def simulate_plan(plan: Plan, lengths: Lengths, steps: int = STEPS) -> SimulationResult:
    """Simulate a plan for `steps` steps beyond those that fill the pipeline. Raises `SimulationStuck`."""
    config = plan.config
    keys = {
        "trainer.max_steps": steps + config.max_staleness + 1,
        "rollout.max_concurrent_samples": min(one.slots for one in plan.engines),
    }
    engines = [one.durations for one in plan.engines for _ in range(one.count)]
    samples = SimulatedSamples(partial(lengths.of, seed=config.seed), lengths.prompt)
    return Simulation(with_keys(config, keys), plan.ranks, samples, engine_durations=engines).run()


def best_classes(search: Search, num_played: int = PLAYED) -> list[Plan]:
    """The best plan of each class, the best class first: of the first few as the simulator plays them, and the others
    as the closed form has them. Raises `ResourceError` where nothing fits."""
    plan_of(search)
    classes = search.best()
    if search.lengths.turns.count > 1:  # which the simulator does not play
        num_played = 0
    for index, plan in enumerate(classes[:num_played]):
        played = simulate_plan(plan, search.lengths)
        found = replace(plan.found, step_s=played.step_s, tokens_per_s=played.tokens_per_s)
        classes[index] = replace(plan, found=found)
    return ordinary_first(classes[:num_played]) + classes[num_played:]


def run(config: RunConfig, asked: Namespace, console: Console) -> None:
    """Plan what the command line asks for, say it, and write the best plan's keys where they are wanted. Raises
    `ConfigError`, `ResourceError` and `ProbesFailed`."""
    number, deadline_s = parse_probes(asked.probe) if asked.probe else (0, None)
    if number and asked.cluster is not None:
        raise ConfigError(
            f"--probe {asked.probe} runs plans on the cluster at RAY_ADDRESS or on this machine, and --cluster "
            f"{asked.cluster} describes another. Leave one of them out."
        )
    nodes = () if asked.cluster else nodes_here(config.cluster)
    pilot = read_pilot(asked.pilot) if asked.pilot else None
    if pilot is not None and not (pilot.has_gpus or nodes or asked.cluster or asked.within or number):
        chosen = machine.show(machine.CpuMachine.here(pilot, config), console, asked.overrides)
        if asked.write:
            write_overrides(Path(asked.write), chosen)
        return
    search = search_of(config, asked.cluster, asked.lengths, nodes, turns=asked.turns)
    if pilot is not None:
        search = calibrated(search, pilot)
    if asked.price:
        search = replace(search, cluster=with_prices(search.cluster, asked.price))
    if asked.within:
        search = cheapest(search, parse_hours(asked.within))
    classes = best_classes(search)
    chosen = show(search, classes, console, asked.overrides)
    if number:
        place = Path("probes").absolute() / f"{config.recipe_name}-{datetime.now():%Y%m%d-%H%M%S}"
        words = [[*asked.overrides, *overrides_of(search.base, plan.candidate.keys)] for plan in classes[:number]]
        probes = probe(list(zip(classes[:number], words, strict=True)), place, deadline_s, run_in_process, console)
        chosen = print_probes(probes, console)
    if asked.write:
        write_overrides(Path(asked.write), chosen)


def wide_console() -> Console:
    """A console in which no line of the table is cut, whatever the output is."""
    console = Console()
    return console if console.width >= WIDTH else Console(width=WIDTH)


def show(search: Search, classes: Sequence[Plan], console: Console, overrides: Sequence[str]) -> list[str]:
    """Print all of it. `classes`: the best plan of each, fastest first. `overrides`: those that the command was given.
    Returns all of the best plan's."""
    best, most, lengths = classes[0], MOST_ROWS, search.lengths
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(
        f"{len(search.plans)} plans fit {search.cluster_name}, {len(search.refused)} do not. Responses of "
        f"{lengths.mean:,.0f} tokens in the mean, {lengths.quantiles[-1]:,} at most; prompts of {lengths.prompt:,}."
    )
    if (turns := lengths.turns).count > 1:
        say(
            f"An attempt has {turns.count:.1f} turns; before each further one its environment adds {turns.added:,.0f} "
            f"tokens and takes {turns.wait_s:.1f} s, and {turns.reread:.0%} of what was before is read again."
        )
    console.print(table_of(classes[:most]))
    console.print(
        "* of 1,000 steps  ** of engines and of ranks, % of a step  GiB: of a GPU, and of the host of a node",
        style="dim",
        highlight=False,
    )
    say(f"\nThe best is {plan_title(best)}: {step_parts(best)}. {_microbatches(best)}")
    for plan in classes[1:most]:
        say(f"  {plan_title(plan)}: {reason_slower(best, plan)}.")
    if refused := _refused(search):
        say(f"  {refused}")
    for what, plan in find_speedups(search):
        gain = plan_of(search).step_s / plan.step_s
        say(f"With {what} a step would take about {best.step_s / gain:.1f} s ({gain:.2f}x).")
    if line := ipc_line(search, best):
        say(line)
    engines = (
        search.durations(plan.memory, kind, plan.candidate.ranks).engine
        for plan in classes for kind, _ in plan.candidate.engines
    )  # fmt: skip
    say(f"\n{describe_kernel_sources(engines)}")
    played = "The first plans were played by the simulator. Other s" if turns.count <= 1 else "S"
    say(f"{played}econds come from rates on paper and usual shares of them: ratios are truer (docs/planning.md).")
    if keys := uncounted_keys(search.base):
        say(f"Not counted: {', '.join(keys)}. Their seconds are not in the cost model; --probe measures them.")
    chosen = [*overrides, *overrides_of(search.base, best.candidate.keys)]
    say(f"\n{shlex.join(['penstock', 'run', *chosen])}")
    return chosen


def ipc_line(search: Search, plan: Plan) -> str:
    """What handles to GPU memory would gain and cost; nothing where they cannot be."""
    (kind, _), *_ = plan.candidate.engines
    gain = search.durations(plan.memory, kind, plan.candidate.ranks).ipc_gain_s()
    if gain is None:
        return ""
    change = f"save {gain:.1f}" if gain > 0 else f"cost {-gain:.1f}"
    return (
        f"weights.transport=ipc would {change} s a step, and any death of a rank or an engine would be a return to the "
        "checkpoint. So it is taken by name alone."
    )


def print_probes(probes: Sequence[Probe], console: Console) -> list[str]:
    """Print predicted beside measured seconds, and the fastest. Returns all of its overrides."""
    best = fastest_probe(probes)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    console.print(table_of_probes(probes))
    for one in probes:
        if one.failure:
            say(f"  {plan_title(one.plan)}: {one.failure}")
    say(f"\nOf those that were tried the best is {plan_title(best.plan)}: {best.step_s:.1f} s a step.")
    say(f"\n{shlex.join(['penstock', 'run', *best.overrides])}")
    return list(best.overrides)


def table_of_probes(probes: Sequence[Probe]) -> Table:
    """Predicted beside measured seconds of a step."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("probe")
    for column in ("predicted", "measured", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in probes:
        ends = (f"{one.step_s:.1f}", f"{one.step_s / one.plan.step_s:.2f}") if one.step_s else ("failed", "")
        table.add_row(plan_title(one.plan), f"{one.plan.step_s:.1f}", *ends)
    return table


def table_of(plans: Sequence[Plan]) -> Table:
    """A table of plans, one line each."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("way", "engines", "ranks"):
        table.add_column(column, no_wrap=True)
    priced = ["cost*"] if any(plan.cost for plan in plans) else []
    for column in ("s/step", "tok/s", "GPU-h*", *priced, "GiB", "host", "idle**"):
        table.add_column(column, justify="right", no_wrap=True)
    for plan in plans:
        peaks, found = plan.memory.peaks(), plan.found
        table.add_row(
            _way(plan), _engines(plan), _ranks(plan), f"{plan.step_s:.1f}",
            f"{found.tokens_per_s:,.0f}", f"{plan.gpu_hours:,.0f}",
            *(f"{plan.cost:,.0f}" for _ in priced), f"{max(peaks.values()) / GIB:.0f}",
            f"{required_host_bytes(plan.host) / GIB:,.0f}",
            f"{100 * found.engines_idle:.0f} {100 * found.ranks_idle:.0f}",
        )  # fmt: skip
    return table


def plan_title(plan: Plan) -> str:
    """A plan in a few words."""
    return f"{_way(plan)}, engines {_engines(plan)}, ranks {_ranks(plan)}"


def step_parts(plan: Plan) -> str:
    """What a step of the plan consists of, and what decides."""
    parts = [f"{name} {seconds:.1f} s" for name, seconds in _parts(plan.found).items() if seconds >= 0.05]
    return f"{plan.step_s:.1f} s a step ({', '.join(parts)}); {LIMITS[plan.found.limit]}"


def reason_slower(best: Plan, plan: Plan) -> str:
    """Why a plan is slower than the best, in one line."""
    if plan.step_s <= best.step_s:
        return f"{plan.step_s / best.step_s:.2f}x the time: less of a gain than the cost model can tell"
    found, of_best = _parts(plan.found), _parts(best.found)
    if plan.found.limit == "turns" and best.found.limit != "turns":
        idle = f"{plan.found.engines_idle:.0%} of each step and ranks {plan.found.ranks_idle:.0%}"
        what = f"engines are idle {idle}"
    else:
        name = max(found, key=lambda part: found[part] - of_best[part])
        what = f"{name} {found[name]:.1f} s, not {of_best[name]:.1f}"
    return f"{plan.step_s / best.step_s:.2f}x the time: {what}; {LIMITS[plan.found.limit]}"


def _parts(found: Estimate) -> dict[str, float]:
    """Seconds of a step, by what takes them."""
    return {
        "generation": found.rollout_s, "update": found.update_s, "rewards and scorers": found.others_s,
        "weights": found.sync_s, "turns": found.turns_s,
    }  # fmt: skip


def _refused(search: Search) -> str:
    """What most of the ways that do not fit lack."""
    if not search.refused:
        return ""
    first = min(search.refused, key=lambda refusal: refusal.candidate.num_gpus)
    return f"Of those that do not fit, the smallest: {first.reason.partition('`penstock')[0].strip()}"


def _engines(plan: Plan) -> str:
    parts = plan.config.rollout.tensor_parallel_size
    counts = [count for _, count in plan.candidate.engines]
    return "+".join(map(str, counts)) + (f" TP{parts}" if parts > 1 else "")


def _ranks(plan: Plan) -> str:
    trainer = plan.config.trainer
    parts = [str(trainer.num_ranks)]
    parts += [f"by {trainer.shard_size}"] * bool(trainer.shard_size)
    parts += [f"TP{trainer.tensor_parallel_size}"] * (trainer.tensor_parallel_size > 1)
    parts += [f"SP{trainer.sequence_parallel_size}"] * (trainer.sequence_ranks > 1)
    parts += ["offload"] * trainer.offload
    if plan.config.placement == "disaggregated":
        scorers = [name.removeprefix(SCORER) for name in plan.memory.scorers]
        parts += [f"+ {trainer.of_scorer(name).num_ranks} {name}" for name in scorers]
    several = len(plan.candidate.engines) > 1
    return " ".join(parts) + (f" on {plan.candidate.ranks.name}" if several else "")


def _microbatches(plan: Plan) -> str:
    trainer = plan.config.trainer
    kept = "recomputed" if trainer.recomputes_layers else "kept"
    return f"Micro-batches of {trainer.microbatch_tokens:,} tokens, activations {kept}."


def _way(plan: Plan) -> str:
    staleness = plan.config.max_staleness
    if plan.config.placement == "colocated":
        return "colocated"
    return f"apart, {staleness} off" if staleness else "apart, in turns"
