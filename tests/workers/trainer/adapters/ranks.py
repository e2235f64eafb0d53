"""One rank of `test_two_ranks.py`:
`python -m tests.workers.trainer.adapters.ranks RANK NUM_RANKS ADDRESS MODEL DIRECTORY`.

Trains adapters in every way of splitting the model, and leaves what the tests look at in DIRECTORY.
"""

import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.conf.errors import DataError
from penstock.conf.trainer import TrainerConfig
from penstock.workers.protocols import WHOLE, AdamParams, AdapterSpec, Datum, LossCall
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.slot_trainer import SlotTrainer, with_slot
from tests.workers.trainer.adapters.conftest import MAX_RANK, data_of

WAYS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "copies": {"shard_size": 1},
    "tensor": {"tensor_parallel_size": 2},
    "sequence": {"sequence_parallel_size": 2},
}
WHOLE_WAYS: dict[str, dict[str, Any]] = {"whole sharded": {}, "whole tensor": {"tensor_parallel_size": 2}}
"""Ways in which whole models take turns."""
SPECS = AdapterSpec(rank=3, seed=7, alpha=12), AdapterSpec(rank=MAX_RANK, seed=1, train_mlp=False)
LOSS = LossCall("cross_entropy")
PARAMS = AdamParams(learning_rate=0.1, beta1=0.0, beta2=0.0, eps=1.0)
"""AdamW whose step is -0.1 g / (|g| + 1): weights show the gradient."""
Share = Callable[[list[Datum]], list[Datum]]


def run(rank: int, num_ranks: int, address: str | None, model: str, directory: Path) -> None:
    torch.set_num_threads(1)
    made = []
    ways = WAYS | WHOLE_WAYS if num_ranks > 1 else {"alone": {}, "whole alone": {}}
    for way, options in ways.items():
        is_whole = way.startswith("whole")
        slot_rank, specs = (WHOLE, (AdapterSpec(WHOLE), AdapterSpec(WHOLE))) if is_whole else (MAX_RANK, SPECS)
        config = with_slot(TrainerConfig(num_ranks=num_ranks, max_tokens_per_microbatch=60, **options), slot_rank)

        def make(config: TrainerConfig = config) -> SlotTrainer:
            made.append(SlotTrainer(config, model, Ranks.join(config, rank, num_ranks, address)))
            return made[-1]

        results = results_of(make, *specs)
        with open(directory / f"{way}.{rank}.pickle", "wb") as file:
            pickle.dump(results, file)
    for trainer in reversed(made):
        trainer.close()


def results_of(make: Callable[[], SlotTrainer], spec: AdapterSpec, other: AdapterSpec) -> dict[str, Any]:
    trainer = make()
    ranks = trainer.ranks

    def share(data: list[Datum]) -> list[Datum]:
        return data[ranks.data_rank :: ranks.num_data_ranks]

    results: dict[str, Any] = {}
    trainer.create("alone", spec)
    results["first"] = train(trainer, share, ["alone"])
    results["alone"] = trainer.state("alone")
    trainer.create("a", spec)
    trainer.create("b", other)
    train(trainer, share, ["a", "b"])
    results["together"] = trainer.state("a")
    fresh = make()
    fresh.create("b", other)
    fresh.create("a", spec, ranks.gather_ranks(results["alone"])[0])
    for one, name in ((trainer, "alone"), (fresh, "a")):
        one.forward(name, share(data_of(8)), LOSS, backward=True)
        one.step(name, replace(PARAMS, weight_decay=0.1))
        results[f"on of {name}"] = one.state(name)
    bad = Datum(np.asarray([5], np.int32), np.asarray([5, 6], np.int64))
    try:
        trainer.forward("a", [bad] if ranks.data_rank == 0 else [], LOSS, backward=True)
    except DataError as error:
        results["refusal"] = str(error)
    results["nothing"] = trainer.forward("a", [], LOSS, backward=True).metrics
    results["step"] = trainer.step("a", PARAMS)
    return results


def train(trainer: SlotTrainer, share: Share, names: list[str]) -> list[Any]:
    """Two steps, of which the second adds up two calls, and gradients that wait."""
    outputs = []
    for seeds in ([0], [1, 2]):
        for seed in seeds:
            for name in names:
                data = data_of(seed + 50 * (name == "b"), count=1 if seed == 1 else 5)
                outputs.append(trainer.forward(name, share(data), LOSS, backward=True))
        for name in names:
            outputs.append(trainer.step(name, PARAMS))
    for name in names:
        trainer.forward(name, share(data_of(4 + 50 * (name == "b"))), LOSS, backward=True)
    return outputs


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
