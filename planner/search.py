"""The search for the best plans: memory decides first, then the seconds of a step.

    candidates ─▶ does it fit? ─▶ estimate ─▶ the best of each class ─▶ a table, and why the others lost

A class is what a person would call another way: in turns or apart, how many steps off, GPUs of an engine.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.checks import AUTO
from penstock.conf.errors import ConfigError, PenstockError, ResourceError
from penstock.conf.run import PLANNED, RunConfig, validate
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.configuration.memory_view import check_host
from penstock.orchestrator.configuration.model_shape import ModelShape
from penstock.orchestrator.configuration.run_memory import (
    GIB,
    MOST_TOKENS,
    HostPart,
    RunMemory,
    choose_auto,
    host_parts,
)
from penstock.planner.candidates import SIZES, Candidate, candidates, with_keys
from penstock.planner.cost_model import Efficiencies, RunDurations
from penstock.planner.hardware import KINDS, GpuKind, Nodes
from penstock.planner.lengths import Lengths
from penstock.planner.steady import EngineGroup, Estimate, Workload, estimate

LEAST_GAIN = 0.01
"""Gain in a step that is worth another GPU, or a step more of staleness."""
OFFLOAD = "trainer.offload"
SCORER = "Scorer-"
"""Beginning of a scorer's name among a run's ranks."""
SHORTEST = 1024
"""Tokens of the shortest rows that are named where nothing fits."""
PARTS = (2, 4, 8, 16)
"""Factors by which rows are shortened, or nodes added, where nothing fits."""
NOISE = 0.05
"""Difference between two plans that the cost model cannot tell from none."""


@dataclass(frozen=True)
class Plan:
    """A way that fits, with its seconds."""

    candidate: Candidate
    memory: RunMemory
    found: Estimate
    engines: tuple[EngineGroup, ...]
    ranks: RunDurations
    work: Workload

    @property
    def config(self) -> RunConfig:
        return self.memory.config

    @property
    def step_s(self) -> float:
        return self.found.step_s

    @property
    def name(self) -> tuple[str, int, int]:
        """The class: placement, steps off, GPUs of an engine."""
        config = self.config
        return config.placement, config.max_staleness, config.rollout.tensor_parallel_size

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of 1,000 steps."""
        return 1000 * self.step_s * self.candidate.num_gpus / 3600

    @property
    def cost(self) -> float:
        """Money of 1,000 steps; 0 where the GPUs have no prices."""
        candidate, tensor = self.candidate, self.config.rollout.tensor_parallel_size
        apart = self.config.placement == "disaggregated"
        gpus = [(kind, count * tensor) for kind, count in candidate.engines if apart]
        gpus.append((candidate.ranks, candidate.num_gpus - sum(count for _, count in gpus)))
        return 1000 * self.step_s / 3600 * sum(kind.price * count for kind, count in gpus)

    @property
    def host(self) -> list[HostPart]:
        """Parts of the host memory of the node with the most ranks, largest first."""
        engines = sum(one.count for one in self.engines)
        return _host(self.memory, engines, self.ranks.gpus_per_node, self.ranks.num_nodes)


