import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.losses.preference import dpo_loss, ipo_loss
from tests.algorithms.preference.batches import one_pair, random_batch, run

BATCH = one_pair([-1.0, -1.0], [-4.0], reference_logprobs=[[-1.0, -2.0], [-2.0]])
"""Log-ratios: chosen -2 + 3 = 1, over 2 tokens; rejected -4 + 2 = -2, over 1."""


def test_dpo_by_hand():
    # r = 0.5 · 1 = 0.5 and 0.5 · -2 = -1; h = 1.5; -log σ(1.5) = log(1 + e^-1.5) = 0.201413
    # dL/dlogπ = ∓β σ(-h) = ∓0.5 · 0.182426 a token
    loss, gradient, metrics = run(partial(dpo_loss, beta=0.5), BATCH)
    assert loss.item() == pytest.approx(0.201413, abs=1e-6)
    assert gradient.flatten().tolist() == pytest.approx([-0.091213, -0.091213, 0.091213, 0.0], abs=1e-6)
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "loss": 0.201413,
            "accuracy": 1.0,
            "margin": 1.5,
            "chosen_reward": 0.5,
            "rejected_reward": -1.0,
            "pair_fraction": 1.0,
        },
        abs=1e-6,
    )


def test_label_smoothing_by_hand():
    # h = 1.5; 0.9 · 0.201413 + 0.1 · log(1 + e^1.5) = 0.181272 + 0.1 · 1.701413 = 0.351413
    loss, _, _ = run(partial(dpo_loss, beta=0.5, label_smoothing=0.1), BATCH)
    assert loss.item() == pytest.approx(0.351413, abs=1e-6)


def test_without_a_reference_the_reward_is_the_log_probability():
    # h = 0.5 · (-2 + 4) = 1; log(1 + e^-1) = 0.313262
    del (batch := BATCH.with_columns()).columns["reference_logprobs"]
    loss, _, metrics = run(partial(dpo_loss, beta=0.5, reference_free=True), batch)
    assert loss.item() == pytest.approx(0.313262, abs=1e-6)
    assert (metrics["chosen_reward"].item(), metrics["rejected_reward"].item()) == (-1.0, -2.0)


def test_a_reference_is_not_looked_at_when_there_is_to_be_none():
    free = partial(dpo_loss, beta=0.5, reference_free=True)
    assert run(free, BATCH)[0].item() == pytest.approx(0.313262, abs=1e-6)


@given(st.integers(0, 2**16), st.integers(1, 5), st.floats(0.01, 10), st.floats(0, 0.5))
def test_where_the_policy_is_the_reference_the_loss_is_log_2_a_pair(seed, num_groups, beta, smoothing):
    batch = random_batch(seed, num_groups, 4)
    batch = batch.with_columns(reference_logprobs=batch.logprobs)
    loss, _, metrics = run(partial(dpo_loss, beta=beta, label_smoothing=smoothing), batch)
    assert loss.item() == pytest.approx(math.log(2) * metrics["pair_fraction"].item())
    assert metrics["margin"] == metrics["accuracy"] == 0


@given(st.integers(0, 2**16), st.integers(1, 5), st.floats(0, 0.5))
def test_swapping_chosen_and_rejected_adds_the_margin(seed, num_groups, smoothing):
    # -log σ(-h) + log σ(h) = h, since σ(h) / σ(-h) = e^h; smoothed, (1 - 2ε) h
    batch = random_batch(seed, num_groups, 4)
    swapped = batch.with_columns(preferred=-batch.columns["preferred"])
    loss = partial(dpo_loss, label_smoothing=smoothing)
    value, _, metrics = run(loss, batch)
    other, _, other_metrics = run(loss, swapped)
    torch.testing.assert_close(other - value, (1 - 2 * smoothing) * metrics["margin"])
    torch.testing.assert_close(other_metrics["margin"], -metrics["margin"])
    torch.testing.assert_close(other_metrics["chosen_reward"], metrics["rejected_reward"])


