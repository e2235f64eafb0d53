"""What a run has recorded, for planning another: lengths of responses, and by what factors its engines and ranks were
slower than the cost model says.

    samples/step_N.parquet  lengths of prompts and responses       (else metrics.jsonl: their mean and largest)
    metrics.jsonl           seconds in which engines and ranks worked, by step
    events.jsonl            bytes a second between nodes

The factors are those of the split that the run had, on GPUs of one kind. They are common to all plans: ten steps are
enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from pyarrow import parquet

from penstock.conf.errors import ConfigError, PenstockError
from penstock.orchestrator.observability.link_speeds import LINK
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.planner.candidates import Candidate, with_keys
from penstock.planner.hardware import GpuKind
from penstock.planner.lengths import SIGMA, Lengths
from penstock.planner.search import Search

SETTLED = 2
"""First steps that are left out: compilation and warming up."""
SPLIT = (
    "placement", "max_staleness", "algorithm.group_size",
    *(f"rollout.{key}" for key in (
        "engine", "num_workers", "num_threads", "tensor_parallel_size", "num_gpus_per_worker", "dtype",
        "max_concurrent_samples", "max_model_len", "gpu_memory_utilization",
    )),
    *(f"trainer.{key}" for key in (
        "num_ranks", "num_threads", "num_gpus_per_rank", "tensor_parallel_size", "sequence_parallel_size",
        "shard_size", "offload", "dtype", "groups_per_step", "num_minibatches", "max_tokens_per_microbatch",
        "activation_checkpointing", "activation_offload",
    )),
)  # fmt: skip
"""Keys of a run that its seconds depend on."""


@dataclass(frozen=True)
class Pilot:
    """A run's records."""

    place: str
    """Its directory."""
    keys: dict[str, Any]
    """Those of `SPLIT`."""
    lengths: Lengths
    engines_s: float
    """Seconds of a step in which engines worked, the median of steps."""
    ranks_s: float
    """Seconds of an update."""
    step_s: float
    """Mean seconds of a step."""
    num_steps: int
    link: float | None = None
    """Bytes a second of the slowest link between nodes; None: none was measured."""

    @property
    def has_gpus(self) -> bool:
        return bool(self.keys.get("trainer.num_gpus_per_rank") and self.keys.get("rollout.num_gpus_per_worker"))


def read_pilot(place: str) -> Pilot:
    """Read the records of a run's directory. Raises `ConfigError` where it has too few steps."""
    try:
        directory = RunDirectory.open(Path(place))
        lines = [line for line in directory.read_metrics() if line.get("step", 0) > SETTLED]
        values = directory.read_config()
    except (OSError, PenstockError) as error:
        raise ConfigError(f"--from {place}: no run's records can be read there ({error}).") from None
    steps = [line for line in lines if {"timing_s/step", "timing_s/train", "idle/rollout"} <= line.keys()]
    if not steps:
        raise ConfigError(f"--from {place}: it has no steps after the first {SETTLED}. Let it make ten.")
    found = {key: value for key in SPLIT if (value := looked_up(values, key)) is not None}
    engines = median(line["timing_s/step"] * (1 - line["idle/rollout"]) for line in steps)
    ranks = median(line["timing_s/train"] for line in steps)
    step_s = mean(line["timing_s/step"] for line in steps)
    rates = [float(event["bytes_per_s"]) for event in directory.read_events() if event["kind"] == LINK]
    link = min(rates, default=None)
    return Pilot(place, found, _lengths(directory, steps), engines, ranks, step_s, len(steps), link)


def calibrated(search: Search, pilot: Pilot) -> Search:
    """The search with the run's lengths, and with its factors where it ran on GPUs of the cluster's kind."""
    search = replace(search, lengths=pilot.lengths, link=pilot.link)
    kinds = {nodes.kind for nodes in search.cluster}
    if not pilot.has_gpus or len(kinds) > 1:
        return search
    engines, ranks = _factors(search, pilot, kinds.pop())
    rates = search.efficiencies
    rates = replace(rates, decode_factor=rates.decode_factor * engines, update_factor=rates.update_factor * ranks)
    return replace(search, efficiencies=rates)


def _factors(search: Search, pilot: Pilot, kind: GpuKind) -> tuple[float, float]:
    """Measured over estimated seconds of engines and ranks."""
    base = with_keys(search.base, pilot.keys)
    count = int(pilot.keys["rollout.num_workers"])
    candidate = Candidate((), ((kind, count),), kind, 0)
    try:
        plan = replace(search, base=base).plan(candidate)
    except PenstockError as error:
        raise ConfigError(f"--from: what the run did could not be done by the cost model: {error}") from None
    return pilot.engines_s / plan.found.busy_s, pilot.ranks_s / plan.found.update_s


def _lengths(directory: RunDirectory, steps: Sequence[dict[str, Any]]) -> Lengths:
    responses, prompts = list[int](), list[int]()
    for file in directory.sample_files()[-10:]:
        table = parquet.read_table(file, columns=["prompt_ids", "response_ids"]).to_pydict()
        prompts += map(len, table["prompt_ids"])
        responses += map(len, table["response_ids"])
    if responses:
        return Lengths.recorded(responses, round(sum(prompts) / len(prompts)))
    usual = median(line["response_length/mean"] for line in steps)
    longest = max(line["response_length/max"] for line in steps)
    return Lengths.lognormal(usual, max(1, round(longest)), SIGMA)


def looked_up(values: Any, key: str) -> Any:
    """The value of a dotted key in a configuration that was read as plain data; None where it has none."""
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