def _host(memory: RunMemory, num_engines: int, gpus: int, num_nodes: int) -> list[HostPart]:
    """Parts of the host memory of the node with the most ranks, largest first. `gpus`: of that node."""
    config, is_apart = memory.config, memory.config.placement == "disaggregated"
    ranks, scorers = min(config.trainer.num_ranks, gpus), dict[str, int]()
    free = gpus - is_apart * ranks
    for name in (one.removeprefix(SCORER) for one in memory.scorers):
        scorers[name] = min(config.trainer.of_scorer(name).num_ranks, free) if is_apart else ranks
        free -= is_apart * scorers[name]
    counts = {"trainer": ranks, "rollout": min(num_engines, free // config.rollout.tensor_parallel_size), "store": 1}
    actors = [ActorPlan(role, role, rank=rank) for role, count in counts.items() for rank in range(count)]
    actors += [ActorPlan(SCORER, "scorer", stage=stage) for stage, count in scorers.items() for _ in range(count)]
    return host_parts(memory, actors, num_nodes, is_own=False)


@dataclass(frozen=True)
class Refusal:
    """A way that does not fit, and why."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Search:
    """All ways to run something on a cluster."""

    base: RunConfig
    flow: Dataflow
    shapes: dict[str, ModelShape]
    cluster: tuple[Nodes, ...]
    lengths: Lengths
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    link: float | None = None
    """Bytes a second from a node to another, as a run's agents have measured them."""
    given: frozenset[str] = frozenset()
    """Keys that no plan changes."""

    @property
    def cluster_name(self) -> str:
        """The cluster, as `--cluster` has it."""
        return ", ".join(str(nodes) for nodes in self.cluster)

    @cached_property
    def candidates(self) -> list[Candidate]:
        """All ways that are worth an estimate, with the keys that are given."""
        found = candidates(self.base, self.flow, self.shapes, self.cluster)
        return [kept for one in found if (kept := one.keeping(self.base, self.given)) is not None]

    @cached_property
    def plans(self) -> list[Plan]:
        """Those that fit, fastest first; of equal ones that with fewer GPUs, then with less that is out of the
        ordinary."""
        return sorted(self._judged[0], key=_order)

    @cached_property
    def refused(self) -> list[Refusal]:
        return self._judged[1]

    @cached_property
    def _judged(self) -> tuple[list[Plan], list[Refusal]]:
        plans, refused = list[Plan](), list[Refusal]()
        for candidate in self.candidates:
            ways = [candidate]
            for way in ways:
                try:
                    plans.append(plan := self.plan(way))
                except ResourceError as error:
                    refused.append(Refusal(way, str(error)))
                    ways += self._offloaded(way)
                except ConfigError:  # a combination that no run could have
                    break
                else:
                    ways += self._others_like(plan)
        return plans, refused

    def _others_like(self, plan: Plan) -> list[Candidate]:
        """Ways whose micro-batches are larger than a plan's, or that compute less again, for what either costs."""
        way, trainer = plan.candidate, plan.config.trainer
        if trainer.recomputes_layers:
            return self._offloaded(way)
        may_choose = self.base.trainer.activation_checkpointing == AUTO
        return [way.recomputed] * (may_choose and trainer.microbatch_tokens < MOST_TOKENS)

    def _offloaded(self, way: Candidate) -> list[Candidate]:
        return [way.offloaded] * (not way.is_offloaded and OFFLOAD not in self.given)

    def best(self) -> list[Plan]:
        """The best plan of each class: first the most ordinary of the fastest plans of all, then by their seconds the
        most ordinary of the fastest of each other class."""
        found: dict[tuple[str, int, int], list[Plan]] = {}
        for plan in self.plans:
            found.setdefault(plan.name, []).append(plan)
        first = ordinary_first(self.plans)[:1]
        others = [ordinary_first(plans)[0] for name, plans in found.items() if name != first[0].name]
        return [*first, *sorted(others, key=_order)]

    def plan(self, candidate: Candidate) -> Plan:
        """The plan of a candidate. Raises `ResourceError` where it does not fit."""
        memory = self.fitting(candidate)
        ranks = self.durations(memory, candidate.ranks, candidate.ranks)
        engines = tuple(
            EngineGroup(count, self.durations(memory, kind, candidate.ranks), self._slots(memory))
            for kind, count in candidate.engines
        )
        work = self._workload(memory)
        return Plan(candidate, memory, estimate(engines, ranks, work), engines, ranks, work)

    def fitting(self, candidate: Candidate) -> RunMemory:
        """The memory of a candidate. Raises `ResourceError` where it does not fit its GPUs, or a node's host memory."""
        config = candidate.config(self.base)
        validate(config)
        kinds = [candidate.ranks, *(kind for kind, _ in candidate.engines)]
        memory = self.memory(config, min(kinds, key=lambda kind: kind.memory_gib))  # as a run counts it
        memory.check()
        if (total := min(nodes.host_bytes for nodes in self.cluster)) < math.inf:
            engines = sum(count for _, count in candidate.engines)
            check_host(_host(memory, engines, *self._nodes_of(candidate.ranks)), total, "a node has")
        return memory

    def _nodes_of(self, ranks: GpuKind) -> tuple[int, int]:
        """GPUs of a node with ranks, and the number of all nodes."""
        per_node = min(nodes.gpus for nodes in self.cluster if nodes.kind == ranks)
        return per_node, sum(nodes.count for nodes in self.cluster)

    @property
    def fits(self) -> bool:
        """True if some candidate fits its GPUs and its hosts, as it is or offloaded."""
        for candidate in self.candidates:
            for way in (*self._offloaded(candidate), candidate):
                with suppress(ResourceError, ConfigError):
                    self.fitting(way)
                    return True
        return False

    def memory(self, config: RunConfig, kind: GpuKind) -> RunMemory:
        """The memory of a configuration on GPUs of a kind, with what is `auto` chosen, whether it fits or not."""
        return choose_auto(RunMemory(config, self.flow, self.shapes, kind.memory_gib * GIB))

    def durations(self, memory: RunMemory, engines: GpuKind, ranks: GpuKind) -> RunDurations:
        """The cost model of a run with these kinds of GPUs."""
        return RunDurations(memory, engines, ranks, *self._nodes_of(ranks), self.efficiencies, self.link)

    def _slots(self, memory: RunMemory) -> int:
        """Sequences that an engine decodes at a time: as many as it may, and as keys and values have room for."""
        most = memory.config.rollout.max_concurrent_samples
        if memory.engine is None:
            return most
        each = self.lengths.prompt / memory.config.algorithm.group_size + self.lengths.mean_context
        return max(1, min(most, int(memory.engine.cache_tokens / max(1.0, each))))

    def _workload(self, memory: RunMemory) -> Workload:
        config, flow = memory.config, self.flow
        scoring = (stage.name for kind in ("logprobs", "scores") for stage in flow.of_kind(kind))
        stages = [(name, config.trainer.of_scorer(name).num_shares) for name in scoring]
        stages += [(stage.name, config.reward.num_workers) for stage in flow.of_kind("reward")]
        return Workload(
            config.trainer.groups_per_step, flow.samples_per_prompt, self.lengths, config.trainer.num_shares,
            config.max_staleness, config.placement == "colocated", config.trainer.num_minibatches, tuple(stages),
        )  # fmt: skip


def plan_of(search: Search) -> Plan:
    """The plan to run. Raises `ResourceError` where nothing fits, with what would."""
    if search.plans:
        return search.best()[0]
    reasons = [refusal.reason for refusal in search.refused]
    advice = f" The last that was tried: {reasons[-1]}" if reasons else ""
    if would := changes_that_fit(search):
        advice = f" One of these would: {'; '.join(would)}."
    if search.candidates:
        raise ResourceError(f"Nothing fits {search.cluster_name}.{advice}")
    kept = sorted(search.given & {"max_staleness", *PLANNED})
    keys = " ".join(f"{key}={attrgetter(key)(search.base)}" for key in kept)
    raise ResourceError(f"No split of {search.cluster_name} has {keys}.{advice}")


def drop_marginal_engines(search: Search, plan: Plan) -> Plan:
    """The plan without those of its engines that gain less than `LEAST_GAIN` each."""
    while len(plan.engines) == 1 and (count := plan.engines[0].count) > 1 and plan.config.placement == "disaggregated":
        fewer = search.plan(plan.candidate.with_engines(count - 1))
        if "rollout.num_workers" in search.given or fewer.step_s > plan.step_s * (1 + LEAST_GAIN):
            break
        plan = fewer
    return plan


def changes_that_fit(search: Search) -> list[str]:
    """Changes of one thing after which a plan fits, the smallest of each kind: of a key, as on the command line, or of
    the cluster."""
    ways = (*_with_keys(search), *_on_clusters(search))
    fitting = (((text, other) for text, other in one if other.fits) for one in ways)
    return [text for one in fitting for text, _ in islice(one, 1)]


def _with_keys(search: Search) -> Iterator[Iterator[tuple[str, Search]]]:
    """The search with keys that take less memory, by kinds of change."""
    config, rollout = search.base, search.base.rollout
    ways: list[list[dict[str, Any]]] = [[{"trainer.lora.rank": 32}]] * (not config.trainer.lora.rank)
    ways += [[{"max_staleness": 0}]] * (config.max_staleness > 0)
    ways += [[{OFFLOAD: True}]] * (OFFLOAD in search.given and not config.trainer.offload)
    ways += [[{"trainer.activation_checkpointing": True}]] * (config.trainer.activation_checkpointing is False)
    ways += [[{"trainer.activation_offload": True}]] * (not config.trainer.activation_offload)
    ways.append([
        {"rollout.max_model_len": rollout.max_model_len // part,
         "rollout.sampling.max_tokens": rollout.sampling.max_tokens // part}
        for part in PARTS if rollout.max_model_len // part >= SHORTEST
    ])  # fmt: skip
    for changes in ways:
        yield (
            (" ".join(f"{key}={str(value).lower()}" for key, value in keys.items()),
             replace(search, base=with_keys(config, keys)))
            for keys in changes
        )  # fmt: skip


def _on_clusters(search: Search) -> Iterator[Iterator[tuple[str, Search]]]:
    """The search on more nodes, on nodes with more GPUs, and on larger GPUs."""
    first, kinds = search.cluster[0], sorted(KINDS.values(), key=lambda kind: kind.memory_gib)
    for clusters in (
        [replace(first, count=first.count * part) for part in PARTS],
        [replace(first, gpus=gpus) for gpus in SIZES if gpus > first.gpus],
        [replace(first, kind=kind) for kind in kinds if kind.memory_gib > first.kind.memory_gib],
    ):
        yield ((f"a cluster of {nodes}", replace(search, cluster=(nodes,))) for nodes in clusters)


def cheapest(search: Search, hours: float) -> Search:
    """The part of the cluster on which the run's steps cost the least money, or where GPUs have no prices the fewest
    GPU-hours, and take no longer. Raises `ResourceError` where all of it takes longer."""
    steps, found = search.base.trainer.max_steps, list[tuple[float, Search]]()
    for cluster in _parts(search.cluster):
        part = replace(search, cluster=cluster)
        if part.plans and part.plans[0].step_s * steps <= hours * 3600:
            found.append((part.plans[0].cost or part.plans[0].gpu_hours, part))
    if not found:
        least = plan_of(search).step_s * steps / 3600
        raise ResourceError(
            f"--within hours={hours:g}: the fastest plan for trainer.max_steps={steps} takes {least:.1f} hours. Give "
            " it more time, a larger cluster, or fewer steps."
        )
    return min(found, key=lambda one: one[0])[1]


def find_speedups(search: Search) -> list[tuple[str, Plan]]:
    """Find what would make a step faster: another node of the first kind, or one step staler. Each with its best
    plan."""
    best, found = plan_of(search), list[tuple[str, Plan]]()
    staler = replace(search, base=replace(search.base, max_staleness=search.base.max_staleness + 1))
    more = tuple(replace(nodes, count=nodes.count + 1) for nodes in search.cluster[:1]) + search.cluster[1:]
    for what, other in (
        (f"max_staleness={search.base.max_staleness + 1}", staler),
        (f"a cluster of {', '.join(str(nodes) for nodes in more)}", replace(search, cluster=more)),
    ):
        try:
            plan = plan_of(other)
        except PenstockError:
            continue
        if plan.step_s < best.step_s * (1 - LEAST_GAIN):
            found.append((what, plan))
    return found


def _parts(cluster: tuple[Nodes, ...]) -> Iterator[tuple[Nodes, ...]]:
    """The cluster, and parts of it: half of each kind's nodes and so on, one kind alone."""
    yield cluster
    for nodes in cluster:
        count = nodes.count if len(cluster) > 1 else nodes.count // 2
        while count:
            yield (replace(nodes, count=count),)
            count //= 2
    if len(cluster) == 1 and cluster[0].count == 1:
        gpus = cluster[0].gpus // 2
        while gpus:
            yield (replace(cluster[0], gpus=gpus),)
            gpus //= 2


def ordinary_first(plans: Sequence[Plan]) -> list[Plan]:
    """The plans by their seconds, but first the most ordinary of those that are as fast as the fastest, as far as the
    cost model can tell."""
    ordered = sorted(plans, key=_order)
    near = [plan for plan in ordered if plan.step_s <= ordered[0].step_s * (1 + NOISE)]
    first = min(near, key=_oddity, default=None)
    return sorted(ordered, key=lambda plan: plan is not first)


def _order(plan: Plan) -> tuple[float, int, int]:
    """Sort key: seconds, then GPUs, then how much of a plan is out of the ordinary."""
    return round(plan.step_s, 4), plan.candidate.num_gpus, _oddity(plan)


def _oddity(plan: Plan) -> int:
    """How much of a plan is out of the ordinary."""
    config, trainer = plan.config, plan.config.trainer
    split = trainer.tensor_parallel_size + trainer.sequence_ranks + config.rollout.tensor_parallel_size
    return split + config.max_staleness + 4 * trainer.offload + bool(trainer.shard_size)
