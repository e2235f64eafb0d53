"""One rank of `test_ranks_killed.py`, in a process of its own:
`python -m tests.workers.trainer.several_ranks.ranks_killed RANK NUM_RANKS ADDRESS LIFE MODEL DIRECTORY`.

In its first life each trainer makes three updates and a copy after each; of the last trainer, rank 1 is killed
within its third copy. In the second, new ones go on from the second copies.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.errors import MemoryCheckpointError
from penstock.conf.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from penstock.workers.trainer import memory_checkpoint
from penstock.workers.trainer.engines import deepspeed
from penstock.workers.trainer.memory_checkpoint import MemoryCheckpoint
from penstock.workers.trainer.memory_slots import copied_steps
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.training_state import TrainingState
from tests.workers.trainer.conftest import ENGINES, FRESH, random_rows

BFLOAT16 = {"dtype": "bfloat16"}
SCENARIOS: dict[str, dict[str, Any]] = {
    **ENGINES,
    **{f"{engine}_bfloat16": options | BFLOAT16 for engine, options in ENGINES.items()},
    "lora": {"lora": LoraConfig(rank=4, alpha=8)},
    "tensor": {"tensor_parallel_size": 2},
    "sequence": {"sequence_parallel_size": 2},
    "copies": {"shard_size": 1},
    "killed": {},
}
KILLED = "killed"
KILLED_AT = 7
"""Blocks that are written of the copy within which rank 1 is killed."""


def run(rank: int, num_ranks: int, address: str, life: str, model: str, directory: Path) -> None:
    torch.set_num_threads(1)
    deepspeed.PERSISTENT_ELEMENTS = FRESH.hidden_size
    (directory / "states").mkdir(exist_ok=True)
    results: dict[str, Any] = {}
    made = []
    for scenario, options in SCENARIOS.items():
        config = TrainerConfig(num_ranks=num_ranks, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2), **options)
        trainer = PolicyTrainer(config, model, Ranks.join(config, rank, num_ranks, address))
        made.append(trainer)
        state = TrainingState({"policy": trainer})
        checkpoint = MemoryCheckpoint(state, trainer, str(directory / "states" / scenario))
        own = list(range(12)) if trainer.ranks.num_data_ranks == 1 else list(range(rank, 12, num_ranks))

        def update(step: int, trainer: PolicyTrainer = trainer, own: list[int] = own) -> None:
            trainer.update(random_rows(12, seed=step).select(own), ppo_clip_loss)

        if life == "first":
            is_beside, dies = scenario not in ENGINES, scenario == KILLED and rank == 1
            results[scenario] = first_life(state, checkpoint, update, is_beside=is_beside, dies=dies)
        else:
            steps = copied_steps(directory / "states" / scenario, rank)
            results[scenario] = {"steps": steps} | second_life(state, checkpoint, update)
        torch.save(results, directory / f"{life}.{rank}.pt")
    if life == "second":
        results["mixed"] = goes_on_from_a_mixture(checkpoint)
        torch.save(results, directory / f"{life}.{rank}.pt")
        for trainer in reversed(made):
            trainer.close()


def first_life(
    state: TrainingState, checkpoint: MemoryCheckpoint, update: Callable[[int], None], *, is_beside: bool, dies: bool
) -> dict[str, dict[str, Tensor]]:
    """`is_beside`: copies are made while the next update's passes are."""
    states = {}
    for step in (1, 2, 3):
        update(step)
        if step == 3 and dies:
            die_within_the_next_copy()
        if is_beside:
            checkpoint.begin(step)
        else:
            assert checkpoint.save(step) is None
        states[f"at {step}"] = everything(state)
    assert not is_beside or checkpoint.finish(3) is None
    return states


def second_life(
    state: TrainingState, checkpoint: MemoryCheckpoint, update: Callable[[int], None]
) -> dict[str, dict[str, Tensor]]:
    checkpoint.restore(2)
    restored = everything(state)
    update(3)
    updated = everything(state)
    assert checkpoint.save(3) is None
    return {"at 2": restored, "at 3": updated}


def goes_on_from_a_mixture(checkpoint: MemoryCheckpoint) -> str:
    """Rank 1 has a copy of the same step that was made by other ranks than rank 0's."""
    slots = checkpoint.slots
    if slots.rank == 1:
        slot, header = slots.copies()[3]
        slots.seal(slot, msgspec.structs.replace(header, lineage="of another life"))
    try:
        checkpoint.restore(3)
    except MemoryCheckpointError as error:
        return str(error)
    return ""


def die_within_the_next_copy() -> None:
    copy, written = memory_checkpoint.copy_and_sum, []

    def copy_and_die(values: Tensor, target: memoryview, dtype: str) -> str:
        written.append(len(values))
        if len(written) > KILLED_AT:
            target[: len(target) // 2] = values[: len(values) // 2].numpy()
            os.kill(os.getpid(), signal.SIGKILL)
        return copy(values, target, dtype)

    memory_checkpoint.copy_and_sum = copy_and_die


def everything(state: TrainingState) -> dict[str, Tensor]:
    """This rank's values, each piece by its name and first element."""
    return {f"{piece.name}/{piece.first}": piece.values.clone() for piece in state.pieces_of_rank()}


if __name__ == "__main__":
    gc.collect = lambda *_: 0  # reports of memory call it, 16 times for each engine of DeepSpeed in bfloat16
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5], Path(sys.argv[6]))
