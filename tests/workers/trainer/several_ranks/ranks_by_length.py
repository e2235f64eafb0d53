"""One rank of `test_ranks_by_length.py`, in a process of its own:
`python -m tests.workers.trainer.several_ranks.ranks_by_length RANK NUM_RANKS ADDRESS MODEL DIRECTORY`.

Runs every scenario of that number of ranks in float64, and leaves gradients, answers and the groups that each pass had
in DIRECTORY. One rank runs all of them without their ways to split the work.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import logsigmoid

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf import trainer as trainer_keys
from penstock.conf.trainer import TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.protocols import Loss
from penstock.workers.trainer import policy_trainer
from penstock.workers.trainer.engines import fsdp
from penstock.workers.trainer.models.language_model import open_causal_lm
from penstock.workers.trainer.pass_trial import measured_costs
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.token_recorder import TokenRecorder
from penstock.workers.trainer.update.rank_groups import PassCost, PassCosts

AUTO: dict[str, Any] = {"sequence_parallel_size": "auto"}
SCENARIOS: dict[int, dict[str, dict[str, Any]]] = {
    2: {"two": AUTO, "two_gathered_by_layer": AUTO, "two_checkpointed": AUTO | {"activation_checkpointing": True}},
    4: {
        "four": AUTO,
        "four_pairs": AUTO,
        "four_shared": AUTO | {"share_prefixes": "always"},
        "four_gathered_by_layer_in_copies": AUTO | {"shard_size": 2},
        "four_in_two_blocks": AUTO,
        "four_by_tensors": AUTO | {"tensor_parallel_size": 2},
    },
}
COSTS = PassCosts({size: PassCost(40.0, (1 + 0.8 * (size > 1)) / size, 0.2 / size) for size in (1, 2, 4)})
"""Costs by which rows of 30 tokens are computed alone, and those of 120 split."""
NUM_ROWS, BUDGET = 24, 128


def rows() -> Rows:
    """Rows of 20 to 126 tokens, in pairs that begin alike."""
    random = np.random.default_rng(5)
    lengths = np.clip(random.lognormal(2.7, 1.0, NUM_ROWS), 2, 100).astype(int)
    lengths[3], lengths[10] = 100, 90
    prompts = [random.integers(3, 90, random.integers(18, 26)).tolist() for _ in range(NUM_ROWS // 2)]
    return Rows.from_lists(
        {
            "prompt_ids": [prompts[row // 2] for row in range(NUM_ROWS)],
            "response_ids": [random.integers(3, 90, length).tolist() for length in lengths],
            "behavior_logprobs": [(-4.5 + 0.1 * random.normal(size=length)).tolist() for length in lengths],
            "advantage": random.normal(size=NUM_ROWS).tolist(),
            "preferred": (2 * (np.arange(NUM_ROWS) % 2) - 1).tolist(),
        },
        group_ids=[row // 2 for row in range(NUM_ROWS)],
    )


def pair_loss(
    logprobs: Tensor, mask: Tensor, totals: BatchTotals, preferred: Tensor, group_ids: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of two rows that stay together, summed in float64: log-probabilities are float32."""
    means_B = torch.where(mask, logprobs.double(), 0.0).sum(1) / mask.sum(1)
    groups, group_of_B = group_ids.unique(return_inverse=True)
    margins_G = means_B.new_zeros(len(groups)).index_add(0, group_of_B, preferred * means_B)
    loss = -logsigmoid(margins_G).sum() / totals.num_groups
    return loss, {"loss": loss}


def open_exactly(path: str, **options: Any) -> tuple[Any, Any]:
    """The model in float64, its norms too: theirs compute in float32."""
    lm, weights = open_causal_lm(path, **options | {"dtype": "float64"})
    for module in list(lm.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, torch.nn.RMSNorm(child.weight.shape, 1e-6, dtype=torch.float64, device="meta"))
    return lm, weights


def run(rank: int, num_ranks: int, address: str | None, model: str, directory: Path) -> None:
    torch.set_num_threads(1)
    policy_trainer.open_causal_lm = open_exactly
    join: Callable[[TrainerConfig], Ranks] = partial(Ranks.join, rank=rank, num_ranks=num_ranks, address=address)
    scenarios = SCENARIOS.get(num_ranks) or {name: {} for some in SCENARIOS.values() for name in some}
    trainers = []
    for scenario, options in scenarios.items():
        trainer_keys.MOST_SEQUENCE_RANKS = 2 if "two_blocks" in scenario else 8
        fsdp.KEEP_WHOLE_BYTES = 0 if "gathered_by_layer" in scenario else 2**31
        config = TrainerConfig(num_ranks=num_ranks, max_tokens_per_microbatch=BUDGET, **options)
        trainers.append(PolicyTrainer(config, model, join(config)))
        result = one_pass(trainers[-1], pair_loss if "pairs" in scenario else ppo_clip_loss)
        torch.save(result, directory / f"{scenario}.{rank}.pt")
    trainers[0].close()


def one_pass(trainer: PolicyTrainer, loss: Loss) -> dict[str, Any]:
    """Gradients of all rows, what is answered for each, and the sizes of the groups that this rank was in."""
    own = rows().select(range(trainer.ranks.data_rank, NUM_ROWS, trainer.ranks.num_data_ranks))
    measured = measured_costs(trainer) if trainer.ranks.block is not None else None
    if trainer.ranks.block is not None:
        trainer.split_by(COSTS)
    sizes: list[int | None] = []
    split_over = trainer.engine.split_over

    def noted(size: int | None) -> None:
        sizes.append(size)
        split_over(size)

    trainer.engine.split_over = noted  # type: ignore[method-assign]
    report = trainer.forward_backward(own, loss)
    trainer.engine.split_over = split_over  # type: ignore[method-assign]
    shards = {name: one.grad for name, one in trainer.model.named_parameters() if one.grad is not None}
    whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in shards.items()}
    gradients = {name: one.clone() for name, one in whole.items()}  # the step clips them in place
    result = {"gradients": gradients, "metrics": report.metrics, "sizes": sizes, "measured": measured}
    trainer.optim_step()
    result["logprobs"] = dict(zip(own.row_ids.tolist(), trainer.logprobs(own), strict=True))
    recorder = TokenRecorder()
    trainer.update(own, loss, recorder)
    return result | {"noted": recorder.values(own, own.lengths("response_ids").tolist(), trainer.ranks.gather_block)}


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
