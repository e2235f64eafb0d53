"""Claims about a trainer on a device that is not the CPU, each a function, proven in a process of their own: on the
device of `tests/fakes/device.py`, or on a GPU. It writes the failures by claim as JSON.

    python -m tests.workers.trainer.on_a_device.claims MODEL DIRECTORY RESULTS [cuda]
"""

import gc
import json
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor

from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.stage import Stage, TrainedPolicy
from penstock.algorithms.losses import (
    SURROGATES,
    interpolated_policy_loss,
    policy_loss,
    ppo_clip_loss,
    sft_loss,
    value_loss,
    with_entropy_bonus,
)
from penstock.algorithms.losses.preference import (
    bradley_terry_loss,
    dpo_loss,
    ipo_loss,
    kto_loss,
    orpo_loss,
    simpo_loss,
)
from penstock.conf.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.runtime.host_memory import padded
from penstock.workers.trainer import memory_checkpoint
from penstock.workers.trainer.assembly import TrainerParts, assemble_scorer, assemble_trainer
from penstock.workers.trainer.engines import train_engine
from penstock.workers.trainer.engines.mesh import local
from penstock.workers.trainer.memory_checkpoint import MemoryCheckpoint
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.rank_spec import ScorerSpec, TrainerSpec
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.scalar import CriticTrainer, ScalarTrainer
from penstock.workers.trainer.training_state import TrainingState
from penstock.workers.weights.publication import publication as publications
from penstock.workers.weights.publication.publication_files import MappedWeights
from tests.mixtures import build_mixture
from tests.workers.trainer.conftest import random_rows
from tests.workers.trainer.several_ranks.ranks import LINEAR, gathered_by_layer
from tests.workers.trainer.several_ranks.ranks_parallel import with_experts

if ON_A_GPU := sys.argv[4:] == ["cuda"]:
    DEVICE = torch.device("cuda", 0)
    TO_DEVICE, TO_HOST, crossed = "", "", Counter[str]()

    def live_bytes() -> int:
        """Bytes on the GPU that something still refers to, but for the work space of cuBLAS."""
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        return torch.cuda.memory_allocated()

else:
    from tests.fakes.device import DEVICE, TO_DEVICE, TO_HOST, crossed, live_bytes

PATHS: list[Path] = []
POLICIES = (TrainedPolicy("policy", ppo_clip_loss),)
"""The model, and a directory to write to."""
KINDS: dict[str, dict[str, Any]] = {
    "gathered whole": {},
    "gathered by layer": {},
    "offloaded": {"offload": True},
    "in bfloat16": {"dtype": "bfloat16"},
    "offloaded in bfloat16": {"offload": True, "dtype": "bfloat16"},
    "with adapters": {"lora": LoraConfig(rank=2)},
    "that recomputes activations": {"activation_checkpointing": True},
    "that keeps activations on the host": {"activation_offload": True},
    "that keeps inputs of layers on the host": {"activation_offload": True, "activation_checkpointing": True},
    "with tiles of logits": {"logprob_chunk_mib": 0.01},
}
POLICY_LOSSES = {
    **{name: partial(policy_loss, surrogate=name, kl_coef=0.1) for name in SURROGATES},
    "interpolated": interpolated_policy_loss,
    "entropy bonus": with_entropy_bonus(ppo_clip_loss, 0.1),
    **{loss.__name__: loss for loss in (sft_loss, dpo_loss, ipo_loss, simpo_loss, orpo_loss, kto_loss)},
}


def made(
    kind: type[PolicyTrainer] = PolicyTrainer, *, on: torch.device = DEVICE, path: str = "", **options: Any
) -> Any:
    trainer_options = {name: options.pop(name) for name in ("trainable",) if name in options}
    config = TrainerConfig(**({"optimizer": OptimizerConfig(**LINEAR), "max_tokens_per_microbatch": 100} | options))
    return kind(config, path or str(PATHS[0]), replace(Ranks.join(config), device=on), **trainer_options)


