import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.advantages import gae, token_rewards, whitened
from penstock.conf.errors import ConfigError, ShapeError

REWARDS = torch.tensor([[0.0, 0.0, 1.0]])
VALUES = torch.full((1, 3), 0.5)


def ragged(seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    rewards, values = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(2))
    return rewards, values, torch.arange(width) < lengths


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages", "returns"),
    [
        # δ = [0, 0, 0.5]; A3 = 0.5, A2 = 0.5 · 0.5, A1 = 0.5 · 0.25
        (1.0, 0.5, [0.125, 0.25, 0.5], [0.625, 0.75, 1.0]),
        # δ = [-0.25, -0.25, 0.5]; A2 = -0.25 + 0.5 · 0.5 = 0, A1 = -0.25
        (0.5, 1.0, [-0.25, 0.0, 0.5], [0.25, 0.5, 1.0]),
    ],
)
def test_gae_by_hand(gamma, lam, advantages, returns):
    got = gae(REWARDS, VALUES, torch.ones(1, 3), gamma=gamma, lam=lam)
    assert got[0].tolist() == [advantages]
    assert got[1].tolist() == [returns]


def test_a_gap_in_the_mask_is_stepped_over():
    # tokens 1 and 3 follow each other: A3 = 0.5, A1 = 0 + 0.5 · 0.5
    rewards, values = torch.tensor([[0.0, math.nan, 1.0]]), torch.tensor([[0.5, math.nan, 0.5]])
    advantages, returns = gae(rewards, values, torch.tensor([[1, 0, 1]]), gamma=1.0, lam=0.5)
    assert advantages.tolist() == [[0.25, 0.0, 0.5]]
    assert returns.tolist() == [[0.75, 0.0, 1.0]]


@given(st.integers(0, 2**16), st.integers(0, 4), st.integers(0, 6), st.floats(0, 1))
def test_the_ends_of_lambda_are_the_one_step_error_and_the_discounted_sum(seed, rows, width, gamma):
    rewards, values, mask = ragged(seed, rows, width)
    reward, value = torch.where(mask, rewards, 0.0), torch.where(mask, values, 0.0)
    next_value = torch.nn.functional.pad(value, (0, 1))[:, 1:]
    torch.testing.assert_close(gae(rewards, values, mask, gamma=gamma, lam=0)[0], reward + gamma * next_value - value)
    to_come = torch.zeros_like(reward)
    for t in range(width):
        for later in range(t, width):
            to_come[:, t] += gamma ** (later - t) * reward[:, later]
    returns = gae(rewards, values, mask, gamma=gamma, lam=1)[1]
    torch.testing.assert_close(returns, torch.where(mask, to_come, 0.0))


@given(st.integers(0, 2**16), st.integers(1, 4), st.integers(1, 6), st.sampled_from([1e9, math.nan, math.inf]))
def test_what_lies_under_padding_changes_nothing_and_becomes_zero(seed, rows, width, garbage):
    rewards, values, mask = ragged(seed, rows, width)
    clean = gae(rewards, values, mask)
    dirty = gae(torch.where(mask, rewards, garbage), torch.where(mask, values, garbage), mask)
    for got, expected in zip(dirty, clean, strict=True):
        assert torch.equal(got, expected)
        assert (got[~mask] == 0).all()