@given(st.integers(0, 2**16), st.floats(0, 0.5))
def test_label_smoothing_is_the_expectation_over_flipped_labels(seed, smoothing):
    batch = random_batch(seed, 3, 4)
    straight = run(dpo_loss, batch)[0]
    swapped = run(dpo_loss, batch.with_columns(preferred=-batch.columns["preferred"]))[0]
    mixed = run(partial(dpo_loss, label_smoothing=smoothing), batch)[0]
    torch.testing.assert_close(mixed, (1 - smoothing) * straight + smoothing * swapped)


@given(st.floats(0.01, 0.49), st.floats(0.05, 5))
def test_with_label_smoothing_the_gradient_vanishes_at_the_labels_log_odds(smoothing, beta):
    # h = log((1 - ε) / ε)
    gap = math.log((1 - smoothing) / smoothing) / beta
    batch = one_pair([0.0], [-gap], reference_logprobs=[[0.0], [0.0]])
    _, gradient, _ = run(partial(dpo_loss, beta=beta, label_smoothing=smoothing), batch)
    assert gradient.abs().max().item() == pytest.approx(0, abs=1e-9)


@given(st.floats(-5, 5))
def test_what_adds_to_a_prompts_log_ratios_alike_cancels(shift):
    # the reward is known up to a term of the prompt alone: 2305.18290 eq. 5
    batch = one_pair([-1.0, -2.0], [-3.0], reference_logprobs=[[-1.0, -1.0], [-2.0]])
    shifted = batch.with_columns(reference_logprobs=batch.columns["reference_logprobs"].clone())
    shifted.columns["reference_logprobs"][:, 0] += shift
    for loss in (dpo_loss, ipo_loss):
        torch.testing.assert_close(run(loss, shifted)[0], run(loss, batch)[0])


def test_ipo_by_hand():
    # (3 - 1 / (2 · 0.25))² = (3 - 2)² = 1; gradient ±2 · 1; rewards 0.25 · 1 and 0.25 · -2
    loss, gradient, metrics = run(partial(ipo_loss, beta=0.25), BATCH)
    assert loss.item() == 1.0
    assert gradient.flatten().tolist() == [2.0, 2.0, -2.0, 0.0]
    assert (metrics["chosen_reward"].item(), metrics["rejected_reward"].item()) == (0.25, -0.5)


def test_length_normalized_ipo_by_hand():
    # mean log-ratios 1 / 2 and -2: (2.5 - 2)² = 0.25; gradient 2 · 0.5 = 1, half of it to each chosen token
    loss, gradient, metrics = run(partial(ipo_loss, beta=0.25, length_normalize=True), BATCH)
    assert loss.item() == 0.25
    assert gradient.flatten().tolist() == [0.5, 0.5, -1.0, 0.0]
    assert metrics["margin"].item() == 0.25 * 2.5


def test_reference_free_ipo_by_hand():
    # log-probabilities -2 and -4: (2 - 2)² = 0
    loss, gradient, _ = run(partial(ipo_loss, beta=0.25, reference_free=True), BATCH)
    assert loss.item() == 0.0
    assert not gradient.any()


@given(st.floats(0.05, 5), st.floats(-10, 10))
def test_ipo_is_least_where_the_log_ratio_of_the_pair_is_half_of_one_over_beta(beta, away):
    gap = 1 / (2 * beta)
    loss = partial(ipo_loss, beta=beta)
    at = run(loss, one_pair([0.0], [-gap], reference_logprobs=[[0.0], [0.0]]))
    assert at[0].item() == pytest.approx(0, abs=1e-20)
    assert at[1].abs().max().item() == pytest.approx(0, abs=1e-10)
    off = run(loss, one_pair([0.0], [-gap - away], reference_logprobs=[[0.0], [0.0]]))
    assert off[0].item() == pytest.approx(away**2)
    assert off[1][0, 0].item() == pytest.approx(2 * away)


@given(st.integers(0, 2**16), st.floats(0.05, 5))
def test_swapping_in_ipo_adds_twice_the_log_ratio_over_beta(seed, beta):
    # (-d - c)² - (d - c)² = 4 d c = 2 d / β, and the margin is β d
    batch = random_batch(seed, 3, 4)
    loss = partial(ipo_loss, beta=beta)
    value, _, metrics = run(loss, batch)
    other = run(loss, batch.with_columns(preferred=-batch.columns["preferred"]))[0]
    torch.testing.assert_close(other - value, 2 * metrics["margin"] / beta**2)
