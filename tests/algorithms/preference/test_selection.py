import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.builtin.preferences import best_and_worst, good_or_bad
from penstock.algorithms.losses.preference import Pairs
from penstock.conf.errors import ConfigError, ShapeError

REWARDS = st.lists(st.integers(-3, 3), min_size=0, max_size=8)


def test_the_best_is_chosen_and_the_worst_rejected():
    preferred = best_and_worst(torch.tensor([0.5, 2.0, -1.0, 1.0]))
    assert preferred.tolist() == [0.0, 1.0, -1.0, 0.0]
    assert preferred.dtype == torch.float32


def test_of_equal_ones_the_first_counts():
    assert best_and_worst(torch.tensor([1.0, 0.0, 1.0, 0.0])).tolist() == [1.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize("rewards", [[], [3.0], [1.0, 1.0], [0.0, 0.0, 0.0]])
def test_a_group_that_agrees_has_no_pair(rewards):
    assert best_and_worst(torch.tensor(rewards)).tolist() == [0.0] * len(rewards)


def test_a_gap_of_just_the_least_one_is_enough():
    assert best_and_worst(torch.tensor([0.0, 0.5]), min_gap=0.5).tolist() == [-1.0, 1.0]
    assert best_and_worst(torch.tensor([0.0, 0.5]), min_gap=0.51).tolist() == [0.0, 0.0]


def test_integer_and_boolean_rewards_are_fine():
    assert best_and_worst(torch.tensor([0, 2])).tolist() == [-1.0, 1.0]
    assert best_and_worst(torch.tensor([True, False])).tolist() == [1.0, -1.0]


@given(REWARDS, st.floats(0, 7))
def test_there_is_one_of_each_or_none_and_they_are_extremes_far_enough_apart(rewards, min_gap):
    reward = torch.tensor(rewards, dtype=torch.float32)
    preferred = best_and_worst(reward, min_gap=min_gap)
    chosen, rejected = reward[preferred == 1].tolist(), reward[preferred == -1].tolist()
    gap = max(rewards, default=0) - min(rewards, default=0)
    if gap == 0 or gap < min_gap:
        assert not preferred.any()
    else:
        assert (chosen, rejected) == ([max(rewards)], [min(rewards)])


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=8, unique=True), st.randoms())
def test_the_order_of_samples_does_not_matter_where_rewards_differ(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    reward = torch.tensor(rewards)
    assert torch.equal(best_and_worst(reward[order]), best_and_worst(reward)[order])


@given(REWARDS)
def test_with_rewards_negated_chosen_and_rejected_change_places(rewards):
    reward = torch.tensor(rewards, dtype=torch.float32)
    assert torch.equal(best_and_worst(-reward), -best_and_worst(reward))


@given(st.lists(REWARDS, max_size=4))
def test_what_is_selected_is_what_losses_of_pairs_accept(groups):
    preferred = torch.cat([torch.zeros(0), *(best_and_worst(torch.tensor(rewards).float()) for rewards in groups)])
    group_ids = torch.tensor([number for number, rewards in enumerate(groups) for _ in rewards], dtype=torch.int64)
    pairs = Pairs.of(preferred, group_ids, BatchTotals(0, 0, len(groups)))
    assert len(pairs.chosen_P) == sum(len(set(rewards)) > 1 for rewards in groups)


def test_bad_input_is_named():
    with pytest.raises(ShapeError, match=r"reward is float32 \[2, 2\]; expected a tensor \[G\]"):
        best_and_worst(torch.zeros(2, 2))
    with pytest.raises(ShapeError, match=r"nan at position 1; expected finite rewards"):
        best_and_worst(torch.tensor([0.0, float("nan")]))
    with pytest.raises(ConfigError, match=r"algorithm.min_gap=-1: must be a finite number, at least 0"):
        best_and_worst(torch.zeros(2), min_gap=-1)


def test_good_is_what_lies_above_the_threshold():
    assert good_or_bad(torch.tensor([1.0, 0.5, 0.0])).tolist() == [1.0, -1.0, -1.0]
    signs = good_or_bad(torch.tensor([1, 0, -2]), threshold=-1.0)
    assert signs.tolist() == [1.0, 1.0, -1.0]
    assert signs.dtype == torch.float32
    with pytest.raises(ShapeError, match=r"reward is float32 \[1\] with nan at position 0; expected finite rewards"):
        good_or_bad(torch.tensor([torch.nan]))