def rows_of(seed: int = 0) -> Rows:
    """Rows with the columns of every loss."""
    random, rows = np.random.default_rng(seed), random_rows(6, seed=seed)
    for name in ("reference_logprobs", "staleness", "returns", "old_values"):
        rows = rows.with_column(
            name, [random.random(length).astype(np.float32) for length in rows.lengths("response_ids")]
        )
    first = np.arange(len(rows)) % 2
    return rows.with_column("preferred", 1.0 - 2.0 * first).with_column("desirable", first.astype(float))


def state_of(trainer: PolicyTrainer) -> dict[str, Tensor]:
    return {piece.name: piece.values.cpu().clone() for piece in trainer.engine.state()}


def assert_near(one: dict[str, Any], other: dict[str, Any], within: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            torch.as_tensor(other[name]), torch.as_tensor(value), atol=within, rtol=within, msg=name
        )


def assert_nothing_there(what: str = "") -> None:
    assert live_bytes() == 0, f"{live_bytes()} bytes stay on the device {what}"


@contextmanager
def of_kind(kind: str) -> Iterator[dict[str, Any]]:
    if kind == "gathered by layer":
        with gathered_by_layer():
            yield {}
    else:
        yield KINDS[kind]


def it_computes_what_a_trainer_on_the_cpu_computes(kind: str) -> None:
    with of_kind(kind) as options:
        trainers = [made(on=torch.device("cpu"), **options), made(**options)]
        reports = [[trainer.update(rows_of(seed), ppo_clip_loss).metrics for seed in range(2)] for trainer in trainers]
        logprobs = [dict(enumerate(trainer.logprobs(rows_of()))) for trainer in trainers]
        within = 2e-2 if "bfloat16" in kind else 1e-4
        for one, other in zip(*reports, strict=True):
            assert_near(one, other, within)
        assert_near(*logprobs, within)
        assert_near(*map(state_of, trainers), within)


def it_leaves_nothing_there_and_comes_back_the_same(kind: str) -> None:
    with of_kind(kind) as options:
        stays, leaves = made(**options), made(**options)
        for seed in range(2):
            for trainer in (stays, leaves):
                trainer.logprobs(rows_of(seed))
                trainer.update(rows_of(seed), ppo_clip_loss)
            leaves.leave_device()
            leaves.take_device()
        assert live_bytes()
        assert_near(state_of(stays), state_of(leaves), 0.0)
        for trainer in (stays, leaves):
            trainer.leave_device()
        assert_nothing_there()


def it_leaves_into_the_same_host_memory_each_time_and_copies_what_is_frozen_once() -> None:
    for options in ({}, {"lora": LoraConfig(rank=2)}, {"lora": LoraConfig(rank=2), "dtype": "bfloat16"}):
        trainer, moved, memory = made(**options), [], []
        for seed in range(3):
            trainer.update(rows_of(seed), ppo_clip_loss)
            before = crossed[TO_HOST]
            trainer.leave_device()
            moved.append(crossed[TO_HOST] - before)
            sizes = [buffer.num_bytes for buffer in (trainer.engine.host, trainer.engine.frozen_host)]
            memory.append((*sizes, *(local(one).data_ptr() for one in trainer.model.parameters())))
            assert {one.device.type for one in trainer.model.parameters()} == {"cpu"}
            trainer.take_device()
        parameters = list(trainer.model.parameters())
        frozen = sum(one.nbytes for one in parameters if not one.requires_grad)
        trained = [one.nbytes for one in parameters if one.requires_grad]
        parts = [one.nbytes for one in parameters] + 2 * trained
        assert memory == memory[:1] * 3
        assert sum(memory[0][:2]) == sum(map(padded, parts))
        assert moved[1:] == [moved[0] - frozen] * 2
        assert moved[1] - 3 * sum(trained) < 1000  # buffers, and the count of AdamW's steps
        trainer.leave_device()
        assert_nothing_there()


def policy_and_critic(options: dict[str, Any]) -> list[PolicyTrainer]:
    torch.manual_seed(0)  # for the critic's head
    return [made(**options), made(CriticTrainer, **options)]


