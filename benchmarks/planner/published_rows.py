"""Measurements that others have published (`published.yaml`), as rows that the cost model predicts.

A row of a trainer is an update of two rows a GPU; a row of a run is a step. Another system's ways are said in terms of
this one's, and what it alone has is counted here, as no run of Penstock can have it:

    pipeline   a stage has its part of the layers, and waits for the others while the pipeline fills and drains
    context    tokens of a row are split over ranks, as sequence parallelism does
    experts    of a layer are split over ranks; tokens between nodes cross the network, forward, again where layers are
               recomputed, and backward
    Megatron   ranks keep their weights; what is computed besides the update the ranks do after it
    engines    that are split over several nodes reduce over the network

Where the mean length of responses is not told, the first row of a model, a cap and a placement says it, and is no row
itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from penstock.conf.rollout import QUANTIZED_ONLINE, Precision
from penstock.conf.trainer import LoraConfig, TrainerConfig
from penstock.orchestrator.configuration.measured_shape import measured_shape
from penstock.orchestrator.configuration.model_shape import ModelShape
from penstock.planner.cost_model import Efficiencies, EngineCosts, RankCosts, kernels_of
from penstock.planner.durations import SyncSeconds
from penstock.planner.hardware import KINDS
from penstock.planner.lengths import Lengths
from penstock.planner.plan_inputs import known_shape
from penstock.planner.steady import EngineGroup, Workload, estimate

FILE = Path(__file__).with_name("published.yaml")
SLOTS = 256
"""Sequences that an engine decodes at a time: vLLM's default."""
DOMAINS = {"gb200": 72}
"""GPUs that NVLink joins, where they are more than 8."""
MADE = {"deepseek-ai/DeepSeek-V3": "deepseek_v3"}
"""Models that are the default of their kind in transformers."""
TRANSFERS, SCORING_TRANSFERS = 6, 2
"""Times that a token goes to its experts or comes back: in an update whose layers are recomputed, and in a forward
pass."""


@dataclass(frozen=True)
class Row:
    """A measurement."""

    system: str
    name: str
    measured: float
    predict: Callable[[Efficiencies, bool], float]
    """Seconds by the cost model; true: in lockstep."""
    gpus: int
    """1 of trainers, whose work grows with their GPUs."""
    workload: str
    """Rows of one workload are plans for the same."""


@dataclass(frozen=True)
class Durations:
    """Durations of a run that another system has made. What it computes besides the update, the ranks do."""

    engine: EngineCosts
    rank: RankCosts
    scored: int
    stages: int = 1
    """Number of stages of a rank's pipeline."""
    transfer_s: float = 0.0
    """Seconds in which a token of a rank's rows goes from one node to experts on another, in all layers of a stage."""

    def prefill_s(self, tokens: int) -> float:
        return self.engine.prefill_s(tokens)

    def decode_s(self, num_sequences: float, context: float) -> float:
        return self.engine.decode_s(num_sequences, context)

    def update_s(self, lengths: Sequence[Sequence[int]]) -> float:
        return max(self._passes_s(own) for own in lengths)

    def _passes_s(self, own: Sequence[int]) -> float:
        transfers = TRANSFERS + self.scored * SCORING_TRANSFERS
        seconds = self.rank.update_s(own) + self.scored * self.rank.score_s(own)
        seconds += transfers * self.transfer_s * sum(own)
        microbatches = sum(own) / self.rank.config.microbatch_tokens / self.rank.config.num_minibatches
        return seconds * (1 + (self.stages - 1) / max(1.0, microbatches))

    def stage_s(self, stage: str, num_rows: int, tokens: int) -> float:
        return 0.0

    def sync(self) -> SyncSeconds:
        return SyncSeconds(0.0, 0.0)

    def turn_s(self) -> float:
        return 0.0


@lru_cache(maxsize=2)
def rows(section: str = "runs") -> tuple[Row, ...]:
    """Rows of runs, and beside those to which factors are fitted, those of trainers. `section`: `runs`, or `held_out`,
    to which none is fitted."""
    found = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    trainers = [
        Row(one["system"], f"{one['name']}, {length:,}", seconds, _trainer(one, length), 1,
            f"{one['model']} {length}")
        for one in found["trainers"] for length, seconds in one["seconds"].items() if section == "runs"
    ]  # fmt: skip
    first: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for one in found[section]:
        first.setdefault(_workload(one), one)
    runs = [
        Row(one["system"], one["name"], one["step_s"], _run(one, first[_workload(one)]), _gpus(one),
            f"{one['model']} {one['cap']} {one['kind']}")
        for one in found[section] if "mean" in one or one is not first[_workload(one)]
    ]  # fmt: skip
    return (*trainers, *runs)


