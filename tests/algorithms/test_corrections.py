import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.aggregation import BatchTotals, aggregate
from penstock.algorithms.corrections import (
    CORRECTIONS,
    masked,
    none,
    rejection,
    sequence_truncated,
    truncated,
    truncated_importance_weight,
)
from penstock.conf.errors import ConfigError, ShapeError


def test_the_weight_is_the_ratio_up_to_the_cap():
    # trainer / engine = 0.5, 1, 1.5, 8 capped at 2
    trainer = torch.tensor([[0.5, 1.0, 1.5, 8.0]]).log()
    weight = truncated_importance_weight(trainer, torch.zeros(1, 4), cap=2.0)
    torch.testing.assert_close(weight, torch.tensor([[0.5, 1.0, 1.5, 2.0]]))


def test_the_weight_carries_no_gradient():
    trainer = torch.zeros(1, 2, requires_grad=True)
    assert not truncated_importance_weight(trainer, torch.zeros(1, 2), cap=2.0).requires_grad


def test_a_log_ratio_of_100_gives_a_finite_weight():
    weight = truncated_importance_weight(torch.tensor([100.0, -100.0]), torch.zeros(2), cap=1e30)
    torch.testing.assert_close(weight, torch.tensor([math.exp(20.0), math.exp(-20.0)]))


def test_metrics_are_the_mean_weight_and_the_capped_share():
    # weights 1 and 4, capped to 2: mean 1.5, one of two capped; what is under padding is ignored
    mask = torch.tensor([[True, True, False]])
    old = torch.tensor([[0.0, math.log(4.0), 9.0]])
    _, metrics = truncated(old, torch.zeros(1, 3), mask, cap=2.0)
    mean = partial(aggregate, mask_BT=mask, totals=BatchTotals.of(mask), how="token_mean")
    assert {name: mean(value).item() for name, value in metrics.items()} == {
        "correction_weight_mean": 1.5,
        "correction_capped_fraction": 0.5,
    }


def test_bad_input_is_named():
    with pytest.raises(ConfigError, match="correction_cap=-1"):
        truncated_importance_weight(torch.zeros(1), torch.zeros(1), cap=-1)
    with pytest.raises(ShapeError, match=r"behavior_logprobs is float32 \[2\]; expected \[1\]"):
        truncated_importance_weight(torch.zeros(1), torch.zeros(2), cap=2)
    with pytest.raises(ConfigError, match=r"correction masked: low=3 is above high=2, so that nothing would be kept"):
        masked(RATIOS, torch.zeros(2, 3), MASK, low=3, high=2)
    with pytest.raises(ConfigError, match=r"correction rejection: low=3.0 is above high=2.0"):
        rejection(RATIOS, torch.zeros(2, 3), MASK, low=3.0)


# the trainer finds the tokens of the first response 4, 1 and 0.25 times as likely as the engine; the second has one
RATIOS = torch.tensor([[4.0, 1.0, 0.25], [8.0, 1.0, 1.0]]).log()
MASK = torch.tensor([[True, True, True], [True, False, False]])


def weights(correction, **settings):
    weight, metrics = correction(torch.where(MASK, RATIOS, 0.0), torch.zeros(2, 3), MASK, **settings)
    return torch.where(MASK, weight, 0.0), {name: value[MASK].mean().item() for name, value in metrics.items()}


def test_none_weighs_everything_the_same():
    weight, metrics = weights(none)
    assert weight.tolist() == [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]
    assert metrics == {}


def test_truncated_cuts_each_token_at_the_cap():
    # mean (2 + 1 + 0.25 + 2) / 4 = 1.3125, two of four capped
    weight, metrics = weights(truncated, cap=2.0)
    torch.testing.assert_close(weight, torch.tensor([[2.0, 1.0, 0.25], [2.0, 0.0, 0.0]]))
    assert metrics["correction_weight_mean"] == pytest.approx(1.3125)
    assert metrics["correction_capped_fraction"] == 0.5


def test_sequence_truncated_weighs_all_tokens_of_a_response_by_its_ratio():
    # 4 · 1 · 0.25 = 1; 8, capped at 5; both responses' geometric means are 1 and 8
    weight, metrics = weights(sequence_truncated, cap=5.0)
    torch.testing.assert_close(weight, torch.tensor([[1.0, 1.0, 1.0], [5.0, 0.0, 0.0]]))
    assert metrics == {"correction_weight_mean": pytest.approx(2.0), "correction_capped_fraction": 0.25}


def test_the_geometric_ratio_is_the_root_of_the_product():
    # (4 · 4)^(1/2) = 4, against 16
    old, zero, mask = torch.tensor([[4.0, 4.0]]).log(), torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    for ratio, expected in (("geometric", 4.0), ("product", 16.0)):
        weight, _ = sequence_truncated(old, zero, mask, cap=100.0, ratio=ratio)
        torch.testing.assert_close(weight, torch.full((1, 2), expected))


def test_masked_drops_tokens_on_either_side_and_keeps_the_ratio_of_the_others():
    # bounds [0.5, 5]: 0.25 and 8 are out
    weight, metrics = weights(masked, low=0.5, high=5.0)
    torch.testing.assert_close(weight, torch.tensor([[4.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert metrics == {"correction_weight_mean": pytest.approx(1.25), "correction_masked_fraction": 0.5}


@pytest.mark.parametrize("correction", [masked, rejection])
def test_a_ratio_on_a_bound_is_kept(correction):
    zero, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    assert correction(zero, zero, mask, low=1.0, high=1.0)[0].tolist() == [[1.0, 1.0]]


def test_rejection_drops_whole_responses_by_their_geometric_mean():
    # geometric means 1 and 8
    weight, metrics = weights(rejection, low=0.5, high=2.0)
    assert weight.tolist() == [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    assert metrics == {"correction_weight_mean": 0.75, "correction_masked_fraction": 0.25}


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
@given(seed=st.integers(0, 2**16))
def test_engine_and_trainer_that_agree_need_no_correction(name, seed):
    logprobs = -torch.rand(3, 4, generator=torch.Generator().manual_seed(seed))
    weight, metrics = CORRECTIONS[name](logprobs, logprobs, torch.ones(3, 4, dtype=torch.bool))
    assert weight.tolist() == [[1.0] * 4] * 3
    assert all(float(value.sum()) == 0 for key, value in metrics.items() if key.endswith("fraction"))


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
@given(seed=st.integers(0, 2**16))
def test_weights_are_finite_not_negative_and_without_gradient(name, seed):
    generator = torch.Generator().manual_seed(seed)
    old, behavior = (100 * torch.randn(3, 4, generator=generator) for _ in range(2))
    weight, _ = CORRECTIONS[name](old.requires_grad_(), behavior, torch.rand(3, 4, generator=generator) < 0.7)
    assert weight.isfinite().all()
    assert (weight >= 0).all()
    assert not weight.requires_grad
    assert weight.dtype == torch.float32
