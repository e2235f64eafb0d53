"""The driver of all surrogates and corrections: which policy stands where, and what is added, weighted and counted."""

import inspect
import math
import pickle
from functools import partial

import cloudpickle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.losses import interpolated_policy_loss, policy_loss, sft_loss
from penstock.algorithms.losses.policy import interpolated_logprobs
from penstock.algorithms.registry import Positive
from penstock.conf.errors import ConfigError, ShapeError
from tests.algorithms.losses.ragged import batch, run


def two_tokens(**settings):
    """`policy_loss` of the log-probabilities -1 and -2 with every other one in a place of its own."""
    arguments = {
        "logprobs": torch.tensor([[-1.0, -2.0]], dtype=torch.float64, requires_grad=True),
        "mask": torch.ones(1, 2),
        "totals": BatchTotals(2, 1),
        "advantage": torch.tensor([1.0], dtype=torch.float64),
        "behavior_logprobs": torch.tensor([[-1.5, -2.5]], dtype=torch.float64),
        "old_logprobs": torch.tensor([[-1.25, -2.25]], dtype=torch.float64),
    }
    return policy_loss(**(arguments | settings))


def anchor_seen(**settings):
    """What a surrogate gets as `old`, and a correction as its two."""
    seen = {}

    def formula(new, old, advantage, mask):
        seen["anchor"] = old.tolist()
        return 0.0 * new, {}

    def weigh(old, behavior, mask):
        seen["weighed"] = old.tolist(), behavior.tolist()
        return torch.ones_like(old), {}

    settings.setdefault("correction", weigh)
    two_tokens(surrogate=formula, **settings)
    return seen


def test_the_ratio_is_to_the_trainer_and_the_weight_between_trainer_and_engine():
    assert anchor_seen() == {"anchor": [[-1.25, -2.25]], "weighed": ([[-1.25, -2.25]], [[-1.5, -2.5]])}


def test_without_a_correction_the_ratio_is_taken_against_the_engine():
    assert anchor_seen(correction="none") == {"anchor": [[-1.5, -2.5]]}


def test_a_proximal_policy_stands_between_the_two_ratios():
    proximal = torch.tensor([[-1.0, -3.0]], dtype=torch.float64)
    for settings in ({}, {"correction": "none"}):
        seen = anchor_seen(proximal="column", proximal_logprobs=proximal, **settings)
        assert seen["anchor"] == proximal.tolist()
    assert anchor_seen(proximal="column", proximal_logprobs=proximal)["weighed"][0] == proximal.tolist()
    # two updates old: half way between -1, -2 and -1.5, -2.5
    assert anchor_seen(proximal="interpolated", staleness=torch.tensor([2]))["anchor"] == [[-1.25, -2.25]]


def test_the_interpolated_loss_is_the_driver_without_old_logprobs():
    columns = {
        "logprobs": torch.tensor([[-1.0, -2.0]], requires_grad=True),
        "mask": torch.ones(1, 2),
        "totals": BatchTotals(2, 1),
        "advantage": torch.tensor([0.5]),
        "behavior_logprobs": torch.tensor([[-1.5, -2.5]]),
        "staleness": torch.tensor([[1.0, 2.0]]),
    }
    settings = {"surrogate": "gspo", "correction": "masked"}
    loss, metrics = interpolated_policy_loss(**columns, **settings)
    whole, others = policy_loss(**columns, old_logprobs=torch.zeros(1, 2), proximal="interpolated", **settings)
    assert loss.item() == whole.item()
    assert metrics == others
    assert loss.requires_grad


def test_any_surrogate_goes_with_any_correction():
    # cispo: ratio e^0.25, weight of the correction e^0.25; L = -Σ w ρ A log π / 2 = e^0.5 (1 + 2) / 2
    loss, metrics = two_tokens(surrogate="cispo", correction="masked", correction_options={"high": 2.0})
    assert loss.item() == pytest.approx(math.exp(0.5) * 1.5)
    assert set(metrics) == {"pg_loss", "clip_fraction", "correction_weight_mean", "correction_masked_fraction"}


def test_a_token_that_the_correction_masks_has_no_loss_but_stays_in_the_count():
    # weight e^0.25 = 1.28 is above 1.2: both tokens are out
    loss, metrics = two_tokens(correction="masked", correction_options={"high": 1.2})
    assert loss.item() == 0.0
    assert metrics["correction_masked_fraction"] == 1.0


def test_the_kl_term_is_not_weighted_by_the_correction():
    reference = torch.tensor([[-1.0, -2.0 - math.log(2)]], dtype=torch.float64)
    masks_all = {"correction": "masked", "correction_options": {"high": 1.2}, "reference_logprobs": reference}
    # k3(ln 2) = 0.193147, k1 = 0.693147, over two tokens
    loss, metrics = two_tokens(kl_coef=2.0, **masks_all)
    assert loss.item() == pytest.approx(0.193147, abs=1e-6)
    loss, metrics = two_tokens(kl_coef=2.0, kl_estimator="k1_st", **masks_all)
    assert loss.item() == pytest.approx(0.693147, abs=1e-6)
    assert metrics["kl"] == pytest.approx(0.346574, abs=1e-6)


