"""The two halves of an update, on one rank, with every engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.errors import ConfigError, DataError
from penstock.store.data.rows import Rows
from penstock.workers.protocols import AdamParams
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from tests.workers.trainer.conftest import ENGINES, assert_same

Make = Callable[..., PolicyTrainer]
MakeRows = Callable[..., Rows]
Weights = Callable[[PolicyTrainer], dict[str, Tensor]]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


def summed(logprobs: Tensor, mask: Tensor) -> Any:
    loss = -(logprobs * mask).sum()
    return loss, {"loss": loss.detach()}


def test_an_update_is_its_two_halves_bit_for_bit(make_trainer: Make, make_rows: MakeRows, weights_of: Weights) -> None:
    whole, halves = (make_trainer(lr=1e-3, warmup_steps=3, max_tokens_per_microbatch=60) for _ in range(2))
    for seed in range(3):
        rows = make_rows(6, seed=seed)
        expected = whole.update(rows, ppo_clip_loss).metrics
        metrics = halves.forward_backward(rows, ppo_clip_loss).metrics | halves.optim_step()
        assert metrics == expected
    assert halves.num_updates == 3
    assert_same(weights_of(halves), weights_of(whole))


@pytest.mark.parametrize("offload", [False, True])
def test_gradients_of_several_calls_add_up(
    make_trainer: Make, make_rows: MakeRows, weights_of: Weights, engine: str, offload: bool
) -> None:
    """The step shows the gradient: -g / (|g| + 1). What computes no gradients in between changes none. Offloaded ones
    are added up by FSDP2 and stage 3, and refused by the other stages."""
    rows = make_rows(9)
    if offload and engine in ("zero1", "zero2"):
        trainer = make_trainer(offload=True)
        trainer.forward_backward(rows, summed)
        with pytest.raises(ConfigError, match=r"trainer\.offload=true.*trainer\.deepspeed\.zero_stage=3"):
            trainer.forward_backward(rows, summed)
        return
    whole, parts = (make_trainer(max_tokens_per_microbatch=60, offload=offload) for _ in range(2))
    params = AdamParams(learning_rate=1.0, beta1=0.0, beta2=0.0, eps=1.0)
    expected = whole.forward_backward(rows, summed).metrics["actor/loss"]
    found = 0.0
    for part in ([0], [1, 2, 3, 4, 5, 6], [7, 8]):
        found += parts.forward_backward(rows.select(part), summed).metrics["actor/loss"]
        parts.logprobs(rows)
    assert found == pytest.approx(expected, rel=1e-5)
    norms = [trainer.optim_step(params)["actor/grad_norm"] for trainer in (whole, parts)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    ours = weights_of(parts)
    for name, weight in weights_of(whole).items():
        torch.testing.assert_close(ours[name], weight, atol=2e-5, rtol=0, msg=name)


def test_a_step_takes_the_numbers_that_come_with_it(
    make_trainer: Make, make_rows: MakeRows, weights_of: Weights
) -> None:
    configured = {"lr": 3e-3, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1, "clip_norm": 0.0}
    expected, trainer = make_trainer(**configured), make_trainer(lr=1.0, clip_norm=0.1)
    rows = make_rows(6)
    for _ in range(2):
        expected.update(rows, summed)
        trainer.forward_backward(rows, summed)
        assert trainer.optim_step(AdamParams(3e-3, 0.8, 0.9, 1e-6, 0.1, 0.0))["actor/lr"] == 3e-3
    assert_same(weights_of(trainer), weights_of(expected))


def test_a_norm_of_a_call_clips_its_step(make_trainer: Make, make_rows: MakeRows, weights_of: Weights) -> None:
    linear = {"lr": 1.0, "betas": [0.0, 0.0], "eps": 1.0}
    expected, trainer = make_trainer(**linear, clip_norm=0.5), make_trainer(clip_norm=0.0)
    expected.update(make_rows(6), summed)
    trainer.forward_backward(make_rows(6), summed)
    trainer.optim_step(AdamParams(1.0, 0.0, 0.0, 1.0, 0.0, 0.5))
    assert_same(weights_of(trainer), weights_of(expected))


def test_a_step_without_gradients_is_refused(make_trainer: Make, make_rows: MakeRows) -> None:
    trainer = make_trainer()
    trainer.forward_backward(make_rows(4), summed)
    trainer.optim_step()
    with pytest.raises(DataError, match="Call forward_backward"):
        trainer.optim_step()