def it_leaves_by_the_copy_that_it_keeps_and_comes_back_the_same(kind: str) -> None:
    """Also a critic beside it. The copy is what was written, and an export is made of it meanwhile."""
    directory = PATHS[1] / f"kept {kind}"
    with of_kind(kind) as options:
        stays, leaves = (policy_and_critic(options) for _ in range(2))
        states = [TrainingState(dict(zip(("policy", "critic"), some, strict=True))) for some in (stays, leaves)]
        copies = MemoryCheckpoint(states[1], leaves[0], str(directory))
        for seed in (1, 2):
            for policy, critic in (stays, leaves):
                critic.update(rows_of(seed), value_loss)
                policy.update(rows_of(seed), ppo_clip_loss)
            assert copies.save(seed) is None
            kept = TrainerParts(leaves[0], states[1], copies, worker=None)
            before = crossed[TO_HOST]
            kept.leave_device()
            assert options.get("offload") or "lora" in options or crossed[TO_HOST] - before < 1000
            for one in stays:
                one.leave_device()
            assert_nothing_there()
            for one in stays:
                one.take_device()
            leaves[0].export(str(directory / "exported"))
            kept.take_device()
        for one, other in zip(stays, leaves, strict=True):
            assert_near(state_of(one), state_of(other), 0.0)
            one.leave_device()
            other.leave_device()
        assert_nothing_there()
        again = policy_and_critic(options)
        state = TrainingState({"policy": again[0], "critic": again[1]})
        MemoryCheckpoint(state, again[0], str(directory)).restore(2)
        for one, other in zip(stays, again, strict=True):
            assert_near(state_of(one), state_of(other), 0.0)
            other.leave_device()
        assert_nothing_there()


def every_loss_is_computed_there(name: str) -> None:
    trainers = [made(on=torch.device("cpu")), made()]
    assert_near(*(trainer.update(rows_of(), POLICY_LOSSES[name]).metrics for trainer in trainers), 1e-4)


def a_mixture_follows_the_engines_experts_there() -> None:
    """Also with adapters of experts, and nothing of the records stays behind."""
    path = build_mixture("mixtral", PATHS[1] / "mixture")
    rows = with_experts(random_rows(6))
    for options in ({}, {"lora": LoraConfig(rank=2, target_modules=["q_proj", "gate_up_proj", "down_proj"])}):
        trainers = [made(on=device, path=path, **options) for device in (torch.device("cpu"), DEVICE)]
        for trainer in trainers:
            if not ON_A_GPU or options:  # the others count by what the fake device has not, and know no adapters
                trainer.model.lm.set_experts_implementation("eager")
            trainer.replay_experts()
            trainer.check_scores()
        reports = [trainer.update(rows, ppo_clip_loss).metrics for trainer in trainers]
        assert_near(*reports, 1e-4)
        assert_near(*map(state_of, trainers), 1e-4)
        trainers[1].leave_device()
        assert_nothing_there()


def a_critic_and_a_reward_model_are_trained_there() -> None:
    for kind, loss in ((CriticTrainer, value_loss), (ScalarTrainer, bradley_terry_loss)):
        trainers = [made(kind, on=torch.device("cpu")), made(kind)]
        assert_near(*(trainer.update(rows_of(), loss).metrics for trainer in trainers), 1e-4)
        assert_near(*(dict(enumerate(trainer.values(rows_of()))) for trainer in trainers), 1e-4)
        assert_near(*({"scores": trainer.scores(rows_of())} for trainer in trainers), 1e-4)


def kept_activations_are_not_there_when_backward_begins() -> None:
    found = []
    for options in ({}, {"activation_offload": True}):
        trainer, seen = made(**options), []
        backward = trainer.engine.backward

        def noted(loss: Tensor, seen: list[int] = seen, backward: Any = backward) -> None:
            seen.append(live_bytes())
            backward(loss)

        with patch.object(trainer.engine, "backward", noted):
            trainer.update(rows_of(), ppo_clip_loss)
        trainer.leave_device()
        found.append(seen)
        assert_nothing_there()
    assert max(found[1]) < 0.7 * max(found[0]), found


