"""One rank of `test_ranks_seeing.py`, in a process of its own:
`python -m tests.workers.trainer.several_ranks.ranks_seeing RANK NUM_RANKS ADDRESS MODELS DIRECTORY`.

Where ranks share the rows, the first has all of those with pictures, and the second none, nor as many micro-batches.
Where they split the work on a row, both have all rows.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from penstock.workers.trainer.engines import fsdp
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.training_state import TrainingState
from tests.workers.trainer.conftest import ENGINES
from tests.workers.trainer.seeing import MadeUp, rows_with
from tests.workers.trainer.several_ranks.ranks import LINEAR

PROMPTS = [["a 4 6"], ["b 8 4", "a 4 6"], ["b 8 4"], []]
SHARES = [[0, 1, 2], [3]]
TRAINED: dict[str, Any] = {"freeze": []}
TENSOR, SEQUENCE, PACKED = {"tensor_parallel_size": 2}, {"sequence_parallel_size": 2}, {"packing": "always"}
SCENARIOS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "trained": TRAINED,
    "tensor_trained": TENSOR | TRAINED,
    "packed_tensor_trained": TENSOR | TRAINED | PACKED,
    "sequence_frozen": SEQUENCE,
    "sequence_trained": SEQUENCE | TRAINED | {"activation_checkpointing": True},
    "packed_sequence_trained": SEQUENCE | TRAINED | PACKED,
    "zero2_trained": ENGINES["zero2"] | TRAINED,
    "zero3_frozen": ENGINES["zero3"],
    "zero3_trained": ENGINES["zero3"] | TRAINED,
    "lora": {"lora": LoraConfig(rank=4, alpha=8)},
    "tensor_lora": TENSOR | {"lora": LoraConfig(rank=4, alpha=8)},
    "qwen3_vl_frozen": {},
    "qwen3_vl_trained": TRAINED,
    "qwen3_vl_packed_sequence_trained": SEQUENCE | TRAINED | PACKED,
    "llava_frozen": {},
    "llava_trained": TRAINED,
    "llava_tensor_frozen": TENSOR,
    "llava_sequence_frozen": SEQUENCE,
}
RESUMED = ("trained", "tensor_trained", "packed_sequence_trained", "zero3_trained")
"""Scenarios whose trainer is made anew after the update, and goes on from a checkpoint."""
KINDS = ("qwen3_vl", "llava", "qwen2_5_vl")
"""Families of models, by which scenarios are called; the last is that of all others."""
ALONE = ("frozen", "trained", "lora", "qwen3_vl_frozen", "qwen3_vl_trained", "llava_frozen", "llava_trained")
"""Scenarios that one rank runs, for the others to be compared with."""


def alone(scenario: str) -> str:
    """The scenario of one rank that must give the same."""
    kind = kind_of(scenario)
    return next(name for name in reversed(ALONE) if kind_of(name) == kind and scenario.endswith(name.split("_")[-1]))


def kind_of(scenario: str) -> str:
    return next((kind for kind in KINDS if scenario.startswith(kind)), KINDS[-1])


def run(rank: int, num_ranks: int, address: str | None, models: Path, directory: Path) -> None:
    """An update in each scenario, and what is answered before and after it, and after a resume."""
    torch.set_num_threads(1)
    fsdp.KEEP_WHOLE_BYTES = 0  # weights are gathered layer by layer, the tower's too
    trainers = list[PolicyTrainer]()  # in one process group, which ends with the last one
    for name, options in SCENARIOS.items() if num_ranks > 1 else ((name, SCENARIOS[name]) for name in ALONE):
        config = TrainerConfig(
            num_ranks=num_ranks, optimizer=OptimizerConfig(**LINEAR),
            max_tokens_per_microbatch=8192 if num_ranks == 1 else 40, **options,
        )  # fmt: skip

        kind = kind_of(name)

        def made(config: TrainerConfig = config, model: str = str(models / kind)) -> PolicyTrainer:
            trainers.append(PolicyTrainer(config, model, Ranks.join(config, rank, num_ranks, address)))
            trainers[-1].attach_vision(MadeUp(trainers[-1].model.lm.config))
            trainers[-1].check_scores()
            return trainers[-1]

        trainer, shares = made(), num_ranks > 1 and config.ranks_per_row == 1
        rows = rows_with(PROMPTS, kind=kind).select(SHARES[rank] if shares else range(len(PROMPTS)))
        before = trainer.logprobs(rows)
        trainer.update(rows, ppo_clip_loss)
        trainer.publish(str(directory / name), 1)
        answers = {"before": before, "after": trainer.logprobs(rows)}
        if name in RESUMED:
            answers["resumed"] = resume(trainer, made, directory / name / "checkpoint").logprobs(rows)
        torch.save(answers, directory / f"{name}.{rank}.pt")
    for trainer in reversed(trainers):
        trainer.close()


def resume(trainer: PolicyTrainer, made: Callable[[], PolicyTrainer], directory: Path) -> PolicyTrainer:
    """A trainer that goes on from a checkpoint of this one."""
    state = TrainingState({"policy": trainer})
    assert state.begin(str(directory))
    files = [file for some in trainer.ranks.gather_ranks(state.finish()) for file in some]
    resumed = made()
    TrainingState({"policy": resumed}).load(str(directory), files)
    return resumed


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), Path(sys.argv[5]))