def test_a_perfect_critic_leaves_no_advantage():
    advantages, returns = gae(REWARDS, torch.ones(1, 3), torch.ones(1, 3), gamma=1.0, lam=0.95)
    assert advantages.tolist() == [[0.0] * 3]
    assert returns.tolist() == [[1.0] * 3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_without_gradient(dtype):
    values = VALUES.to(dtype).requires_grad_()
    advantages, returns = gae(REWARDS.to(dtype), values, torch.ones(1, 3))
    assert (advantages.dtype, returns.dtype) == (torch.float32, torch.float32)
    assert not advantages.requires_grad


def test_whitened_tokens_by_hand():
    # tokens 0, 2, 4 over both rows: mean 2, deviation sqrt((4 + 0 + 4) / 2) = 2
    advantage, mask = torch.tensor([[0.0, 2.0], [4.0, math.nan]]), torch.tensor([[1, 1], [1, 0]])
    assert whitened(advantage, mask, eps=0.0).tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    assert whitened(advantage, mask, centre=False, eps=0.0).tolist() == [[0.0, 1.0], [2.0, 0.0]]


@given(st.integers(0, 2**16), st.integers(2, 5), st.integers(2, 6))
def test_whitened_tokens_have_mean_zero_and_deviation_one(seed, rows, width):
    advantage, _, mask = ragged(seed, rows, width)
    tokens = whitened(advantage, mask)[mask].double()
    if len(tokens) > 1:
        assert tokens.mean().item() == pytest.approx(0.0, abs=1e-5)
        assert tokens.std().item() == pytest.approx(1.0, abs=1e-4)


def test_tokens_that_agree_and_no_tokens_are_not_divided():
    same = torch.full((2, 2), 0.1)
    assert whitened(same, torch.ones(2, 2)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    torch.testing.assert_close(whitened(same, torch.ones(2, 2), centre=False), same)
    assert whitened(torch.full((1, 2), math.nan), torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]
    assert whitened(torch.zeros(2, 0), torch.zeros(2, 0)).shape == (2, 0)


def test_bad_input_is_named():
    with pytest.raises(ConfigError, match=r"algorithm.gamma=1.5: must lie between 0 and 1"):
        gae(REWARDS, VALUES, torch.ones(1, 3), gamma=1.5)
    with pytest.raises(ConfigError, match=r"algorithm.lam=nan"):
        gae(REWARDS, VALUES, torch.ones(1, 3), lam=math.nan)
    with pytest.raises(ShapeError, match=r"values is float32 \[1, 2\]; expected \[1, 3\], the shape of rewards"):
        gae(REWARDS, VALUES[:, :2], torch.ones(1, 3))
    with pytest.raises(ConfigError, match="eps=-1"):
        whitened(REWARDS, torch.ones(1, 3), eps=-1)


GAPS = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])


def test_the_reward_stands_at_the_last_token_of_the_mask():
    # a row without a token has no place for it
    rewards = token_rewards(torch.tensor([2.0, 3.0, 4.0]), GAPS)
    assert rewards.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]]


def test_each_token_pays_for_its_divergence():
    # 0.1 · (-1 + 2) = 0.1 and 0.1 · (-2 + 2) = 0
    logprobs, reference = torch.tensor([[-1.0, -2.0, math.nan]]), torch.tensor([[-2.0, -2.0, math.nan]])
    rewards = token_rewards(torch.tensor([2.0]), GAPS[:1], logprobs, reference, kl_coef=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 2.0, 0.0]]))


@given(st.integers(0, 2**16), st.integers(0, 5), st.integers(0, 5))
def test_the_rewards_of_the_tokens_sum_to_that_of_the_response(seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < 0.5
    reward = torch.randn(rows, generator=generator)
    total = token_rewards(reward, mask).sum(dim=-1)
    torch.testing.assert_close(total, torch.where(mask.any(dim=-1), reward, 0.0))


def test_bad_input_of_token_rewards_is_named():
    with pytest.raises(ShapeError, match=r"reward is float32 \[2\]; expected \[3\], a reward a row of the mask"):
        token_rewards(torch.zeros(2), GAPS)
    with pytest.raises(ShapeError, match="nan at position 0"):
        token_rewards(torch.tensor([math.nan]), GAPS[:1])
    with pytest.raises(ConfigError, match=r"algorithm.kl_coef=0.1 in the reward needs logprobs and reference_logprobs"):
        token_rewards(torch.zeros(3), GAPS, kl_coef=0.1)
    with pytest.raises(ShapeError, match=r"mask is int64 \[3\]; expected a tensor \[B, T\]"):
        token_rewards(torch.zeros(3), GAPS[0])
