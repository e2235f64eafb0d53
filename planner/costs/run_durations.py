"""Seconds of all that one run does on given kinds of GPUs: `Durations` from the cost model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from penstock.orchestrator.configuration.run_memory import RunMemory
from penstock.planner.costs.decoding import Engine
from penstock.planner.costs.efficiencies import Efficiencies
from penstock.planner.costs.measured import kernels_of
from penstock.planner.costs.training import Rank
from penstock.planner.durations import Sync
from penstock.planner.hardware import GpuKind
from penstock.workers.weights.publication.costs import BUSES, PublicationTimes

REWARD_S = 2e-3
"""Seconds of a reward for a row, by one actor: math-verify on a short answer. Judges and sandboxes take longer, and
wait beside engines rather than before them."""


@dataclass(frozen=True)
class RunDurations:
    """Durations of a run: `memory` has its configuration and its models' sizes."""

    memory: RunMemory
    engines_kind: GpuKind
    ranks_kind: GpuKind
    gpus_per_node: int
    num_nodes: int
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    link: float | None = None
    """Bytes a second from a node to another, as a run's agents have measured them."""

    @cached_property
    def engine(self) -> Engine:
        rollout = self.memory.config.rollout
        cache = str(rollout.engine_options.get("kv_cache_dtype", "auto"))
        element_bytes = 2 if rollout.dtype == "bfloat16" else 4
        cache_bytes = 1 if cache.startswith("fp8") else element_bytes
        shape, kind, parts = self.memory.shapes["policy"], self.engines_kind, rollout.tensor_parallel_size
        kernels = kernels_of(shape, kind, parts, element_bytes, cache_bytes)
        return Engine(shape, kind, self.efficiencies, parts, element_bytes, cache_bytes, kernels)

    @cached_property
    def rank(self) -> Rank:
        return self._rank("policy")

    def prefill_s(self, tokens: int) -> float:
        return self.engine.prefill_s(tokens)

    def decode_s(self, num_sequences: float, context: float) -> float:
        return self.engine.decode_s(num_sequences, context)

    def update_s(self, lengths: Sequence[Sequence[int]]) -> float:
        return max((self.rank.update_s(own) for own in lengths if own), default=0.0) + self._critic_s(lengths)

    def stage_s(self, stage: str, num_rows: int, tokens: int) -> float:
        model = next((one.model for one in self.memory.flow.stages if one.name == stage and one.model), None)
        kind = next((one.kind for one in self.memory.flow.stages if one.name == stage), "")
        if kind in ("logprobs", "scores"):
            name = str(model) if str(model) in self.memory.shapes else "policy"
            return self._rank(name).score_s([tokens // max(1, num_rows)] * num_rows)
        return REWARD_S * num_rows if kind == "reward" else 0.0

    @cached_property
    def way(self) -> PublicationTimes:
        """The way of a version, on each rank's and engine's own bus."""
        config = self.memory.config
        num_bytes, parts = int(self.memory.publication_bytes), config.rollout.tensor_parallel_size
        return PublicationTimes(num_bytes, config.trainer.num_ranks, parts, link=self.link)

    def sync(self) -> Sync:
        bus = self.ranks_kind.bus
        published = self.way.on_one_node_s(bus) if self.num_nodes == 1 else self.way.between_nodes_s(bus)
        waited = self.way.written_s(bus) if self.memory.config.trainer.offload else self.way.taken_s
        return Sync(published, self.way.paused_s(self.engines_kind.bus), waited)

    def turn_s(self) -> float:
        config = self.memory.config
        if config.placement != "colocated":
            return 0.0
        moved = self.memory.resident_bytes / BUSES[self.ranks_kind.bus]
        slept = self.memory.engine.weights / BUSES[self.engines_kind.bus] if self.memory.engine else 0.0
        return moved + slept

    def _rank(self, name: str) -> Rank:
        shape = self.memory.shapes.get(name, self.memory.shapes["policy"])
        return Rank(shape, self.ranks_kind, self.efficiencies, self.memory.config.trainer, self.gpus_per_node)

    def _critic_s(self, lengths: Sequence[Sequence[int]]) -> float:
        """Seconds of the critic's values and update, by the same ranks."""
        if "critic" not in self.memory.ranks:
            return 0.0
        return max((self.rank.update_s(own) + self.rank.score_s(own) for own in lengths if own), default=0.0)
