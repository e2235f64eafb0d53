"""Ways to split a cluster between engines and ranks. Pure.

    engines   how many, and how many GPUs each is split over        never across nodes
    ranks     how many, on one kind of GPU; shards, tensor and sequence parallelism
    both      on the same GPUs in turns, or on their own, up to `max_staleness` steps apart

A candidate is the keys that make it, so that it can be written down and run. More engines are never worse: what the
ranks leave is theirs.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.checks import AUTO
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.memory_view import ACCELERATOR, GPU_GIB
from penstock.orchestrator.configuration.model_shape import ModelShape
from penstock.planner.hardware import GpuKind, Nodes

SIZES = (1, 2, 4, 8)
"""Sizes of tensor and sequence parallelism that are tried."""
MOST_SPLITS = 24
"""Most numbers of ranks that are tried on one kind of GPU."""
SCORER_RANKS = "trainer.scorer_ranks"
"""Key of which candidates keep the numbers that are given."""
SCORING = (1.0, 0.25)
"""Shares of the trainer's ranks that a scorer as large as the policy is tried with, where it has GPUs of its own. Its
forward pass takes a quarter of an update. A larger one gets as many times more ranks, a smaller one fewer."""
ON_GPUS: Mapping[str, Any] = {
    "rollout.engine": "vllm", "rollout.dtype": "bfloat16", "rollout.enforce_eager": False, "trainer.dtype": "bfloat16",
    "plan": "never",
}  # fmt: skip
"""Keys of every plan on GPUs; a run that is given them is not planned again."""


@dataclass(frozen=True)
class Candidate:
    """One way, before its memory and its seconds are known."""

    keys: tuple[tuple[str, Any], ...]
    """Keys that differ from the run's configuration, with their values."""
    engines: tuple[tuple[GpuKind, int], ...]
    """Numbers of engines on each kind of GPU."""
    ranks: GpuKind
    num_gpus: int
    """GPUs that it uses."""

    @property
    def is_offloaded(self) -> bool:
        return bool(dict(self.keys)["trainer.offload"])

    @property
    def offloaded(self) -> "Candidate":
        """The same with weights and optimizer in host memory."""
        return self._with("trainer.offload")

    @property
    def recomputed(self) -> "Candidate":
        """The same with activations computed again, so that micro-batches may be larger."""
        return self._with("trainer.activation_checkpointing")

    def with_engines(self, count: int) -> "Candidate":
        """The same with `count` engines, all on one kind of GPU."""
        ((kind, number),), own = self.engines, dict(self.keys)
        saved = (number - count) * own["rollout.tensor_parallel_size"] * (own["placement"] == "disaggregated")
        keys = tuple((own | {"rollout.num_workers": count}).items())
        return replace(self, keys=keys, engines=((kind, count),), num_gpus=self.num_gpus - saved)

    def keeping(self, base: RunConfig, given: Collection[str]) -> "Candidate | None":
        """The same with the run's own values of keys that no plan changes. None where it would be another split."""
        found = self
        for key, value in self.keys:
            if key == SCORER_RANKS or not any(one == key or one.startswith(f"{key}.") for one in given):
                continue
            wanted = attrgetter(key)(base)
            if key in ON_GPUS or key == "trainer.offload" or wanted == AUTO:
                found = replace(found, keys=tuple((dict(found.keys) | {key: wanted}).items()))
            elif key == "rollout.num_workers" and len(self.engines) == 1 and 0 < wanted < value:
                found = found.with_engines(wanted)
            elif wanted != value:
                return None
        return found

    def _with(self, key: str) -> "Candidate":
        return replace(self, keys=tuple((dict(self.keys) | {key: True}).items()))

    def config(self, base: RunConfig) -> RunConfig:
        """The configuration with these keys. Raises `ConfigError` for what does not go together."""
        config: RunConfig = with_keys(base, dict(self.keys))
        return config


