"""PPO's per-batch stage and graph."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.builtin.ppo import ppo, ppo_advantages
from penstock.algorithms.catalogue import build_dataflow, in_environment
from penstock.conf.algorithms import PpoConfig
from penstock.conf.errors import ConfigError, ShapeError


def columns(*rows):
    return [torch.tensor(row) for row in rows]


def test_advantages_and_returns_by_hand():
    # k1 = log π - log π_ref: [0.5, 0] and [-1]; rewards of tokens: -0.2 k1, and the reward at the last token:
    # [-0.1, 1] and [0.2 + 0]. gamma = lam = 1, so A is the sum of rewards to come less V:
    # [0.9 - 0.5, 1 - 0.25] = [0.4, 0.75] and [0.2 - 0.2] = [0]; returns are those sums.
    # whitened: mean 1.15 / 3 = 0.383333; squares 0.000278 + 0.134444 + 0.146944 = 0.281667, / 2, root 0.375278
    advantage, returns = ppo_advantages(
        torch.tensor([1.0, 0.0]),
        columns([0.5, 0.25], [0.2]),
        columns([-1.0, -2.0], [-3.0]),
        columns([-1.5, -2.0], [-2.0]),
        gamma=1.0,
        lam=1.0,
        kl_coef=0.2,
    )
    assert [row.tolist() for row in returns] == [pytest.approx([0.9, 1.0]), pytest.approx([0.2])]
    flat = torch.cat(advantage).tolist()
    assert flat == pytest.approx([0.016667 / 0.375278, 0.366667 / 0.375278, -0.383333 / 0.375278], abs=1e-4)
    assert [len(row) for row in advantage] == [2, 1]


def test_turns_are_steps_and_their_tokens_penalties_are_theirs():
    # two turns of 2 and 1 tokens; k1 = 0.5, 0.5, 0.1, penalties at 0.2: -0.2 for the first turn, -0.02 for the second;
    # rewards 0.3 - 0.2 and 0.7 - 0.02; gamma = lam = 1: returns 0.78, 0.68, advantages less V 0.28, 0.28, 0.58,
    # whitened: mean 0.38, squares 0.01 + 0.01 + 0.04 = 0.06, / 2, root 0.173205
    advantage, returns = ppo_advantages(
        torch.tensor([1.0]), columns([0.5, 7.0, 0.1]), columns([-1.0, -1.0, -1.0]), columns([-1.5, -1.5, -1.1]), 0.2,
        columns([0.3, 0.0]), columns([2, 1]), columns([0, 1]), lam=1.0,
    )  # fmt: skip
    assert returns[0].tolist() == pytest.approx([0.78, 0.78, 0.68], abs=1e-6)
    assert advantage[0].tolist() == pytest.approx([-0.1 / 0.173205, -0.1 / 0.173205, 0.2 / 0.173205], abs=1e-4)
    flow = in_environment(ppo(PpoConfig(advantage="turn_gae"))).check()
    assert {"turn_rewards", "turn_tokens", "turn_ids"} < set(flow.stage("ppo_advantages").reads)
    with pytest.raises(ConfigError, match=r"algorithm\.advantage=grpo"):
        PpoConfig(advantage="grpo")


def test_a_coefficient_of_the_batch_is_that_of_the_configuration():
    columns_of = (
        torch.tensor([1.0, 0.0]),
        columns([0.5, 0.25], [0.2]),
        columns([-1.0, -2.0], [-3.0]),
        columns([-1.5, -2.0], [-2.0]),
    )
    by_number, by_column = (ppo_advantages(*columns_of, kl_coef=coef)[1] for coef in (0.2, torch.full((2,), 0.2)))
    torch.testing.assert_close(by_number, by_column)
    with pytest.raises(ConfigError, match="in the reward needs logprobs and reference_logprobs"):
        ppo_advantages(*columns_of[:3], kl_coef=torch.full((2,), 0.2))


def test_a_batch_without_rows_is_empty():
    assert ppo_advantages(torch.zeros(0), [], []) == ([], [])


@given(st.lists(st.integers(1, 6), min_size=2, max_size=6), st.integers(0, 2**16))
def test_rows_do_not_see_each_others_padding(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randn(len(lengths), generator=generator)
    values, logprobs = ([torch.randn(n, generator=generator) for n in lengths] for _ in range(2))
    advantage, returns = ppo_advantages(reward, values, logprobs)
    for row, length in enumerate(lengths):
        _, alone = ppo_advantages(reward[row : row + 1], values[row : row + 1], logprobs[row : row + 1])
        torch.testing.assert_close(returns[row], alone[0])
        assert len(advantage[row]) == length
    assert math.isclose(float(torch.cat(advantage).mean()), 0.0, abs_tol=1e-5)


def test_what_does_not_fit_is_named():
    one = columns([0.5, 0.25])
    with pytest.raises(ShapeError, match=r"reward is float32 \[2\]; expected \[1\], a reward a row of the mask"):
        ppo_advantages(torch.zeros(2), one, one)
    with pytest.raises(ConfigError, match=r"algorithm.kl_coef=0.1 in the reward needs logprobs and reference_logprobs"):
        ppo_advantages(torch.zeros(1), one, one, kl_coef=0.1)
    with pytest.raises(ConfigError, match=r"algorithm.gamma=2"):
        ppo_advantages(torch.zeros(1), one, one, gamma=2)


def test_the_graph_has_a_critic_and_a_reference_only_if_the_penalty_asks():
    flow = build_dataflow(PpoConfig())
    assert [stage.kind for stage in flow.in_trainer] == ["values", "compute", "critic"]
    assert not flow.of_kind("logprobs")
    assert flow.of_kind("reward")
    flow = build_dataflow(PpoConfig(kl_coef=0.1, reward_model=True))
    assert "reference_logprobs" in flow.stage("ppo_advantages").reads
    assert not flow.of_kind("reward")
