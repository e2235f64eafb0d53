"""What it gains to know that machines differ: the planner's choice against the plan of someone who takes all GPUs for
one kind, played on the nodes as they are.

Who ignores kinds gets ranks on whichever nodes come first, so that both orders are played, and takes all for the kind
with which the plan fits in more of them, then for that with which their mean is better. Ranks that are on several kinds
are as slow as the slowest. Engines share by speed in any case. The bar was written down before: 1.3x on both.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness import Target, new_table, show
from penstock.algorithms.catalogue import dataflow_of
from penstock.conf.errors import PenstockError
from penstock.orchestrator.configuration.compose import load_config
from penstock.planner.candidates import Candidate
from penstock.planner.hardware import GpuKind, Nodes, parse_cluster
from penstock.planner.lengths import Lengths
from penstock.planner.plan_inputs import known_shape
from penstock.planner.plan_view import best_classes, simulate_plan
from penstock.planner.search import Plan, Search

MIXES = ("2x8:h100,2x8:l40s", "2x8:h800,2x8:h20")
MODELS = ("Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-14B")
CAP, MEAN = 8192, 2500.0
LEAST_GAIN = 1.3


def measure(quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    models = MODELS[:1] if quick else MODELS
    return [_compared(mix, model) for mix in MIXES for model in models]


def targets_of(rounds: Sequence[dict[str, Any]]) -> list[Target]:
    return [
        Target(f"{mix}: least gain of knowing kinds", min(gains), "x", ">=", LEAST_GAIN)
        for mix in MIXES
        if (gains := [one["gain"] for one in rounds if one["mix"] == mix])
    ]  # fmt: skip


def show_rounds(rounds: Sequence[dict[str, Any]]) -> None:
    table = new_table("seconds a step, played", ["mix", "model"], ["kinds known", "ignored", "gain"])
    for one in rounds:
        ignored = ", ".join(f"{seconds:.1f}" if seconds else "does not fit" for seconds in one["ignored"])
        table.add_row(one["mix"], one["model"], f"{one['known']:.1f}", ignored, f"{one['gain']:.2f}")
    show(table)


def _compared(mix: str, model: str) -> dict[str, Any]:
    words = [
        "recipe=gsm8k", f"model.path={model}", f"rollout.max_model_len={CAP + 512}", "max_staleness=1",
        f"rollout.sampling.max_tokens={CAP}", "trainer.groups_per_step=64", "algorithm.group_size=16",
    ]  # fmt: skip
    config, shape, cluster = load_config(words), known_shape(model), parse_cluster(mix)
    assert shape is not None
    search = Search(config, dataflow_of(config), {"policy": shape}, cluster, Lengths.lognormal(MEAN, CAP, 0.7))
    known = best_classes(search)[0]
    count, ways = sum(nodes.count for nodes in cluster), []
    for nodes in cluster:
        alike = (Nodes(count, nodes.gpus, nodes.kind),)
        chosen = best_classes(replace(search, cluster=alike))[0]
        ways.append([_as_it_is(search, chosen, order) for order in (cluster, cluster[::-1])])
    ignored = min(ways, key=lambda way: (way.count(None), _mean(way)))
    return {
        "mix": mix, "model": model, "known": known.step_s, "ignored": ignored, "gain": _mean(ignored) / known.step_s,
    }  # fmt: skip


def _mean(ways: Sequence[float | None]) -> float:
    """Mean seconds of the orders that fit."""
    there = [seconds for seconds in ways if seconds is not None]
    return sum(there) / len(there) if there else float("inf")


def _as_it_is(search: Search, plan: Plan, order: Sequence[Nodes]) -> float | None:
    """Seconds of a step of a plan for one kind, on nodes of several, its ranks on those that come first; None where it
    does not fit."""
    left = [nodes.kind for nodes in order for _ in range(nodes.num_gpus)]
    num_ranks, parts = plan.config.trainer.num_ranks, plan.config.rollout.tensor_parallel_size
    if plan.config.placement == "colocated":
        of_ranks, of_engines = left[:num_ranks], left[:num_ranks]
    else:
        of_ranks, of_engines = left[:num_ranks], left[num_ranks:]
    slowest = min(of_ranks, key=lambda kind: kind.flops)
    counts: dict[GpuKind, int] = {}
    for kind in of_engines[::parts]:
        counts[kind] = counts.get(kind, 0) + 1
    keys = tuple((key, value) for key, value in plan.candidate.keys if key != "cluster.labels")
    try:
        found = search.plan(Candidate(keys, tuple(counts.items()), slowest, plan.candidate.num_gpus))
        return simulate_plan(found, search.lengths).step_s
    except PenstockError:
        return None