def candidates(
    base: RunConfig, flow: Dataflow, shapes: Mapping[str, ModelShape], cluster: Sequence[Nodes]
) -> Iterator[Candidate]:
    """All ways that are worth an estimate. `shapes`: of the policy, and of scorers by their models' names."""
    shape = shapes["policy"]
    scorers = {
        stage.name: shapes.get(str(stage.model), shape).num_parameters / shape.num_parameters for stage in flow.scorers
    }
    for own in cluster:
        yield from _apart(base, shape, cluster, own, scorers)
        yield from _together(base, shape, cluster, own, scorers)


def _apart(
    base: RunConfig, shape: ModelShape, cluster: Sequence[Nodes], own: Nodes, scorers: Mapping[str, float]
) -> Iterator[Candidate]:
    """Engines, ranks and scorers on GPUs of their own. `own`: the nodes of ranks and scorers."""
    even, least = own.num_gpus // (1 + len(scorers)), max(1, len(base.trainer.own_models))
    numbers = {*_numbers(own.num_gpus - len(scorers), own.gpus), *_numbers(even, own.gpus)}
    for num_ranks in sorted(_given_ranks(base) or numbers):
        ways = [
            (split, scoring) for split in _splits(base, shape, num_ranks, own.gpus)
            for scoring in _scoring(base, scorers, num_ranks, split)
        ]  # fmt: skip
        for parts in SIZES:
            for split, scoring in ways:
                used = num_ranks + sum(scoring.values())
                engines = _engines(cluster, own, used, parts, shape) if used <= own.num_gpus else ()
                if (count := sum(number for _, number in engines)) < least:
                    continue
                for staleness in range(base.max_staleness + 1):
                    keys = {
                        "placement": "disaggregated", "max_staleness": staleness, "rollout.num_workers": count,
                        "rollout.tensor_parallel_size": parts, "rollout.num_gpus_per_worker": 1.0,
                        "trainer.num_ranks": num_ranks, "trainer.num_gpus_per_rank": 1.0, **split, **ON_GPUS,
                    }  # fmt: skip
                    if not base.trainer.num_scorer_ranks and any(ranks != num_ranks for ranks in scoring.values()):
                        keys[SCORER_RANKS] = scoring
                    keys |= _placed(base, cluster, own.kind, engines, scorers)
                    yield Candidate(tuple(keys.items()), engines, own.kind, used + count * parts)


def _scoring(
    base: RunConfig, scorers: Mapping[str, float], num_ranks: int, split: Mapping[str, Any]
) -> list[dict[str, int]]:
    """Numbers of ranks of all scorers that are tried beside so many of the trainer, without those that are given.
    `scorers`: sizes, by the policy's."""
    sequence = split["trainer.sequence_parallel_size"]
    each = split["trainer.tensor_parallel_size"] * (1 if sequence == AUTO else sequence)
    given = {name: base.trainer.scorer_ranks.get(name, base.trainer.num_scorer_ranks) for name in scorers}
    found = [
        {name: given[name] or each * math.ceil(share * size * num_ranks / each) for name, size in scorers.items()}
        for share in SCORING
    ]  # fmt: skip
    found.insert(0, {name: given[name] or num_ranks for name in scorers})
    return [one for index, one in enumerate(found) if one not in found[:index]]


