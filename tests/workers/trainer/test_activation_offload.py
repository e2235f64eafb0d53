"""Activations that wait in the host's memory change no bit of an update, and weights do not go with them. On a device
that is not the CPU: `on_a_device/claims.py`."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.algorithms.losses import ppo_clip_loss, value_loss
from penstock.conf.errors import ConfigError
from penstock.conf.trainer import LoraConfig, OptimizerConfig, TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.runtime.host_memory import BLOCK_BYTES, HostBuffer
from penstock.workers.trainer.engines import train_engine as engine_module
from penstock.workers.trainer.engines.train_engine import HostActivations
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.scalar import CriticTrainer
from tests.workers.trainer.conftest import assert_same, copy_of_weights, random_rows

Make = Callable[..., PolicyTrainer]
LINEAR: dict[str, Any] = {"lr": 1.0, "eps": 1.0, "betas": [0.0, 0.0]}
"""AdamW whose step is -g / (|g| + 1): weights show the gradient."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {}),
    "packed, recomputed": ("fsdp", {"packing": "always", "activation_checkpointing": True}),
    "adapters": ("fsdp", {"lora": LoraConfig(rank=4), "activation_checkpointing": True}),
    "bfloat16": ("fsdp", {"dtype": "bfloat16"}),
    "weights offloaded": ("fsdp", {"offload": True}),
    "zero2": ("zero2", {"dtype": "bfloat16"}),
    "zero3": ("zero3", {"activation_checkpointing": True}),
    "compiled": ("fsdp", {"compile": True}),
    "compiled, packed, recomputed": ("fsdp", {"compile": True, "packing": "always", "activation_checkpointing": True}),
}


@pytest.fixture
def case(request: pytest.FixtureRequest) -> str:
    return getattr(request, "param", "fsdp")


@pytest.fixture
def engine(case: str) -> str:
    return CASES[case][0]


pytestmark = pytest.mark.usefixtures("without_inductor")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What went to the host, small as it may be."""
    copies: list[Tensor] = []
    copy = engine_module.to_host

    def noted(buffer: HostBuffer, saved: Tensor) -> engine_module.KeptActivation:
        part, tensor = copy(buffer, saved)
        if part is not None:
            copies.append(saved.detach())
        return part, tensor

    monkeypatch.setattr(engine_module, "MIN_OFFLOADED_BYTES", 1)
    monkeypatch.setattr(engine_module, "to_host", noted)
    return copies


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.soak("compiled, packed, recomputed") if case == "compiled" else [])
        for case in CASES
    ],
    indirect=True,
)
def test_an_update_is_the_same_bit_for_bit(
    make_trainer: Make, make_rows: Callable[..., Rows], kept: list[Tensor], case: str
) -> None:
    found = []
    for offload in (False, True):
        kept.clear()
        options = CASES[case][1] | {"activation_offload": offload}
        trainer = make_trainer(max_tokens_per_microbatch=60, **LINEAR, **options)
        metrics = trainer.update(make_rows(8), ppo_clip_loss).metrics
        assert bool(kept) == offload
        found.append((copy_of_weights(trainer), metrics))
    weights = {tuple(sorted(value.shape)) for value in found[0][0].values() if value.ndim > 1}
    assert not weights & {tuple(sorted(value.shape)) for value in kept}
    assert_same(found[1][0], found[0][0])
    assert found[1][1] == found[0][1]


def test_a_critics_update_is_the_same_bit_for_bit(model_path: str, kept: list[Tensor]) -> None:
    found = []
    for offload in (False, True):
        trainer = CriticTrainer(
            TrainerConfig(activation_offload=offload, optimizer=OptimizerConfig(**LINEAR)), model_path
        )
        rows = random_rows(6)
        values = trainer.values(rows)
        rows = rows.with_column("returns", [value + 1 for value in values]).with_column("old_values", values)
        trainer.update(rows, value_loss)
        found.append(copy_of_weights(trainer))
        trainer.close()
    assert kept
    assert_same(found[1], found[0])


def test_where_layers_are_recomputed_their_inputs_alone_are_kept(
    make_trainer: Make, make_rows: Callable[..., Rows], kept: list[Tensor]
) -> None:
    sizes = []
    for recomputed in (False, True):
        kept.clear()
        trainer = make_trainer(activation_checkpointing=recomputed, activation_offload=True)
        trainer.update(make_rows(8), ppo_clip_loss)
        sizes.append(sum(value.nbytes for value in kept))
    assert sizes[1] < 0.4 * sizes[0]


def test_results_do_not_keep_themselves_alive() -> None:
    """Neither those that go to the host nor small ones that stay."""
    for size in (4, engine_module.MIN_OFFLOADED_BYTES):
        with HostActivations(HostBuffer(torch.device("cpu"))):
            result = torch.ones(size, requires_grad=True).exp()
        alive = weakref.ref(result)
        del result
        assert alive() is None


def test_strided_activations_come_back_from_memory_that_is_used_again() -> None:
    buffer = HostBuffer(torch.device("cpu"))
    base = torch.arange(3.0 * 2**16).reshape(3, 2**16)
    for seed in range(3):
        kinds = [one + seed for one in (base, base.t(), base[:, ::2], base.bfloat16())]
        with HostActivations(buffer):
            results = [one.requires_grad_().square() for one in kinds]
        torch.stack([result.float().sum() for result in results]).sum().backward()
        for one in kinds:
            assert_same({"": one.grad}, {"": 2 * one.detach()})
            assert one.grad is not None
            assert one.grad.stride() == one.stride()
        num_bytes = sum(one.nbytes for one in kinds)
        results.clear()
    assert buffer.num_bytes == max(num_bytes, BLOCK_BYTES)


def test_layers_that_are_split_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"activation_offload=true: layers of trainer\.tensor_parallel_size=2"):
        TrainerConfig(num_ranks=2, tensor_parallel_size=2, activation_offload=True)
