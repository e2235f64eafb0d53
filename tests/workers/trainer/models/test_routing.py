"""The auxiliary loss of routers, against numbers worked out by hand, and in an update."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.losses import sft_loss
from penstock.conf.errors import ConfigError
from penstock.workers.trainer.models.routing import row_balance
from tests.mixtures import build_mixture
from tests.workers.trainer.conftest import assert_same

Make = Callable[..., Any]


def test_balance_is_worked_out_by_hand() -> None:
    chances = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.1, 0.3], [0.2, 0.2, 0.6]])
    found = row_balance(chances.log(), torch.tensor([0, 0, 2]), 3, 1)
    # Row 0 sends both tokens to expert 0: f = 3 / 2 x 2, p = (0.5 + 0.6) / 2. Row 2: f = 3, p = 0.6.
    torch.testing.assert_close(found, torch.tensor([3 * 0.55, 0.0, 3 * 0.6]))
    # Two experts a token: f of row 0 = 3 / 4 x (2, 1, 1), p = (0.55, 0.2, 0.25).
    found = row_balance(chances.log()[:2], torch.tensor([0, 0]), 1, 2)
    torch.testing.assert_close(found, torch.tensor([0.75 * (2 * 0.55 + 0.2 + 0.25)]))


@given(st.integers(1, 5), st.integers(0, 99))
def test_balance_is_one_for_a_router_without_opinion(k: int, seed: int) -> None:
    logits = torch.zeros(7, 5, requires_grad=True)
    found = row_balance(logits, torch.randint(3, (7,), generator=torch.Generator().manual_seed(seed)), 3, k)
    assert all(value == pytest.approx(1) or value == 0 for value in found.tolist())
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(gradient.sum(dim=1), torch.zeros(7))  # a softmax's


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_mixture("qwen3_moe", tmp_path_factory.mktemp("mixture"))


def test_the_loss_is_the_same_whatever_rows_share_a_micro_batch(
    make_trainer: Make, make_rows: Make, mixture: str, weights_of: Make
) -> None:
    options = {"path": mixture, "lr": 1e-3, "eps": 1.0, "router_aux_loss_coef": 1.0}
    found, metrics = [], []
    for changes in ({}, {"max_tokens_per_microbatch": 40}, {"activation_checkpointing": True}):
        trainer = make_trainer(**options | changes)
        metrics.append(trainer.update(make_rows(6), sft_loss).metrics)
        found.append(weights_of(trainer))
    plain = make_trainer(**options | {"router_aux_loss_coef": 0.0})
    assert "actor/router_balance" not in plain.update(make_rows(6), sft_loss).metrics
    for other, weights in zip(metrics[1:], found[1:], strict=True):
        assert other["actor/router_balance"] == pytest.approx(metrics[0]["actor/router_balance"], rel=1e-5)
        for name, tensor in found[0].items():
            torch.testing.assert_close(weights[name], tensor, atol=1e-7, rtol=0, msg=name)
    assert 1 < metrics[0]["actor/router_balance"] < 2
    with pytest.raises(AssertionError):
        assert_same(weights_of(plain), found[0])


def test_the_loss_evens_out_the_use_of_experts(make_trainer: Make, make_rows: Make, mixture: str) -> None:
    trainer = make_trainer(path=mixture, lr=1e-2, router_aux_loss_coef=10.0)
    found = [trainer.update(make_rows(6), sft_loss).metrics["actor/router_balance"] for _ in range(12)]
    assert found[-1] < 1.1 < found[0]


def test_a_model_without_routers_is_refused_by_the_key(make_trainer: Make) -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.router_aux_loss_coef.*no routers that choose experts by a softmax"
    ):
        make_trainer(router_aux_loss_coef=0.1)
