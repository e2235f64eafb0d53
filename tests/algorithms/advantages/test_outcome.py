import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.advantages import group_advantage
from penstock.conf.errors import ConfigError, ShapeError

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=0, max_size=9)


def test_rewards_are_centred_and_divided_by_the_sample_deviation():
    # mean = 2; deviations -2, 0, 2; std = sqrt((4 + 0 + 4) / (3 - 1)) = 2
    advantage = group_advantage(torch.tensor([0.0, 2.0, 4.0]), eps=0.0)
    assert advantage.tolist() == [-1.0, 0.0, 1.0]
    assert advantage.dtype == torch.float32


def test_eps_is_added_to_the_deviation():
    # 2 / (2 + 2) = 0.5
    assert group_advantage(torch.tensor([0.0, 2.0, 4.0]), eps=2.0).tolist() == [-0.5, 0.0, 0.5]


def test_without_std_rewards_are_only_centred():
    # mean = 0.25
    advantage = group_advantage(torch.tensor([1.0, 0.0, 0.0, 0.0]), normalize_std=False)
    assert advantage.tolist() == [0.75, -0.25, -0.25, -0.25]


def test_a_group_of_one_or_none_has_no_advantage():
    assert group_advantage(torch.tensor([3.0])).tolist() == [0.0]
    assert group_advantage(torch.tensor([])).tolist() == []


@given(st.floats(-1e6, 1e6, width=32), st.integers(2, 9), st.booleans())
def test_equal_rewards_give_exactly_zero(reward, size, normalize_std):
    assert group_advantage(torch.full((size,), reward), normalize_std=normalize_std).tolist() == [0.0] * size


@given(REWARDS, st.booleans())
def test_advantages_of_a_group_sum_to_zero_and_are_finite(rewards, normalize_std):
    advantage = group_advantage(torch.tensor(rewards), normalize_std=normalize_std)
    assert advantage.isfinite().all()
    assert abs(advantage.double().sum().item()) < 1e-4


@given(REWARDS, st.randoms(), st.booleans())
def test_the_order_of_samples_does_not_matter(rewards, random, normalize_std):
    order = list(range(len(rewards)))
    random.shuffle(order)
    straight = group_advantage(torch.tensor(rewards), normalize_std=normalize_std)
    shuffled = group_advantage(torch.tensor([rewards[i] for i in order]), normalize_std=normalize_std)
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-5, atol=1e-6)


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=8), st.floats(0.1, 100), st.floats(-50, 50))
def test_with_std_neither_scale_nor_shift_of_the_reward_matters(rewards, scale, shift):
    reward = torch.tensor(rewards, dtype=torch.float64)
    plain, changed = group_advantage(reward), group_advantage(reward * scale + shift)
    torch.testing.assert_close(changed, plain, rtol=1e-3, atol=1e-4)


def test_statistics_of_large_rewards_keep_their_digits():
    # float32 cannot tell the mean of these from its neighbours
    advantage = group_advantage(torch.tensor([16777216.0, 16777218.0]), normalize_std=False)
    assert advantage.tolist() == [-1.0, 1.0]


def test_integer_and_boolean_rewards_are_fine():
    assert group_advantage(torch.tensor([0, 2]), normalize_std=False).tolist() == [-1.0, 1.0]
    assert group_advantage(torch.tensor([False, True]), normalize_std=False).tolist() == [-0.5, 0.5]


def test_bad_input_is_named():
    with pytest.raises(ShapeError, match=r"reward is float32 \[2, 2\]; expected a tensor \[G\]"):
        group_advantage(torch.zeros(2, 2))
    with pytest.raises(ShapeError, match=r"nan at position 1; expected finite rewards"):
        group_advantage(torch.tensor([0.0, float("nan")]))
    with pytest.raises(ConfigError, match="eps=-1"):
        group_advantage(torch.zeros(2), eps=-1)
