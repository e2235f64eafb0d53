import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.preference.pair_losses import simpo_loss
from tests.algorithms.preference.batches import one_pair, random_batch, run


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