def _together(
    base: RunConfig, shape: ModelShape, cluster: Sequence[Nodes], own: Nodes, scorers: Mapping[str, float]
) -> Iterator[Candidate]:
    """Engines, ranks and their scorers on the same GPUs in turns. `own`: the nodes that have them."""
    num_ranks = own.num_gpus
    if {num_ranks} != (_given_ranks(base) or {num_ranks}):
        return
    for parts in SIZES:
        if num_ranks // parts < len(base.trainer.own_models):
            break
        if num_ranks % parts or not _can_split(shape, parts, own.gpus):
            continue
        engines = ((own.kind, num_ranks // parts),)
        for split in _splits(base, shape, num_ranks, own.gpus):
            keys = {
                "placement": "colocated", "max_staleness": 0, "rollout.num_workers": num_ranks // parts,
                "rollout.tensor_parallel_size": parts, "rollout.num_gpus_per_worker": 0.5,
                "trainer.num_ranks": num_ranks, "trainer.num_gpus_per_rank": 0.5, **split, **ON_GPUS,
                **_placed(base, cluster, own.kind, engines, scorers),
            }  # fmt: skip
            yield Candidate(tuple(keys.items()), engines, own.kind, num_ranks)


def _given_ranks(base: RunConfig) -> set[int]:
    """The number of ranks where policies have ranks of their own; else empty, for any."""
    return {base.trainer.num_ranks} if base.trainer.policy_ranks else set()


def _placed(
    base: RunConfig,
    cluster: Sequence[Nodes],
    ranks: GpuKind,
    engines: Sequence[tuple[GpuKind, int]],
    scorers: Collection[str],
) -> dict[str, Any]:
    """Keys that hold each role that is on one kind of GPU to its nodes, where there are others, and that say how much
    memory GPUs have of whose kind a run does not know it."""
    keys = dict[str, Any]()
    if len({nodes.kind for nodes in cluster}) > 1:
        kinds = {"trainer": ranks} | ({"scorer": ranks} if scorers else {})
        kinds |= {"rollout": engines[0][0]} if len(engines) == 1 else {}
        labels = {role: {ACCELERATOR: kind.ray_name or kind.name} for role, kind in kinds.items()}
        keys["cluster.labels"] = base.cluster.labels | labels
    used = [ranks, *(kind for kind, _ in engines)]
    if base.cluster.gpu_memory_gib is None and any(kind.ray_name not in GPU_GIB for kind in used):
        keys["cluster.gpu_memory_gib"] = min(kind.memory_gib for kind in used)
    return keys


def _splits(base: RunConfig, shape: ModelShape, num_ranks: int, gpus_per_node: int) -> Iterator[dict[str, Any]]:
    """Ways to split the model and its rows over ranks."""
    by_length = base.trainer.splits_by_length
    for tensor in SIZES:
        for sequence in (AUTO,) if by_length else SIZES:
            ranks_per_row = tensor if isinstance(sequence, str) else tensor * sequence
            if num_ranks % ranks_per_row or not _can_split(shape, ranks_per_row, gpus_per_node):
                continue
            for shards in (0, gpus_per_node):
                if shards and (num_ranks <= shards or num_ranks % shards):
                    continue
                yield {
                    "trainer.tensor_parallel_size": tensor, "trainer.sequence_parallel_size": sequence,
                    "trainer.shard_size": shards, "trainer.offload": False,
                }  # fmt: skip


def _engines(
    cluster: Sequence[Nodes], own: Nodes, used: int, parts: int, shape: ModelShape
) -> tuple[tuple[GpuKind, int], ...]:
    """Engines of `parts` GPUs on the GPUs that ranks do not use, by kind."""
    found = []
    for nodes in cluster:
        if not _can_split(shape, parts, nodes.gpus):
            continue
        taken = used if nodes is own else 0
        whole, rest = divmod(taken, nodes.gpus)
        left = [nodes.gpus] * (nodes.count - whole)
        if rest:
            left[0] -= rest
        if number := sum(free // parts for free in left):
            found.append((nodes.kind, number))
    return tuple(found)


def _can_split(shape: ModelShape, parts: int, gpus_per_node: int) -> bool:
    heads = shape.kv_heads
    return parts <= gpus_per_node and shape.heads % parts == 0 and (heads % parts == 0 or parts % heads == 0)


def _numbers(most: int, gpus_per_node: int) -> list[int]:
    """Numbers of ranks to try: all within a node, then whole nodes, some of them where there are many."""
    within = [number for number in range(1, min(most, gpus_per_node) + 1) if number in SIZES or most <= gpus_per_node]
    whole = list(range(2 * gpus_per_node, most + 1, gpus_per_node))
    step = max(1, -(-len(whole) // MOST_SPLITS))
    return within + whole[::step]


def with_keys(config: Any, keys: Mapping[str, Any]) -> Any:
    """A configuration with the values of dotted keys. Raises `ConfigError` as a section does that refuses its value."""
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in keys.items():
        first, _, rest = key.partition(".")
        if rest and is_dataclass(getattr(config, first)):
            inner.setdefault(first, {})[rest] = value
        else:
            own[key] = value
    for first, values in inner.items():
        own[first] = with_keys(getattr(config, first), values)
    assert own.keys() <= {one.name for one in fields(config)}
    return replace(config, **own)
