"""One rank of `test_ranks.py`, in a process of its own:
`python -m tests.workers.trainer.several_ranks.ranks RANK NUM_RANKS ADDRESS MODEL DIRECTORY ENGINE...`.

Runs every scenario with each engine and leaves what the tests look at in DIRECTORY. The same scenarios with one rank of
FSDP2 are what they are compared to.
"""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from penstock.algorithms.losses import ppo_clip_loss, sft_loss
from penstock.conf.trainer import OptimizerConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.trainer import publishing
from penstock.workers.trainer.engines import deepspeed, fsdp
from penstock.workers.trainer.memory_checkpoint import MemoryCheckpoint
from penstock.workers.trainer.models import streamed_layers
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.training_state import TrainingState
from penstock.workers.weights.publication import publication
from tests.workers.trainer.conftest import ENGINES, put_state, random_rows, whole_state

LINEAR = {"lr": 1.0, "eps": 1.0, "betas": [0.0, 0.0], "clip_norm": 0.5}
"""AdamW whose step is -g / (|g| + 1) of the clipped gradient: weights after one update show it."""
SCENARIOS: dict[str, dict[str, Any]] = {
    "even": {},
    "uneven": {},
    "empty_rank": {},
    "minibatches": {"num_minibatches": 3},
    "checkpointed": {"activation_checkpointing": True},
    "streamed": {"activation_checkpointing": "stream"},
    "streamed_by_layer": {"activation_checkpointing": "stream"},
    "gathered_by_layer": {},
    "tiled": {"logprob_chunk_mib": 0.002},
    "tiled_by_layer_checkpointed": {"logprob_chunk_mib": 0.002, "activation_checkpointing": True},
    "bfloat16": {"dtype": "bfloat16"},
    "tiled_bfloat16": {"dtype": "bfloat16", "logprob_chunk_mib": 0.002},
    "same_length": {},
    "compiled": {"compile": True},
}


def plain(scenario: str) -> str:
    """The scenario that must give the same on one rank of FSDP2, which has nothing to offload and computes as torch
    does."""
    same = {
        "offloaded": "even", "offloaded_bfloat16": "bfloat16", "compiled": "same_length", "streamed": "checkpointed",
        "streamed_by_layer": "checkpointed",
    }  # fmt: skip
    return same.get(scenario, scenario)


