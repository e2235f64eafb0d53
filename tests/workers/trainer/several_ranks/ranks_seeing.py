"""One rank of `test_ranks_seeing.py`, in a process of its own:
`python -m tests.workers.trainer.several_ranks.ranks_seeing RANK NUM_RANKS ADDRESS MODEL DIRECTORY`.

The first rank has all rows with pictures, and the second none, nor as many micro-batches.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig

from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.trainer import OptimizerConfig, TrainerConfig
from penstock.workers.trainer.engines import fsdp
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.trainer import PolicyTrainer
from tests.workers.trainer.seeing import MadeUp, rows_with
from tests.workers.trainer.several_ranks.ranks import LINEAR

PROMPTS = [["a 4 6"], ["b 8 4", "a 4 6"], ["b 8 4"], []]
SHARES = [[0, 1, 2], [3]]
FREEZES: dict[str, list[str]] = {"frozen": ["vision"], "trained": []}


def run(rank: int, num_ranks: int, address: str | None, model: str, directory: Path) -> None:
    """An update with the tower frozen, and one with it trained."""
    torch.set_num_threads(1)
    fsdp.KEEP_WHOLE_BYTES = 0  # weights are gathered layer by layer, the tower's too
    kind = AutoConfig.from_pretrained(model).model_type
    rows, trainers = (
        rows_with(PROMPTS, kind=kind),
        list[PolicyTrainer](),
    )  # in one process group, which ends with the last one
    for name, freeze in FREEZES.items():
        config = TrainerConfig(
            num_ranks=num_ranks, freeze=freeze, optimizer=OptimizerConfig(**LINEAR),
            max_tokens_per_microbatch=8192 if num_ranks == 1 else 40,
        )  # fmt: skip
        trainer = PolicyTrainer(config, model, Ranks.join(config, rank, num_ranks, address))
        trainer.see(MadeUp(trainer.model.lm.config))
        trainer.check_scores()
        trainer.update(rows.select(SHARES[rank]) if num_ranks > 1 else rows, ppo_clip_loss)
        trainer.publish(str(directory / name), 1)
        trainers.append(trainer)
    for trainer in reversed(trainers):
        trainer.close()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