def kept_copies_bring_another_rank_to_the_same_bits() -> None:
    first, second = made(), made()
    states = [TrainingState({"policy": trainer}) for trainer in (first, second)]
    copies = MemoryCheckpoint(states[0], first, str(PATHS[1] / "copies"))
    for step in (1, 2):
        first.update(rows_of(step), ppo_clip_loss)
        assert copies.save(step) is None
    MemoryCheckpoint(states[1], second, str(PATHS[1] / "copies")).restore(2)
    for trainer in (first, second):
        trainer.update(rows_of(3), ppo_clip_loss)
    assert_near(state_of(first), state_of(second), 0.0)
    for trainer in (first, second):
        trainer.leave_device()
    assert_nothing_there()


def a_save_under_way_keeps_nothing_there() -> None:
    trainer = made()
    state, may_write = TrainingState({"policy": trainer}), threading.Event()
    trainer.update(rows_of(), ppo_clip_loss)
    write = dcp.save

    def held_up(*arguments: Any, **options: Any) -> Any:
        assert may_write.wait(600)
        return write(*arguments, **options)

    with patch.object(dcp, "save", held_up):
        for turn in range(3):
            assert state.begin(str(PATHS[1] / f"save-{turn}"))
            trainer.leave_device()
            assert_nothing_there(f"in turn {turn}")
            may_write.set()
            assert state.finish()
            may_write.clear()
            trainer.take_device()
            expected = state_of(trainer)
            trainer.update(rows_of(turn), ppo_clip_loss)
            state.load(str(PATHS[1] / f"save-{turn}"))
            assert_near(state_of(trainer), expected, 0.0)


def publications_and_exports_come_from_there() -> None:
    trainer = made()
    trainer.update(rows_of(), ppo_clip_loss)
    expected, there = {piece.name: piece.values.cpu() for piece in trainer.engine.pieces()}, live_bytes()
    trainer.begin_publishing(str(PATHS[1] / "weights"), 1)
    trainer.update(rows_of(1), ppo_clip_loss)
    published = MappedWeights(trainer.finish_publishing(1, 600))
    assert_near(expected, {name: values.reshape(-1) for name, values in published.tensors()}, 0.0)
    assert live_bytes() == there
    expected = {piece.name: piece.values.cpu() for piece in trainer.engine.pieces()}
    trainer.export(str(PATHS[1] / "exported"))
    exported = PolicyTrainer(TrainerConfig(), str(PATHS[1] / "exported"))
    assert_near(expected, {piece.name: piece.values for piece in exported.engine.pieces()}, 0.0)


def a_hash_of_the_weights_is_made_there_and_shows_one_bit() -> None:
    trainer = made()
    before = crossed[TO_HOST]
    found = trainer.hash_of_weights()
    assert crossed[TO_HOST] - before <= 8 * len(list(trainer.engine.pieces())), "more than a number a tensor came back"
    assert made().hash_of_weights() == found
    weights = local(next(trainer.model.lm.parameters())).detach()
    changed = weights.cpu()
    changed.view(torch.int32).view(-1)[-1] ^= 1
    weights.copy_(changed.to(DEVICE))
    assert trainer.hash_of_weights() != found


@contextmanager
def ranks_on_the_device() -> Iterator[None]:
    join = Ranks.join
    with patch.object(Ranks, "join", lambda *arguments: replace(join(*arguments), device=DEVICE)):
        yield


def a_critic_leaves_with_its_policy() -> None:
    stages = (Stage("values", "values", "batch", reads=(), writes=(Column("old_values", "float32", "token"),)),)
    spec = TrainerSpec(
        name="t", config=TrainerConfig(), model_path=str(PATHS[0]), stage="train", policies=POLICIES, in_trainer=stages
    )
    with ranks_on_the_device():
        parts: TrainerParts = assemble_trainer(spec, None)
    for trainer, loss in zip(parts.state.trainers.values(), (ppo_clip_loss, value_loss), strict=True):
        trainer.update(rows_of(), loss)
    parts.leave_device()
    assert_nothing_there()
    parts.take_device()
    for trainer, loss in zip(parts.state.trainers.values(), (ppo_clip_loss, value_loss), strict=True):
        trainer.update(rows_of(), loss)