def rows_of(scenario: str) -> Rows:
    random = np.random.default_rng(len(plain(scenario)))
    one_shape = plain(scenario) == "same_length"  # other shapes would be compiled again: `engines/test_layers.py`
    lengths = np.full(12, 12) if one_shape else random.integers(1, 21, 12)
    responses = [random.integers(3, 90, length).tolist() for length in lengths]
    return Rows.from_lists(
        {
            "prompt_ids": [
                random.integers(3, 90, 7 if one_shape else random.integers(1, 10)).tolist() for _ in lengths
            ],
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


def run(rank: int, num_ranks: int, address: str | None, model: str, directory: Path, engines: list[str]) -> None:
    """All of it, one trainer after the other in one process group."""
    torch.set_num_threads(1)

    def make(**options: Any) -> PolicyTrainer:
        config = TrainerConfig(num_ranks=num_ranks, **options)
        trainers.append(PolicyTrainer(config, model, Ranks.join(config, rank, num_ranks, address)))
        return trainers[-1]

    trainers: list[PolicyTrainer] = []
    for engine in engines:
        for scenario, options in scenarios_of(engine).items():
            if num_ranks == 1 and plain(scenario) != scenario:
                continue
            chunks = patch.object(streamed_layers, "CPU_CHUNK_TOKENS", 7)
            with chunks, gathered_by_layer() if "by_layer" in scenario else nullcontext():
                budget = 8192 if num_ranks == 1 else 60
                settings = ENGINES[engine] | {"max_tokens_per_microbatch": budget} | options
                trainer = make(optimizer=OptimizerConfig(**LINEAR), **settings)
                rows = rows_of(scenario).select(share_of(scenario, rank, num_ranks))
                torch.save(
                    update(trainer, rows, directory / engine / scenario), directory / f"{engine}.{scenario}.{rank}.pt"
                )
        trainer.export(str(directory / engine / "exported"))
        trainer = make(**ENGINES[engine], optimizer=OptimizerConfig(lr=1e-3))
        learned = twenty_steps(trainer, rank, num_ranks) | {"state": whole_state(trainer)}
        if rank == 0:
            torch.save(learned, directory / f"{engine}.learned.pt")
        for way in WAYS if num_ranks > 1 else ():
            with way_of(way) as may_write:
                publish_beside_a_step(trainer, rank, num_ranks, may_write, directory / engine / way)
    if num_ranks > 1:
        torch.save(carry_through(engines, make, rank, num_ranks), directory / f"carried.{rank}.pt")
    for trainer in reversed(trainers):
        trainer.close()


def scenarios_of(engine: str) -> dict[str, dict[str, Any]]:
    """Stages 1 and 2 gather nothing by layer, and no engine but FSDP2 gathers inside of what is compiled; FSDP2 has
    nothing to offload on CPUs."""
    if engine == "fsdp":
        return SCENARIOS
    scenarios = SCENARIOS | {
        "offloaded": {"offload": True},
        "offloaded_bfloat16": {"offload": True, "dtype": "bfloat16"},
    }
    others = ("compiled", "same_length", "streamed" if engine == "zero3" else "by_layer")
    return {name: options for name, options in scenarios.items() if not any(other in name for other in others)}


@contextmanager
def gathered_by_layer() -> Iterator[None]:
    """Small models are kept whole between forward and backward (FSDP2), or from step to step (ZeRO-3)."""
    whole, persistent = fsdp.KEEP_WHOLE_BYTES, deepspeed.PERSISTENT_ELEMENTS
    fsdp.KEEP_WHOLE_BYTES = deepspeed.PERSISTENT_ELEMENTS = 0
    yield
    fsdp.KEEP_WHOLE_BYTES, deepspeed.PERSISTENT_ELEMENTS = whole, persistent


def update(trainer: PolicyTrainer, rows: Rows, directory: Path) -> dict[str, Any]:
    """One update and what can be seen of it."""
    trainer.check_scores()
    before = trainer.logprobs(rows)
    report = trainer.update(rows, ppo_clip_loss)
    after = trainer.logprobs(rows)
    trainer.publish(str(directory), 1)
    elements = sum(len(piece.values) for piece in trainer.engine.pieces())
    return {
        "metrics": report.metrics,
        "tokens": report.num_tokens,
        "before": before,
        "after": after,
        "elements": elements,
    }


def twenty_steps(trainer: PolicyTrainer, rank: int, num_ranks: int) -> dict[str, list[float]]:
    """Losses and norms of updates on two batches of demonstrations in turn."""
    losses, norms = [], []
    for step in range(20):
        rows = random_rows(12, seed=step % 2).select(list(range(rank, 12, num_ranks)))
        metrics = trainer.update(rows, sft_loss).metrics
        losses.append(metrics["actor/loss"])
        norms.append(metrics["actor/grad_norm"])
    return {"losses": losses, "norms": norms}


WAYS = ("in host memory", "by copies")
"""Ways of values into a publication: at once, or, as from a device, by copies that a thread writes later."""


@contextmanager
def way_of(way: str) -> Iterator[threading.Event]:
    """Values go that way. Nothing is written of copies before the event."""
    may_write, writer = threading.Event(), publishing.PublicationWriter

    def held_up(*arguments: Any) -> Any:
        assert may_write.wait(600)
        return writer(*arguments)

    with ExitStack() as changed:
        if way == "by copies":
            for module in (publishing, publication):
                changed.enter_context(patch.object(module, "needs_buffers", lambda values: True))
            changed.enter_context(patch.object(publishing, "PublicationWriter", held_up))
        yield may_write


def publish_beside_a_step(
    trainer: PolicyTrainer, rank: int, num_ranks: int, may_write: threading.Event, directory: Path
) -> None:
    """Version 2 is begun, and written after another update, a copy of the state and the beginning of a save."""
    may_write.set()
    trainer.publish(str(directory / "before"), 1)
    may_write.clear()
    trainer.begin_publishing(str(directory), 2)
    rows = random_rows(12, seed=2).select(list(range(rank, 12, num_ranks)))
    trainer.update(rows, sft_loss)
    state = TrainingState({"policy": trainer})
    copies = MemoryCheckpoint(state, trainer, str(directory / "states"))
    assert copies.save(1) is None
    assert state.begin(str(directory / "saved"))
    may_write.set()
    assert trainer.finish_publishing(2, 600).version == 2
    assert state.finish()
    copies.close()
    trainer.publish(str(directory), 3)


def carry_through(engines: list[str], make: Any, rank: int, num_ranks: int) -> dict[str, Any]:
    """The state of one engine through all the others and back; then one more step from it with each."""
    options = {engine: make(**ENGINES[engine], optimizer=OptimizerConfig(lr=1e-3)) for engine in engines}
    rows = random_rows(12).select(list(range(rank, 12, num_ranks)))
    for _ in range(3):
        options[engines[0]].update(rows, sft_loss)
    first = state = whole_state(options[engines[0]])
    results: dict[str, Any] = {"first": first, "states": {}, "losses": {}, "steps": {}}
    for engine in (*engines[1:], engines[0]):
        put_state(options[engine], state, 3)
        state = whole_state(options[engine])
        results["states"][engine], results["steps"][engine] = state, options[engine].engine.num_optimizer_steps()
    for engine, trainer in options.items():
        results["losses"][engine] = [trainer.update(rows, sft_loss).metrics["actor/loss"] for _ in range(2)]
    return results


if __name__ == "__main__":
    gc.collect = lambda *_: 0  # reports of memory call it, 16 times for each engine of DeepSpeed in bfloat16
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]), sys.argv[6:])
