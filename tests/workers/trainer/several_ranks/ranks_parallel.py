"""One rank of `test_ranks_parallel.py`, in a process of its own:
`python -m tests.workers.trainer.several_ranks.ranks_parallel RANK NUM_RANKS ADDRESS MODELS DIRECTORY`.

Runs every scenario of that number of ranks and leaves what the tests look at in DIRECTORY. The same scenarios with one
rank, padded rows and none of their ways to split the work are what they are compared to.
"""

import ctypes
import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from penstock.algorithms.builtin.imitation import divergence_loss
from penstock.algorithms.graph.columns import ROUTED_EXPERTS
from penstock.algorithms.losses import ppo_clip_loss, value_loss
from penstock.conf.errors import ModelError
from penstock.conf.trainer import LoraConfig, OptimizerConfig, PolicyConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.trainer.engines import fsdp
from penstock.workers.trainer.models.token_scores import LogitChange
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.scalar import CriticTrainer
from penstock.workers.trainer.training_state import TrainingState
from penstock.workers.trainer.update.tally import with_explained_variance
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.weight_senders import SendingRank, WeightStream
from tests.workers.trainer.conftest import copied

LINEAR = {"lr": 1.0, "eps": 1.0, "betas": [0.0, 0.0], "clip_norm": 0.5}
"""AdamW whose step is -g / (|g| + 1) of the clipped gradient: weights after one update show it."""
LORA = {"lora": LoraConfig(rank=4, alpha=8)}
TWO = LORA | {"policies": {"a": PolicyConfig(), "b": PolicyConfig()}}
OF_EXPERTS = {"lora": LoraConfig(rank=4, alpha=8, target_modules=["all-linear", "gate_up_proj", "down_proj"])}
TENSOR = {"tensor_parallel_size": 2}
SEQUENCE = {"sequence_parallel_size": 2}
BY_LENGTH = {"sequence_parallel_size": "auto"}
COPIES = {"shard_size": 2}
BALANCED = {"router_aux_loss_coef": 0.5}
PACKED = {"packing": "always"}
SHARED = {"share_prefixes": "always"}
SCENARIOS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "lora": LORA,
        "lora_gathered_by_layer": LORA,
        "two_policies": TWO,
        "two_policies_gathered_by_layer": TWO,
        "tensor_two_policies": TENSOR | TWO,
        "sequence_two_policies": SEQUENCE | TWO,
        "bfloat16_two_policies_gathered_by_layer": TWO | {"dtype": "bfloat16"},
        "tensor": TENSOR,
        "tensor_checkpointed": TENSOR | {"activation_checkpointing": True},
        "tensor_lora": TENSOR | LORA,
        "sequence": SEQUENCE,
        "sequence_checkpointed": SEQUENCE | {"activation_checkpointing": True},
        "sequence_lora": SEQUENCE | LORA,
        "sequence_minibatches": SEQUENCE | {"num_minibatches": 3},
        "summed_tensor": TENSOR,
        "bfloat16_lora_gathered_by_layer": LORA | {"dtype": "bfloat16"},
        "bfloat16_tensor_lora": TENSOR | LORA | {"dtype": "bfloat16"},
        "bfloat16_sequence": SEQUENCE | {"dtype": "bfloat16"},
        "critic": {},
        "critic_minibatches": {"num_minibatches": 3},
        "critic_tensor": TENSOR,
        "critic_sequence": SEQUENCE,
        "whole_copies": {"shard_size": 1},
        "experts": BALANCED,
        "experts_tensor": BALANCED | TENSOR,
        "experts_replayed_tensor_checkpointed": TENSOR | {"activation_checkpointing": True},
        "experts_lora_checkpointed": OF_EXPERTS | {"activation_checkpointing": True},
        "candidates": {},
        "candidates_tensor": TENSOR,
        "candidates_sequence": SEQUENCE,
        "candidates_by_length": BY_LENGTH,
        "candidates_packed_sequence": SEQUENCE | PACKED,
        "packed_tensor_lora": TENSOR | LORA | PACKED,
        "packed_sequence_checkpointed": SEQUENCE | PACKED | {"activation_checkpointing": True},
        "packed_critic_sequence": SEQUENCE | PACKED,
        "shared": SHARED,
        "shared_tensor_lora": TENSOR | LORA | SHARED,
        "shared_sequence_checkpointed": SEQUENCE | SHARED | {"activation_checkpointing": True},
        "shared_critic_sequence": SEQUENCE | SHARED,
    },
    4: {
        "packed_tensor_and_sequence": TENSOR | SEQUENCE | PACKED,
        "shared_tensor_and_sequence": TENSOR | SEQUENCE | SHARED,
        "critic_by_length": BY_LENGTH,
        "tensor_and_data": TENSOR,
        "tensor_and_data_lora": TENSOR | LORA,
        "tensor_and_data_gathered_by_layer": TENSOR,
        "sequence_and_data": SEQUENCE,
        "tensor_and_sequence": TENSOR | SEQUENCE,
        "copies": COPIES,
        "copies_minibatches_gathered_by_layer": COPIES | {"num_minibatches": 3},
        "copies_lora_gathered_by_layer": COPIES | LORA,
        "copies_two_policies_gathered_by_layer": COPIES | TWO,
        "copies_and_tensor_lora": COPIES | TENSOR | LORA,
        "copies_and_sequence": COPIES | SEQUENCE,
        "copies_experts_lora_gathered_by_layer": COPIES | OF_EXPERTS,
        "experts_tensor_and_data_gathered_by_layer": BALANCED | TENSOR,
    },
    8: {"copies_and_shards_and_tensor_lora": TENSOR | LORA | {"shard_size": 4}},
}
"""Scenarios by number of ranks. "summed": of a model whose norms see each rank's own heads only (Qwen3).
"experts": of a mixture. "replayed": whose tokens go to experts that are not its routers' choice. "shared": of groups
that begin with 24 tokens. "two_policies": each of which does what the one of the scenario with "lora" in its place
does. "candidates": of a teacher, whose divergence is the loss."""
LARGE = {"large": {}, "large_tensor": TENSOR, "large_lora": LORA}
"""Ways of loading a model whose memory is measured, on four ranks."""
SPLITS = ("tensor_parallel_size", "sequence_parallel_size")
OF_SEVERAL = ("shard_size", "packing", "share_prefixes")
NUM_ROWS, CANDIDATES = 12, 3
State = list[Piece]