@dataclass
class Traffic:
    """Bytes that a colocated step moves, for each trained parameter: over the bus, within host memory, and through a
    checksum."""

    to_host: int = 0
    to_device: int = 0
    copied: int = 0
    summed: int = 0


@contextmanager
def counting(num_parameters: int) -> Iterator[Traffic]:
    traffic, before = Traffic(), crossed.copy()
    copy, block = publications.copy_and_sum, xxhash.xxh3_128_hexdigest

    def copied(values: Tensor, target: memoryview, dtype: str) -> str:
        traffic.copied += len(target)
        traffic.summed += len(target)
        return copy(values, target, dtype)

    def summed(data: Any) -> str:
        traffic.summed += len(data)
        return block(data)

    with ExitStack() as patches:
        patches.enter_context(patch.object(xxhash, "xxh3_128_hexdigest", summed))
        for module in (publications, memory_checkpoint):
            patches.enter_context(patch.object(module, "copy_and_sum", copied))
        yield traffic
    traffic.to_host = crossed[TO_HOST] - before[TO_HOST]
    traffic.to_device = crossed[TO_DEVICE] - before[TO_DEVICE]
    for field in fields(traffic):
        setattr(traffic, field.name, round(getattr(traffic, field.name) / num_parameters))


def a_rank_that_stays_moves_nothing_and_releases_what_computing_needs() -> None:
    config = TrainerConfig(stay_on_device=True, optimizer=OptimizerConfig(**LINEAR), max_tokens_per_microbatch=100)
    spec = TrainerSpec(name="t", config=config, model_path=str(PATHS[0]), stage="train", policies=POLICIES)
    with gathered_by_layer(), ranks_on_the_device():
        parts: TrainerParts = assemble_trainer(spec, None)
        leaves = made()
    for seed in (1, 2):
        for trainer in (parts.trainer, leaves):
            trainer.update(rows_of(seed), ppo_clip_loss)
            trainer.logprobs(rows_of(seed))
        leaves.leave_device()
        before = crossed.copy()
        parts.leave_device()
        assert crossed == before
        held = sum(values.nbytes for values in state_of(parts.trainer).values())
        assert held <= live_bytes() < 1.02 * held + 4096, (live_bytes(), held)
        before = crossed.copy()
        parts.take_device()
        assert crossed == before
        leaves.take_device()
    assert_near(state_of(leaves), state_of(parts.trainer), 0.0)
    for trainer in (parts.trainer, leaves):
        trainer.leave_device()


def a_colocated_step_moves_its_state_as_often_as_counted_here() -> None:
    """With two engines on the node, bytes of each parameter: 12 of the state, 2 of a publication."""
    spec = TrainerSpec(
        name="t", config=TrainerConfig(), model_path=str(PATHS[0]), stage="train", policies=POLICIES,
        engine_dtype="bfloat16", memory_checkpoint_root=str(PATHS[1] / "kept"),
    )  # fmt: skip
    with ranks_on_the_device():
        parts: TrainerParts = assemble_trainer(spec, None)
    checkpoint, root = parts.memory_checkpoint, str(PATHS[1] / "colocated")
    assert checkpoint is not None
    num_parameters = sum(piece.values.numel() for piece in parts.trainer.engine.pieces())
    for step in (1, 2):
        with counting(num_parameters) as back:
            if step > 1:
                parts.take_device()
        parts.trainer.update(rows_of(step), ppo_clip_loss)
        with counting(num_parameters) as kept:
            assert checkpoint.save(step) is None
        with counting(num_parameters) as published:
            publication = parts.trainer.publish(root, step)
        with counting(num_parameters) as left:
            parts.leave_device()
        assert_nothing_there()
        with counting(num_parameters) as loaded:
            for _ in range(2):
                mapped = MappedWeights(publication)
                mapped.verify_once()
                weights = {name: tensor.to(DEVICE) for name, tensor in mapped.tensors()}
                del weights, mapped
    expected = {
        "comes back": (back, Traffic(to_device=12)),
        "keeps its state": (kept, Traffic(to_host=12, copied=12, summed=12)),
        "publishes": (published, Traffic(to_host=2, copied=2, summed=2)),
        "leaves": (left, Traffic()),
        "two engines load": (loaded, Traffic(to_device=2 * 2, summed=2)),
    }
    for what, (found, wanted) in expected.items():
        assert found == wanted, f"{what}: {found}"


