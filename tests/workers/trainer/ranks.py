"""One rank of `test_ranks.py`, in a process of its own: `python ranks.py RANK NUM_RANKS ADDRESS MODEL DIRECTORY`.

Runs every scenario and leaves what the tests look at in DIRECTORY. The same scenarios with one rank are what they are
compared to.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.trainer import OptimizerConfig, TrainerConfig
from penstock.store.rows import Rows
from penstock.workers.trainer import sharding
from penstock.workers.trainer.fsdp import FsdpTrainer

LINEAR = {"lr": 1.0, "eps": 1.0, "betas": [0.0, 0.0], "clip_norm": 0.5}
"""AdamW whose step is -g / (|g| + 1) of the clipped gradient: weights after one update show it."""
SCENARIOS: dict[str, dict[str, Any]] = {
    "even": {},
    "uneven": {},
    "empty_rank": {},
    "minibatches": {"num_minibatches": 3},
    "checkpointed": {"activation_checkpointing": True},
    "gathered_by_layer": {},
    "tiled": {"logprob_chunk_mib": 0.002},
    "tiled_by_layer_checkpointed": {"logprob_chunk_mib": 0.002, "activation_checkpointing": True},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16_tiled": {"dtype": "bfloat16", "logprob_chunk_mib": 0.002},
}


def rows_of(scenario: str) -> Rows:
    random = np.random.default_rng(len(scenario))
    lengths = random.integers(1, 21, 12)
    responses = [random.integers(3, 90, length).tolist() for length in lengths]
    return Rows.from_lists(
        {
            "prompt_ids": [random.integers(3, 90, random.integers(1, 10)).tolist() for _ in lengths],
            "response_ids": responses,
            "behavior_logprobs": [(-4.5 + 0.1 * random.normal(size=len(ids))).tolist() for ids in responses],
            "advantage": random.normal(size=len(lengths)).tolist(),
        },
        group_ids=[index // 3 for index in range(len(lengths))],
    )


def share_of(scenario: str, rank: int, num_ranks: int) -> list[int]:
    """Positions of a rank's rows."""
    if num_ranks == 1:
        return list(range(12))
    if scenario == "empty_rank":
        return list(range(12)) if rank == 0 else []
    if scenario == "uneven":
        return list(range(11)) if rank == 0 else [11]
    return list(range(rank, 12, num_ranks))


def run(rank: int, num_ranks: int, address: str | None, model: str, directory: Path) -> None:
    """All scenarios, one trainer after the other in one process group."""
    torch.set_num_threads(1)
    trainers = []
    for scenario, options in SCENARIOS.items():
        budget = 8192 if num_ranks == 1 else 60
        config = TrainerConfig(
            num_ranks=num_ranks, max_tokens_per_microbatch=budget, optimizer=OptimizerConfig(**LINEAR), **options
        )
        sharding.KEEP_WHOLE_BYTES = 0 if "by_layer" in scenario else 2**31
        trainer = FsdpTrainer(config, model, rank=rank, num_ranks=num_ranks, address=address)
        trainers.append(trainer)
        rows = rows_of(scenario).select(share_of(scenario, rank, num_ranks))
        before = trainer.logprobs(rows)
        report = trainer.update(rows, ppo_clip_loss)
        after = trainer.logprobs(rows)
        trainer.publish(str(directory / scenario), 1)
        result = {"metrics": report.metrics, "tokens": report.num_tokens, "before": before, "after": after}
        torch.save(result, directory / f"{scenario}.{rank}.pt")
    trainers[-1].export(str(directory / "exported"))
    trainers[0].close()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
