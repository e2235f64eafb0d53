import random

import pytest
import torch

from penstock.algorithms.advantages import rloo, turn_rloo
from penstock.algorithms.builtin.policy_gradient import policy_gradient
from penstock.algorithms.catalogue import in_environment
from penstock.conf.algorithms import PolicyGradientConfig
from penstock.conf.errors import ConfigError, ShapeError


def lists(*values: list[float]) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float32) for value in values]


def test_a_turn_is_compared_with_what_others_are_given_after_theirs() -> None:
    rewards, tokens, ids = lists([1, 0], [0, 1]), lists([1, 2], [2, 1]), lists([0, 1], [0, 1])
    first, second = turn_rloo(torch.tensor([1.0, 1.0]), rewards, tokens, ids)
    assert first.tolist() == [0.0, -1.0, -1.0]  # 1 + 0 against 0 + 1, then 0 against 1
    assert second.tolist() == [0.0, 0.0, 1.0]


def test_what_the_whole_was_given_falls_on_the_last_turn() -> None:
    ids = lists([0, 1], [0, 1])
    found = turn_rloo(torch.tensor([2.0, 0.0]), lists([0, 0], [0, 0]), lists([1, 1], [1, 1]), ids)
    assert [values.tolist() for values in found] == [[2.0, 2.0], [-2.0, -2.0]]


def test_with_rewards_of_wholes_and_as_many_turns_it_is_rloo() -> None:
    rng = random.Random(0)
    reward = torch.tensor([rng.random() for _ in range(5)])
    zeros, tokens, ids = lists(*[[0] * 3] * 5), lists(*[[1] * 3] * 5), lists(*[[0, 1, 2]] * 5)
    found = turn_rloo(reward, zeros, tokens, ids)
    for values, expected in zip(found, rloo(reward).tolist(), strict=True):
        assert values.tolist() == pytest.approx([expected] * 3)


def test_turns_that_stand_in_another_order_than_they_were_played_in() -> None:
    """Two segments: the second turn stands last, though a third was played in the first segment."""
    rewards, tokens, ids = lists([1, 3, 2], [0, 0, 0]), lists([1, 1, 2], [1, 1, 1]), lists([0, 2, 1], [0, 1, 2])
    first, _ = turn_rloo(torch.tensor([6.0, 0.0]), rewards, tokens, ids)
    assert first.tolist() == [6.0, 3.0, 5.0, 5.0]


def test_later_rewards_count_less() -> None:
    ids = lists([0, 1], [0])
    first, second = turn_rloo(torch.tensor([2.0, 0.0]), lists([1, 1], [0]), lists([1, 1], [1]), ids, gamma=0.5)
    assert first.tolist() == [1.5, 1.0]
    assert second.tolist() == [-1.5]


def test_the_gradient_is_unbiased_where_attempts_end_early() -> None:
    """Two attempts at a game of up to two turns: action 1 of the first turn goes on, action 0 ends it. Averaged over
    all outcomes, `Σ A ∇ log π` is the gradient of the expected reward."""
    go, win, gain = 0.3, 0.6, 2.0  # probabilities of action 1 in both turns; the reward of a win
    outcomes = [([0], 1 - go), ([1, 0], go * (1 - win)), ([1, 1], go * win)]
    slopes = torch.zeros(2)
    for mine, chance in outcomes:
        for other, other_chance in outcomes:
            attempts = [mine, other]
            reward = torch.tensor([gain * (actions == [1, 1]) + 0.5 * (actions == [0]) for actions in attempts])
            zeros, ones = lists(*([0] * len(a) for a in attempts)), lists(*([1] * len(a) for a in attempts))
            ids = lists(*(list(range(len(a))) for a in attempts))
            advantage = turn_rloo(reward, zeros, ones, ids)[0]
            for turn, (action, probability) in enumerate(zip(mine, (go, win), strict=False)):
                slope = 1 / probability if action else -1 / (1 - probability)
                slopes[turn] += chance * other_chance * advantage[turn] * slope
    assert slopes.tolist() == pytest.approx([gain * win - 0.5, gain * go], abs=1e-5)


def test_one_attempt_alone_has_nothing_to_be_compared_with() -> None:
    (alone,) = turn_rloo(torch.tensor([1.0]), lists([1]), lists([2]), lists([0]))
    assert alone.tolist() == [0.0, 0.0]


def test_misfits_are_named() -> None:
    with pytest.raises(ShapeError, match="expected 2"):
        turn_rloo(torch.tensor([1.0, 2.0]), lists([1]), lists([2]), lists([0]))
    with pytest.raises(ConfigError, match="gamma"):
        turn_rloo(torch.tensor([1.0]), lists([1]), lists([2]), lists([0]), gamma=1.5)


def test_a_recipe_asks_for_it_by_name() -> None:
    flow = in_environment(policy_gradient(PolicyGradientConfig(advantage="turn_rloo"))).check()
    assert flow.columns["token_advantage"].shape == "token"
    assert "token_advantage" in flow.reads_of(flow.stage("train"))
    assert "turn_rewards" in flow.stage("advantage").reads