def test_the_aggregation_takes_its_constant():
    loss, _ = two_tokens(surrogate="reinforce", correction="none", aggregation="constant", constant=6.0)
    assert loss.item() == pytest.approx(3.0 / 6.0)  # (1 + 2) / (1 response · 6)


def test_a_loss_with_ones_own_surrogate_pickles_by_value():
    def own(new, old, advantage, mask, *, scale: Positive = 1.0):
        return -scale * advantage * new, {}

    logprobs, mask, columns = batch(6, 3, 4)
    loss = partial(policy_loss, surrogate=own, surrogate_options={"scale": 2.0})
    there = pickle.loads(cloudpickle.dumps(loss))
    assert there.keywords["surrogate"] is not own
    here, gone = (run(each, logprobs, mask, columns, BatchTotals.of(mask)) for each in (loss, there))
    assert torch.equal(here[1], gone[1])


def test_no_setting_of_a_loss_looks_like_a_column():
    # a parameter whose default is None is read from the rows
    names = [name for name, p in inspect.signature(policy_loss).parameters.items() if p.default is None]
    assert names == ["reference_logprobs", "proximal_logprobs", "staleness"]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"surrogate": "ppo_clp"}, ConfigError, r"algorithm.surrogate=ppo_clp: unknown; did you mean 'ppo_clip'"),
        ({"correction": "mask"}, ConfigError, r"algorithm.correction=mask: unknown; did you mean 'masked'"),
        ({"proximal": "rows"}, ConfigError, r"algorithm.proximal=rows: unknown"),
        ({"kl_estimator": "k4", "reference_logprobs": torch.zeros(1, 2)}, ConfigError, "estimator=k4"),
        ({"surrogate_options": {"clip_lo": 1}}, ConfigError, r"algorithm.surrogate_options.clip_lo: ppo_clip has no"),
        ({"surrogate_options": {"clip_low": -1}}, ConfigError, r"algorithm.surrogate_options.clip_low=-1: must be"),
        ({"correction_options": {"cap": "2"}}, ConfigError, r"algorithm.correction_options.cap='2': expected float"),
        ({"constant": 0.0}, ConfigError, r"constant=0.0: must be a finite number, above 0"),
        ({"proximal": "column"}, ConfigError, r"algorithm.proximal=column needs proximal_logprobs, which nothing"),
        ({"proximal": "interpolated"}, ConfigError, r"algorithm.proximal=interpolated needs staleness, which nothing"),
        (
            {"proximal": "column", "proximal_logprobs": torch.zeros(1, 3)},
            ShapeError,
            r"proximal_logprobs is float32 \[1, 3\]; expected \[1, 2\], the shape of logprobs",
        ),
        (
            {"proximal": "interpolated", "staleness": torch.zeros(3)},
            ShapeError,
            r"staleness is float32 \[3\]; expected \[1\] \(a row\) or \[1, 2\] \(a token\)",
        ),
    ],
)
def test_bad_settings_of_the_driver_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        two_tokens(**settings)


def test_sft_is_the_negative_log_likelihood():
    # token mean: (1 + 2 + 3) / 3 = 2; sequence mean: ((1 + 2) / 2 + 3) / 2 = 2.25
    logprobs, mask = torch.tensor([[-1.0, -2.0], [-3.0, math.nan]]), torch.tensor([[1, 1], [1, 0]])
    loss, metrics = sft_loss(logprobs, mask, BatchTotals.of(mask))
    assert loss.item() == metrics["loss"].item() == 2.0
    assert sft_loss(logprobs, mask, BatchTotals.of(mask), aggregation="sequence_mean")[0].item() == 2.25


def test_the_older_a_token_the_nearer_the_proximal_policy_is_to_the_current_one():
    # -1 + (-2 + 1) / d
    new, behavior = torch.full((1, 4), -1.0), torch.full((1, 4), -2.0)
    result = interpolated_logprobs(new, behavior, torch.tensor([[0, 1, 2, 4]]))
    assert result.tolist() == [[-1.0, -2.0, -1.5, -1.25]]


def test_staleness_may_be_of_the_row():
    new, behavior = torch.full((2, 2), -1.0), torch.full((2, 2), -2.0)
    assert interpolated_logprobs(new, behavior, torch.tensor([1, 2])).tolist() == [[-2.0, -2.0], [-1.5, -1.5]]


@given(st.floats(-5, 0, width=32), st.floats(-5, 0, width=32), st.integers(0, 50))
def test_it_lies_between_the_two_and_carries_no_gradient(new, behavior, staleness):
    current = torch.tensor([[new]], requires_grad=True)
    result = interpolated_logprobs(current, torch.tensor([[behavior]]), torch.tensor([staleness]))
    assert not result.requires_grad
    assert min(new, behavior) - 1e-6 <= result.item() <= max(new, behavior) + 1e-6


def test_what_staleness_has_in_padding_does_not_matter():
    result = interpolated_logprobs(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[1.0, math.nan]]))
    assert result.tolist() == [[0.0, 0.0]]