def rows() -> Rows:
    random = np.random.default_rng(5)
    responses = [random.integers(3, 90, length).tolist() for length in random.integers(1, 21, NUM_ROWS)]
    return Rows.from_lists(
        {
            "prompt_ids": [random.integers(3, 90, random.integers(1, 10)).tolist() for _ in responses],
            "response_ids": responses,
            "behavior_logprobs": [(-4.5 + 0.1 * random.normal(size=len(ids))).tolist() for ids in responses],
            "advantage": random.normal(size=NUM_ROWS).tolist(),
        },
        group_ids=[index // 3 for index in range(NUM_ROWS)],
    )


def with_experts(rows: Rows) -> Rows:
    """The rows as if an engine had sent tokens to experts of its own: two of four in each of two layers."""
    random, lengths = np.random.default_rng(6), rows.lengths("prompt_ids") + rows.lengths("response_ids") - 1
    chosen = [random.permuted(np.tile(np.arange(4, dtype=np.uint8), (2 * length, 1)), axis=1) for length in lengths]
    return rows.with_column(ROUTED_EXPERTS, [one[:, :2].reshape(-1) for one in chosen])


def with_candidates(rows: Rows) -> Rows:
    """The rows as if a teacher had named the likeliest tokens in each place."""
    random, lengths = np.random.default_rng(8), rows.lengths("response_ids")
    ids = [np.stack([random.permutation(90)[:CANDIDATES] for _ in range(length)]).reshape(-1) for length in lengths]
    logprobs = [np.tile(np.log([0.5, 0.2, 0.1]), length).astype(np.float32) for length in lengths]
    return rows.with_column("candidate_ids", ids).with_column("teacher_candidates", logprobs)


def with_beginnings(rows: Rows) -> Rows:
    """The rows as if all of a group began with the same 24 tokens."""
    beginnings = np.random.default_rng(7).integers(3, 90, (NUM_ROWS, 24))
    prompts = zip(rows.group_ids, rows.arrays("prompt_ids"), strict=True)
    return rows.with_column("prompt_ids", [np.concatenate([beginnings[group], prompt]) for group, prompt in prompts])


def share_of(rank: int, num_ranks: int, options: dict[str, Any]) -> list[int]:
    """Positions of a rank's rows: those that split one another's work have the same."""
    peers = TrainerConfig(num_ranks=num_ranks, **options).ranks_per_row
    return list(range(rank // peers, NUM_ROWS, num_ranks // peers))


def run(rank: int, num_ranks: int, address: str | None, models: str, directory: Path) -> None:
    """All scenarios, one trainer after the other in one process group. One rank: those of every number."""
    torch.set_num_threads(1)
    scenarios = SCENARIOS.get(num_ranks) or {name: some[name] for some in SCENARIOS.values() for name in some}
    trainers = []
    for scenario, options in scenarios.items():
        if num_ranks == 1:
            options = {name: value for name, value in options.items() if name not in (*SPLITS, *OF_SEVERAL)}
            options["share_prefixes"] = "never"
        budget = 8192 if num_ranks == 1 else 60
        config = TrainerConfig(
            num_ranks=num_ranks, max_tokens_per_microbatch=budget, optimizer=OptimizerConfig(**LINEAR), **options
        )
        fsdp.KEEP_WHOLE_BYTES = 0 if "gathered_by_layer" in scenario else 2**31
        kind = CriticTrainer if "critic" in scenario else PolicyTrainer
        kinds = {"summed": "qwen3", "experts": "mixtral"}
        model = f"{models}/{next((name for word, name in kinds.items() if word in scenario), 'qwen2')}"
        trainers.append(kind(config, model, Ranks.join(config, rank, num_ranks, address)))
        every_row = rows()
        if "replayed" in scenario:
            trainers[-1].replay_experts()
            every_row = with_experts(every_row)
        if "candidates" in scenario:
            every_row = with_candidates(every_row)
        if "shared" in scenario:
            every_row = with_beginnings(every_row)
        refusal = refused(trainers[-1]) if kind is PolicyTrainer else ""
        result = one_update(trainers[-1], every_row.select(share_of(rank, num_ranks, options)))
        result["refusal"] = refusal
        trainers[-1].publish(str(directory / scenario), 1)
        side = SendingRank.of(trainers[-1])
        result["streamed"] = dict(WeightStream(side))
        if config.lora.rank:
            trainers[-1].config = replace(config, lora=replace(config.lora, publish="adapter"))
            del trainers[-1].publisher.layout
            trainers[-1].publish(str(directory / scenario / "alone"), 1)
        torch.save(result, directory / f"{scenario}.{rank}.pt")
        trainers[-1].export(str(directory / scenario / "exported"))
    if num_ranks == 4:
        started = trainers[list(scenarios).index("copies")]
        torch.save(through_checkpoints(started, f"{models}/qwen2", rank, directory), directory / f"resumed.{rank}.pt")
    for name, options in LARGE.items() if num_ranks == 4 else ():
        loaded = load_large(options, f"{models}/large", rank, num_ranks, directory / name)
        torch.save(loaded, directory / f"{name}.{rank}.pt")
    trainers[0].close()


def refused(trainer: PolicyTrainer) -> str:
    """The refusal of logits that are not the model's own, after those that are have passed."""
    trainer.check_scores()
    output_layer = trainer.model.lm.get_output_embeddings()
    output_layer.change = LogitChange(scale=20.0)
    try:
        trainer.check_scores()
    except ModelError as error:
        return str(error)
    finally:
        output_layer.change = LogitChange()
    return ""


RESUMED = {"shards": {}, "copies": COPIES, "tensor_and_copies": COPIES | TENSOR, "whole_copies": {"shard_size": 1}}
"""Ways to split a model of four ranks, each of which goes on from a checkpoint of the one before."""


def through_checkpoints(started: PolicyTrainer, model: str, rank: int, directory: Path) -> dict[str, Any]:
    """The state of the trainer and of each that goes on from it, and what they answer after one more update."""
    trainers, options = {"started": started}, {"started": COPIES} | RESUMED
    states, last = {"started": state_of(started.engine)}, started
    for name in RESUMED:
        saving = TrainingState({"policy": last})
        assert saving.begin(str(directory / f"before_{name}"))
        files = [file for some in last.ranks.gather_ranks(saving.finish()) for file in some]
        config = TrainerConfig(num_ranks=4, optimizer=OptimizerConfig(**LINEAR), **options[name])
        last = trainers[name] = PolicyTrainer(config, model, Ranks.join(config, rank, 4))
        TrainingState({"policy": last}).load(str(directory / f"before_{name}"), files)
        states[name] = state_of(last.engine)
    answers = {}
    for name, trainer in trainers.items():
        mine = share_of(rank, 4, options[name])
        trainer.update(rows().select(mine), ppo_clip_loss)
        answers[name] = dict(zip(mine, trainer.logprobs(rows().select(mine)), strict=True))
    return {"states": states, "answers": answers}


def load_large(options: dict[str, Any], model: str, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """The cost of loading a model of 184 MB and exporting it for this rank, in bytes, and whether it has what is in the
    file."""
    before = forget_peak()
    config = TrainerConfig(num_ranks=num_ranks, **options)
    trainer = PolicyTrainer(config, model, Ranks.join(config, rank, num_ranks))
    peak = own_bytes("VmHWM") - before
    before = forget_peak()
    trainer.export(str(directory))
    exported_peak = own_bytes("VmHWM") - before
    parameters = [fsdp.local(parameter) for parameter in trainer.model.parameters()]
    stored = load_file(f"{model}/model.safetensors")
    return {
        "peak": peak,
        "exported_peak": exported_peak,
        "shard": sum(parameter.nbytes for parameter in parameters),
        "layer": sum(stored[name].nbytes for name in stored if name.startswith("model.layers.0.")),
        "right": [
            torch.equal(piece.values, stored[piece.name].reshape(-1)[piece.first :][: len(piece.values)])
            for piece in trainer.engine.pieces()
        ],
    }


def forget_peak() -> int:
    """Let the peak of this process's memory begin anew; return what is resident now, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed would be used again, and not be seen
    Path("/proc/self/clear_refs").write_text("5")
    return own_bytes("VmHWM")


def own_bytes(field: str) -> int:
    """A field of this process's status, in bytes: VmHWM is the most that was resident, mapped files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def one_update(trainer: PolicyTrainer, rows: Rows) -> dict[str, Any]:
    def answers() -> list[np.ndarray]:
        return trainer.values(rows) if isinstance(trainer, CriticTrainer) else trainer.logprobs(rows)

    before = answers()
    if isinstance(trainer, CriticTrainer):
        returns = [np.linspace(-1, 1, length, dtype=np.float32) for length in rows.lengths("response_ids")]
        report = trainer.update(rows.with_column("returns", returns).with_column("old_values", before), value_loss)
        metrics = with_explained_variance(report.metrics, "critic")
    else:
        metrics = trainer.update(rows, divergence_loss if "candidate_ids" in rows else ppo_clip_loss).metrics
    for policy in trainer.policies[1:]:
        with trainer.using(policy):
            trainer.update(rows, ppo_clip_loss)
    after = answers()
    state = wipe_and_restore(trainer)
    found = {"metrics": metrics, "before": before, "after": after, "state": state, "restored": answers()}
    found |= {"shared": leave_for(trainer.engine, state), "back": answers()}
    return found | ({"likeliest": trainer.candidates(rows, CANDIDATES)} if "candidate_ids" in rows else {})


def state_of(engine: Any) -> State:
    return copied(engine.state())


@torch.no_grad()
def wipe_and_restore(trainer: PolicyTrainer) -> State:
    """Forget weights and optimizer state and read them back from what the pieces said: as resuming does. Those."""
    engine: Any = trainer.engine
    state = state_of(engine)
    for parameter, moments in engine.optimizer.state.items():
        for tensor in (parameter, *(moments[name] for name in fsdp.MOMENTS)):
            fsdp.local(tensor).fill_(float("nan"))
    for piece, before in zip(engine.state(), state, strict=True):
        piece.values.copy_(before.values)
    trainer.loaded(trainer.counters)
    return state


def leave_for(engine: Any, state: State) -> bool:
    """Leave the device for a copy of the state, and come back. Returns whether memory of the copy was in use."""
    kept = {piece.name: piece.values.clone() for piece in state}
    engine.leave_device(kept)
    places = {values.data_ptr() for values in kept.values() if values.numel()}
    in_use = {fsdp.local(parameter).data_ptr() for parameter in engine.model.parameters()}
    engine.take_device()
    return bool(places & in_use)


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
