import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.advantages import (
    ADVANTAGES,
    dr_grpo,
    gpg,
    group_advantage,
    opo,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    rloo,
)
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
    with pytest.raises(ShapeError, match=r"greedy_reward is float32 \[3\]; expected \[2\]"):
        remax(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ShapeError, match=r"greedy_reward is float32 .* with inf at position 0"):
        remax(torch.zeros(1), torch.tensor([float("inf")]))
    with pytest.raises(ShapeError, match=r"response_ids is int64 \[1\]; expected \[2\]"):
        opo(torch.zeros(2), [torch.zeros(3)])
    with pytest.raises(ShapeError, match="response_ids has a length of -1"):
        opo(torch.zeros(2), torch.tensor([1, -1]))
    with pytest.raises(ConfigError, match="norm=0"):
        gpg(torch.zeros(2), norm=0)


# two prompts with two samples each
REWARD = torch.tensor([0.0, 2.0, 1.0, 5.0])
GROUPS = torch.tensor([4, 4, 9, 9])


def test_dr_grpo_is_grpo_without_the_deviation():
    assert dr_grpo(torch.tensor([1.0, 0.0, 0.0, 0.0])).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_rloo_compares_with_the_mean_of_the_others():
    # 1 - (0 + 0) / 2 = 1; 0 - (1 + 0) / 2 = -0.5
    assert rloo(torch.tensor([1.0, 0.0, 0.0])).tolist() == [1.0, -0.5, -0.5]


@given(REWARDS.filter(lambda rewards: len(rewards) > 1))
def test_rloo_is_dr_grpo_times_g_over_g_minus_one(rewards):
    reward = torch.tensor(rewards)
    expected = dr_grpo(reward) * len(rewards) / (len(rewards) - 1)
    torch.testing.assert_close(rloo(reward), expected, rtol=1e-5, atol=1e-6)


def test_reinforce_plus_plus_takes_its_statistics_from_the_batch():
    # mean 2, deviation sqrt((4 + 0 + 1 + 9) / 3) = 2.160247
    expected = torch.tensor([-2.0, 0.0, -1.0, 3.0]) / 2.160247
    torch.testing.assert_close(reinforce_plus_plus(REWARD, eps=0.0), expected)


def test_its_baseline_variant_centres_by_group_and_scales_by_batch():
    # centred -1, 1, -2, 2; deviation sqrt((1 + 1 + 4 + 4) / 3) = 1.825742
    expected = torch.tensor([-1.0, 1.0, -2.0, 2.0]) / 1.825742
    torch.testing.assert_close(reinforce_plus_plus_baseline(REWARD, GROUPS, eps=0.0), expected)


def test_opo_weighs_the_baseline_by_length():
    # lengths 1 and 3: (1 · 1 + 3 · 0) / 4 = 0.25
    reward, responses = torch.tensor([1.0, 0.0]), [torch.zeros(1), torch.zeros(3)]
    assert opo(reward, responses).tolist() == [0.75, -0.25]
    assert opo(reward, torch.tensor([1, 3])).tolist() == [0.75, -0.25]


def test_opo_of_many_groups_is_that_of_each():
    # (1 · 0 + 3 · 2) / 4 = 1.5; (2 · 1 + 2 · 5) / 4 = 3
    assert opo(REWARD, torch.tensor([1, 3, 2, 2]), GROUPS).tolist() == [-1.5, 0.5, -2.0, 2.0]


def test_opo_of_equal_lengths_is_dr_grpo():
    assert torch.equal(opo(REWARD, torch.tensor([6, 6, 6, 6])), dr_grpo(REWARD))


def test_opo_of_groups_that_are_alone_agree_or_have_no_token_is_zero():
    assert opo(torch.tensor([3.0]), torch.tensor([2])).tolist() == [0.0]
    assert opo(torch.full((3,), 0.1), torch.tensor([1, 2, 4])).tolist() == [0.0] * 3
    assert opo(torch.tensor([1.0, 2.0]), torch.tensor([0, 0])).tolist() == [0.0, 0.0]


def test_the_length_weighted_advantages_of_opo_sum_to_zero():
    length = torch.tensor([1, 3, 2, 2])
    assert (opo(REWARD, length, GROUPS) * length).sum().item() == pytest.approx(0.0, abs=1e-6)


def test_remax_compares_with_the_greedy_response():
    assert remax(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])).tolist() == [0.5, -0.5]


def test_gpg_makes_up_for_groups_that_agree():
    # 4 samples, 2 of them in a group that does not agree: alpha = 2, centred ±0.5
    reward, groups = torch.tensor([1.0, 0.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1])
    assert gpg(reward, groups).tolist() == [1.0, -1.0, 0.0, 0.0]
    assert gpg(reward, groups, norm=2.0).tolist() == [0.5, -0.5, 0.0, 0.0]


def test_gpg_of_one_group_is_dr_grpo_and_of_nothing_useful_zero():
    assert torch.equal(gpg(REWARD), dr_grpo(REWARD))
    assert gpg(torch.ones(3)).tolist() == [0.0] * 3


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gpg"])
def test_several_groups_at_once_are_each_one_as_alone(name):
    together = ADVANTAGES.find(name)(REWARD, GROUPS)
    alone = torch.cat([ADVANTAGES.find(name)(REWARD[:2]), ADVANTAGES.find(name)(REWARD[2:])])
    torch.testing.assert_close(together, alone)


def test_an_unknown_advantage_is_answered_with_the_nearest_one():
    with pytest.raises(ConfigError, match=r"algorithm.advantage=rlo: unknown; did you mean 'rloo'"):
        ADVANTAGES.find("rlo")
