"""Memory against what others have measured: peaks of ranks, and the fewest GPUs on which runs are known to fit.

Bars, written down before: peaks within 15% in nine rows of ten; every run that is known to fit is called feasible, and
on half of its GPUs it is not, unless what it trains is offloaded to the host.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from benchmarks.harness import Target, new_table, show
from benchmarks.planner.published_rows import FILE
from penstock.algorithms.catalogue import dataflow_of
from penstock.conf.trainer import LoraConfig, TrainerConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.rank_memory import MASTER, RankSetting, rank_memory
from penstock.orchestrator.configuration.run_memory import GIB
from penstock.planner.hardware import KINDS, Nodes
from penstock.planner.lengths import Lengths
from penstock.planner.plan_inputs import known_shape
from penstock.planner.search import Search

ERROR, LEAST_WITHIN = 0.15, 0.9
SLICE_BYTES = 2048 * 14
"""Bytes of one token in prime-rl's slices of 2,048 words of logits: bfloat16, and three times float32."""


def peaks() -> Iterator[dict[str, Any]]:
    """Peaks of ranks in GiB: as measured; by the model; and by the model for Penstock, whose frozen weights have no
    float32 masters."""
    for one in yaml.safe_load(FILE.read_text(encoding="utf-8"))["peaks"]:
        for tokens, gib in one["gib"].items():
            row = f"{one['name']} {one['model']}{' LoRA' * bool(one['lora'])}, {tokens:,}"
            told, masters = _peak(one, tokens)
            yield {"what": "peak", "row": row, "measured": gib, "told": told + masters, "here": told}


def measure(quick: bool, num_rounds: int | None) -> list[dict[str, Any]]:
    known = yaml.safe_load(FILE.read_text(encoding="utf-8"))["feasible"]
    return [*peaks(), *(_fits(one) for one in known)]


def targets_of(rounds: Sequence[dict[str, Any]]) -> list[Target]:
    errors = [abs(one["told"] / one["measured"] - 1) for one in rounds if one["what"] == "peak"]
    runs = [one for one in rounds if one["what"] == "run"]
    within = sum(error <= ERROR for error in errors) / len(errors)
    halves = [one["half"] for one in runs if one["half"] is not None]
    return [
        Target(f"peaks of {len(errors)} within {ERROR:.0%}", within, "", ">=", LEAST_WITHIN),
        Target(
            f"of {len(runs)} runs that fit, those called feasible", _share([one["whole"] for one in runs]), "", ">=", 1
        ),
        Target(f"of {len(halves)} on half of their GPUs, those called too large", 1 - _share(halves), "", ">=", 1),
    ]


def show_rounds(rounds: Sequence[dict[str, Any]]) -> None:
    table = new_table("peak of a rank, GiB", ["row"], ["measured", "told", "error", "Penstock's"])
    for one in (one for one in rounds if one["what"] == "peak"):
        table.add_row(
            one["row"], f"{one['measured']:.1f}", f"{one['told']:.1f}", f"{one['told'] / one['measured'] - 1:+.0%}",
            f"{one['here']:.1f}",
        )  # fmt: skip
    show(table)
    table = new_table("does it fit, without offloading?", ["run"], ["all GPUs", "half"])
    for one in (one for one in rounds if one["what"] == "run"):
        table.add_row(one["row"], _yes(one["whole"]), _yes(one["half"]))
    show(table)


def _peak(one: dict[str, Any], tokens: int) -> tuple[float, float]:
    """GiB of a rank, and of the masters that the measured system has besides, of frozen weights."""
    shape = known_shape(one["model"])
    assert shape is not None
    config = TrainerConfig(
        num_gpus_per_rank=1, dtype="bfloat16", activation_checkpointing=True, num_ranks=one["gpus"],
        lora=LoraConfig(rank=one["lora"]), logprob_chunk_mib=SLICE_BYTES * tokens / 2**20,
    )  # fmt: skip
    masters = (MASTER - 2) * shape.num_parameters / one["gpus"] if one["lora"] else 0.0
    return rank_memory(RankSetting(shape, config, tokens, tokens)).total / GIB, masters / GIB


def _fits(one: dict[str, Any]) -> dict[str, Any]:
    half = one["gpus"] // 2
    row = f"{one['model']}{' LoRA' * bool(one['lora'])} on {one['gpus']} {one['kind']}"
    return {"what": "run", "row": row, "whole": _has_plan(one, one["gpus"]),
            "half": _has_plan(one, half) if half else None}  # fmt: skip


def _has_plan(one: dict[str, Any], gpus: int) -> bool:
    words = [
        "recipe=gsm8k", f"model.path={one['model']}", "rollout.max_model_len=1536", "rollout.sampling.max_tokens=1024",
        "trainer.groups_per_step=128", "algorithm.group_size=8", "max_staleness=0", f"trainer.lora.rank={one['lora']}",
    ]  # fmt: skip
    config, shape = load_config(words), known_shape(one["model"])
    assert shape is not None
    nodes = Nodes(max(1, gpus // 8), min(gpus, 8), KINDS[one["kind"]])
    search = Search(config, dataflow_of(config), {"policy": shape}, (nodes,), Lengths.lognormal(300, 1024, 0.6))
    return any(not plan.config.trainer.offload for plan in search.plans)


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


def _yes(fits: bool | None) -> str:
    return {True: "yes", False: "no", None: ""}[fits]
