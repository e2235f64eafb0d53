import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.losses.preference import log_odds, orpo_loss, simpo_loss
from tests.algorithms.preference.batches import one_pair, random_batch, run

LN2, LN4 = math.log(2), math.log(4)


def test_orpo_by_hand():
    # P(chosen) = exp(-(ln 1 + ln 4) / 2) = 1/2, odds 1; P(rejected) = 1/4, odds 1/3; log odds ratio = log 3
    # -log P = 0.693147; -log σ(log 3) = log(1 + 1/3) = 0.287682; L = 0.693147 + 0.5 · 0.287682
    # gradient: d log odds / d log P = 1 / (1 - P) = 2 and 4/3; σ(-log 3) = 1/4
    #   chosen: (-1 - 0.5 · 1/4 · 2) / 2 tokens = -0.625; rejected: 0.5 · 1/4 · 4/3 = 1/6
    loss, gradient, metrics = run(partial(orpo_loss, odds_ratio_coef=0.5), one_pair([0.0, -LN4], [-LN4]))
    assert loss.item() == pytest.approx(0.836988, abs=1e-6)
    assert gradient.flatten().tolist() == pytest.approx([-0.625, -0.625, 1 / 6, 0.0])
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "loss": 0.836988,
            "accuracy": 1.0,
            "margin": math.log(3),
            "chosen_reward": 0.0,
            "rejected_reward": -math.log(3),
            "pair_fraction": 1.0,
            "sft_loss": LN2,
            "odds_ratio_loss": 0.287682,
        },
        abs=1e-6,
    )


def test_without_the_odds_ratio_it_is_supervised_training_on_the_chosen():
    loss, gradient, _ = run(partial(orpo_loss, odds_ratio_coef=0.0), one_pair([-1.0, -2.0], [-4.0]))
    assert loss.item() == 1.5
    assert gradient.flatten().tolist() == [-0.5, -0.5, 0.0, 0.0]


@given(st.integers(0, 2**16))
def test_swapping_the_two_responses_adds_the_log_odds_ratio_to_the_second_term(seed):
    batch = random_batch(seed, 3, 4)
    metrics = run(orpo_loss, batch)[2]
    swapped = run(orpo_loss, batch.with_columns(preferred=-batch.columns["preferred"]))[2]
    torch.testing.assert_close(swapped["odds_ratio_loss"] - metrics["odds_ratio_loss"], metrics["margin"])


@given(st.floats(-30, -1e-5))
def test_log_odds_are_those_of_the_probability(log_probability):
    probability = math.exp(log_probability)
    expected = log_probability - math.log1p(-probability)
    assert log_odds(torch.tensor(log_probability, dtype=torch.float64)).item() == pytest.approx(expected, rel=1e-9)


def test_log_odds_near_certainty_keep_their_digits_in_float32():
    # P = exp(-1e-5): log(P / (1 - P)) = 11.5129; 1 - exp(log P) in float32 would be off in the third digit
    exact = -1e-5 - math.log(-math.expm1(-1e-5))
    assert log_odds(torch.tensor(-1e-5)).item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("certain", [0.0, -1e-9, 0.5])
def test_a_certain_response_has_large_finite_odds_without_gradient(certain):
    log_probability = torch.tensor(certain, requires_grad=True)
    odds = log_odds(log_probability)
    odds.backward()
    assert odds.item() == pytest.approx(-math.log(1e-6), rel=1e-4)
    assert log_probability.grad.item() == 0.0


def test_simpo_by_hand():
    # r = 2 · -2 / 2 = -2 and 2 · -1.5 = -3; -log σ(1 - 0.5) = log(1 + e^-0.5) = 0.474077
    # gradient: σ(-0.5) = 0.377541 times β / |y| = 1 a chosen token, 2 the rejected one
    loss, gradient, metrics = run(partial(simpo_loss, beta=2.0, target_margin=0.5), one_pair([-0.5, -1.5], [-1.5]))
    assert loss.item() == pytest.approx(0.474077, abs=1e-6)
    assert gradient.flatten().tolist() == pytest.approx([-0.377541, -0.377541, 0.755081, 0.0], abs=1e-6)
    assert (metrics["chosen_reward"].item(), metrics["rejected_reward"].item()) == (-2.0, -3.0)
    assert metrics["margin"].item() == 1.0


@given(st.lists(st.floats(-5, 0), min_size=1, max_size=4), st.integers(1, 4))
def test_saying_everything_several_times_changes_nothing(chosen, times):
    # the reward is a mean over tokens: length does not count
    once, repeated = one_pair(chosen, [-1.0, -2.0]), one_pair(chosen * times, [-1.0, -2.0])
    torch.testing.assert_close(run(simpo_loss, repeated)[0], run(simpo_loss, once)[0])


def test_at_the_target_margin_the_loss_is_log_2():
    # 2 · (-1 + 1.5) = 1
    loss, _, _ = run(partial(simpo_loss, beta=2.0, target_margin=1.0), one_pair([-1.0], [-1.5]))
    assert loss.item() == pytest.approx(math.log(2))


@given(st.integers(0, 2**16))
def test_without_a_target_swapping_chosen_and_rejected_adds_the_margin(seed):
    batch = random_batch(seed, 3, 4)
    loss = partial(simpo_loss, target_margin=0.0)
    value, _, metrics = run(loss, batch)
    other = run(loss, batch.with_columns(preferred=-batch.columns["preferred"]))[0]
    torch.testing.assert_close(other - value, metrics["margin"])
