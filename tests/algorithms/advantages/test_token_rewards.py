import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.advantages import token_rewards
from penstock.conf.errors import ConfigError, ShapeError

MASK = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])


def test_the_reward_stands_at_the_last_token_of_the_mask():
    # a row without a token has no place for it
    rewards = token_rewards(torch.tensor([2.0, 3.0, 4.0]), MASK)
    assert rewards.tolist() == [[0.0, 2.0, 0.0], [0.0, 0.0, 3.0], [0.0, 0.0, 0.0]]


def test_each_token_pays_for_its_divergence():
    # 0.1 · (-1 + 2) = 0.1 and 0.1 · (-2 + 2) = 0
    logprobs, reference = torch.tensor([[-1.0, -2.0, math.nan]]), torch.tensor([[-2.0, -2.0, math.nan]])
    rewards = token_rewards(torch.tensor([2.0]), MASK[:1], logprobs, reference, kl_coef=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[-0.1, 2.0, 0.0]]))


@given(st.integers(0, 2**16), st.integers(0, 5), st.integers(0, 5))
def test_the_rewards_of_the_tokens_sum_to_that_of_the_response(seed, rows, width):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < 0.5
    reward = torch.randn(rows, generator=generator)
    total = token_rewards(reward, mask).sum(dim=-1)
    torch.testing.assert_close(total, torch.where(mask.any(dim=-1), reward, 0.0))


def test_bad_input_is_named():
    with pytest.raises(ShapeError, match=r"reward is float32 \[2\]; expected \[3\], a reward a row of the mask"):
        token_rewards(torch.zeros(2), MASK)
    with pytest.raises(ShapeError, match="nan at position 0"):
        token_rewards(torch.tensor([math.nan]), MASK[:1])
    with pytest.raises(ConfigError, match=r"algorithm.kl_coef=0.1 in the reward needs logprobs and reference_logprobs"):
        token_rewards(torch.zeros(3), MASK, kl_coef=0.1)
    with pytest.raises(ShapeError, match=r"mask is int64 \[3\]; expected a tensor \[B, T\]"):
        token_rewards(torch.zeros(3), MASK[0])