def a_scorer_makes_room_and_comes_back_for_the_next_rows() -> None:
    spec = ScorerSpec(name="s", config=TrainerConfig(), model_path=str(PATHS[0]), stage="reference", columns=("c",))
    with ranks_on_the_device():
        parts = assemble_scorer(spec, None)
    compute = parts.scorer.on_device(parts.trainer.logprobs)
    expected = dict(enumerate(compute(rows_of())))
    parts.scorer.leave_device()
    assert_nothing_there()
    assert_near(expected, dict(enumerate(compute(rows_of()))), 0.0)

    def leaves_meanwhile(rows: Rows) -> Any:
        parts.scorer.leave_device()
        return parts.trainer.logprobs(rows)

    assert_near(expected, dict(enumerate(parts.scorer.on_device(leaves_meanwhile)(rows_of()))), 0.0)


def tensors_of_two_devices_are_refused() -> None:
    here, there = torch.ones(2), torch.ones(2, device=DEVICE)
    for wrong in (
        lambda: here + there,
        lambda: there.numpy(),
        lambda: there.index_select(0, torch.zeros(1, dtype=torch.int64)),
    ):
        try:
            wrong()
        except (RuntimeError, TypeError):
            continue
        raise AssertionError("tensors of two devices were taken")
    assert (there + 1.0).sum().item() == 4.0
    assert live_bytes() == there.untyped_storage().nbytes()


COUNTED = (
    a_colocated_step_moves_its_state_as_often_as_counted_here,
    it_leaves_into_the_same_host_memory_each_time_and_copies_what_is_frozen_once,
)
"""Claims that count by what the fake device alone has."""


def claims() -> Iterator[tuple[str, Callable[[], None]]]:
    """All claims, by name and what they are about."""
    for claim in (
        it_computes_what_a_trainer_on_the_cpu_computes,
        it_leaves_nothing_there_and_comes_back_the_same,
        it_leaves_by_the_copy_that_it_keeps_and_comes_back_the_same,
    ):
        for kind in KINDS:
            yield f"{claim.__name__}: {kind}", partial(claim, kind)
    for loss in POLICY_LOSSES:
        yield f"{every_loss_is_computed_there.__name__}: {loss}", partial(every_loss_is_computed_there, loss)
    for alone in (
        a_mixture_follows_the_engines_experts_there,
        a_critic_and_a_reward_model_are_trained_there,
        kept_activations_are_not_there_when_backward_begins,
        kept_copies_bring_another_rank_to_the_same_bits,
        a_save_under_way_keeps_nothing_there,
        publications_and_exports_come_from_there,
        a_hash_of_the_weights_is_made_there_and_shows_one_bit,
        a_critic_leaves_with_its_policy,
        a_rank_that_stays_moves_nothing_and_releases_what_computing_needs,
        *(() if ON_A_GPU else COUNTED),
        a_scorer_makes_room_and_comes_back_for_the_next_rows,
        tensors_of_two_devices_are_refused,
    ):
        yield alone.__name__, alone


def failure_of(claim: Callable[[], None]) -> str | None:
    try:
        claim()
    except Exception:  # noqa: BLE001 - whatever it is, it is the test's to tell
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    PATHS.extend(map(Path, sys.argv[1:3]))
    torch.set_num_threads(1)
    train_engine.MIN_OFFLOADED_BYTES = 0
    gc.freeze()  # what is imported is no garbage, and is not looked through each time
    Ranks.join(TrainerConfig(num_gpus_per_rank=int(ON_A_GPU)))  # the process group, which all trainers share
    if ON_A_GPU:
        torch.use_deterministic_algorithms(True, warn_only=True)  # claims of equal bits
    else:  # torch's own events and streams are of C++; here all is done when it returns
        publications.mark = torch.accelerator.synchronize = lambda device=None: None
    Path(sys.argv[3]).write_text(json.dumps({name: failure_of(claim) for name, claim in claims()}))