@lru_cache
def shape_of(model: str) -> ModelShape:
    """Sizes of a model that is known by name, or that transformers makes of its kind's own config.json."""
    shape = known_shape(model) or measured_shape({"model_type": MADE[model]})
    assert shape is not None
    return shape


def _gpus(one: Mapping[str, Any]) -> int:
    return one["gpus"][0] if one["colocated"] else sum(one["gpus"])


def _workload(one: Mapping[str, Any]) -> tuple[Any, ...]:
    return one["model"], one["cap"], one["colocated"]


def _trainer(one: Mapping[str, Any], length: int) -> Callable[[Efficiencies, bool], float]:
    """Seconds of an update: two rows a GPU, each a micro-batch of its own unless layers are kept."""
    recomputes = one.get("recomputes", True)
    config = TrainerConfig(
        num_ranks=one["gpus"], num_gpus_per_rank=1.0, dtype="bfloat16", lora=LoraConfig(rank=one["lora"]),
        max_tokens_per_microbatch=length if recomputes else 2 * length, activation_checkpointing=recomputes,
    )  # fmt: skip
    shape, kind = shape_of(one["model"]), KINDS[one["kind"]]
    return lambda rates, lockstep: RankCosts(shape, kind, rates, config).update_s([length, length])


def _run(one: Mapping[str, Any], first: Mapping[str, Any]) -> Callable[[Efficiencies, bool], float]:
    """Seconds of a step. `first`: the row of this model and cap that says how long responses are, where nobody has."""

    def predict(rates: Efficiencies, lockstep: bool) -> float:
        mean = one["mean"] if "mean" in one else mean_of(Frozen(first), rates)
        return step_s(one, mean, rates, lockstep)

    return predict


def step_s(one: Mapping[str, Any], mean: float, rates: Efficiencies, lockstep: bool) -> float:
    shape, kind, train = shape_of(one["model"]), KINDS[one["kind"]], {"cp": 1, "ep": 1, **one["train"]}
    precision = QUANTIZED_ONLINE[one["quantization"]] if "quantization" in one else Precision()
    (engine_gpus, num_ranks), domain = one["gpus"], DOMAINS.get(kind.name, 8)
    config = TrainerConfig(
        num_ranks=num_ranks, num_gpus_per_rank=1.0, dtype="bfloat16", tensor_parallel_size=train["tp"],
        sequence_parallel_size=train["cp"], shard_size=train["tp"] if train["keeps_weights"] else 0,
        num_minibatches=one["updates"],
        activation_checkpointing=True, max_tokens_per_microbatch=one["microbatch"],
    )  # fmt: skip
    lengths = _lengths(round(mean), one["cap"], one["prompt"])
    num_shares = config.num_shares // train["pp"]
    work = Workload(one["groups"], one["size"], lengths, num_shares, one["staleness"], one["colocated"], one["updates"])
    faster = 2.0 if precision.is_eight_bit else 1.0  # ranks compute in the engines' precision
    stage, parts = replace(shape, num_layers=shape.num_layers // train["pp"]), one["engine_tp"]
    rank = RankCosts(stage, replace(kind, flops=faster * kind.flops), rates, config, domain)
    sent = 2 * shape.hidden * shape.experts_per_token * stage.num_layers * max(0.0, 1 - domain / train["ep"])
    transfer_s = sent / config.ranks_per_row / (kind.network * rates.link)
    own = kind if parts <= domain else replace(kind, link=kind.network)
    engine = EngineCosts(shape, own, rates, parts, precision, kernels_of(shape, own, parts, precision))
    durations = Durations(engine, rank, one["scored"], train["pp"], transfer_s)
    engines = [EngineGroup(engine_gpus // parts, durations, SLOTS)]
    if not lockstep or not one["staleness"]:
        return estimate(engines, durations, work).step_s
    alone = estimate(engines, durations, replace(work, max_staleness=0))
    return max(alone.rollout_s, alone.update_s)


@lru_cache(maxsize=4096)
def _lengths(mean: int, cap: int, prompt: int) -> Lengths:
    return Lengths.lognormal(mean, cap, prompt=prompt)


class Frozen(dict[str, Any]):
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self["name"])


@lru_cache(maxsize=4096)
def mean_of(first: Frozen, rates: Efficiencies) -> float:
    """The mean length with which a row takes what was measured."""
    low, high = 50.0, float(first["cap"])
    for _ in range(12):  # of powers, so that the same lengths are tried again
        middle = math.sqrt(low * high)
        low, high = (middle, high) if step_s(first, middle, rates, False) < first["step_s"] else (low, middle)
    return math.sqrt(low * high)
