import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.algorithms.advantages import gae, gigpo, group_advantage, mt_grpo, rloo, turn_gae, turn_rloo
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


def test_no_attempts_have_no_advantages() -> None:
    nothing = torch.zeros(0), [], [], []
    assert (turn_rloo(*nothing), gigpo(*nothing, []), mt_grpo(*nothing)) == ([], [], [])
    assert turn_gae(torch.zeros(0), [], [], [], []) == ([], [])


def test_misfits_are_named() -> None:
    with pytest.raises(ShapeError, match="expected 2"):
        turn_rloo(torch.tensor([1.0, 2.0]), lists([1]), lists([2]), lists([0]))
    with pytest.raises(ConfigError, match="gamma"):
        turn_rloo(torch.tensor([1.0]), lists([1]), lists([2]), lists([0]), gamma=1.5)


@pytest.mark.parametrize("name", ["turn_rloo", "gigpo", "mt_grpo"])
def test_a_recipe_asks_for_it_by_name(name: str) -> None:
    flow = in_environment(policy_gradient(PolicyGradientConfig(advantage=name))).check()
    assert ("turn_states" in flow.columns) == (name == "gigpo")  # it travels only where it is read
    assert flow.columns["token_advantage"].shape == "token"
    assert "token_advantage" in flow.reads_of(flow.stage("train"))
    assert "turn_rewards" in flow.stage("advantage").reads


def states(*values: list[int]) -> list[torch.Tensor]:
    return [torch.tensor(value) for value in values]


def test_gigpo_compares_attempts_and_then_turns_that_began_in_the_same_state() -> None:
    """Two attempts: A goes from state 7 to 8 and wins 1, B from 7 to 9 to 8 and wins 0. With gamma 0.5:

    returns   A: 0.5 in 7, 1 in 8             B: 0 in 7, 0 in 9, 0 in 8
    wholes    A: 1 - 0.5 = 0.5                B: -0.5
    turns     7: (0.5, 0) less 0.25           8: (1, 0) less 0.5           9: alone, 0
    """
    found = gigpo(
        torch.tensor([1.0, 0.0]), lists([0, 0], [0, 0, 0]), lists([2, 1], [1, 1, 1]), lists([0, 1], [0, 1, 2]),
        states([7, 8], [7, 9, 8]), gamma=0.5, omega=2.0, normalize_std=False,
    )  # fmt: skip
    assert [values.tolist() for values in found] == [[1.0, 1.0, 1.5], [-1.0, -0.5, -1.5]]


def test_gigpo_divides_both_by_the_deviation_of_a_sample() -> None:
    """Of 1 and 0 it is √½, in the wholes as in the one state where returns differ."""
    ids, tokens = lists([0, 1], [0, 1]), lists([1, 1], [1, 1])
    found = gigpo(torch.tensor([1.0, 0.0]), lists([0, 0], [0, 0]), tokens, ids, states([1, 2], [3, 2]))
    half = 0.5**0.5
    for values, sign in zip(found, (1, -1), strict=True):
        assert values.tolist() == pytest.approx([sign * half, sign * 2 * half], abs=1e-5)


def test_a_state_that_an_attempt_returns_to_is_compared_with_itself() -> None:
    found = gigpo(
        torch.tensor([1.0]), lists([0, 0]), lists([1, 1]), lists([0, 1]), states([4, 4]), gamma=0.5, normalize_std=False
    )
    assert found[0].tolist() == [-0.25, 0.25]  # 0.5 and 1


def test_gigpo_follows_the_order_of_play() -> None:
    """The second turn stands last: it has the state 5, in which the other attempt is at its end."""
    found = gigpo(
        torch.tensor([0.0, 1.0]), lists([0, 0, 0], [0]), lists([1, 1, 2], [1]), lists([0, 2, 1], [0]),
        states([3, 4, 5], [5]), gamma=1.0, normalize_std=False,
    )  # fmt: skip
    assert [values.tolist() for values in found] == [[-0.5, -0.5, -1.0, -1.0], [1.0]]


def test_mt_grpo_adds_the_turns_own_advantage_before_the_last_turn() -> None:
    """Three attempts. Outcomes 1, 0, 0.5 beyond turns' rewards of 1, 0 and none: the third has one turn.

    outcomes less 0.5: 0.5, -0.5, 0; first turns that are not the last (1, 0) less 0.5; weight 2
    """
    reward, rewards = torch.tensor([2.0, 0.0, 0.5]), lists([1, 0], [0, 0], [0])
    tokens, ids = lists([1, 2], [2, 1], [1]), lists([0, 1], [0, 1], [0])
    found = mt_grpo(reward, rewards, tokens, ids, weight=2.0, normalize_std=False)
    assert [values.tolist() for values in found] == [[1.5, 0.5, 0.5], [-1.5, -1.5, -0.5], [0.0]]
    first, *_ = mt_grpo(reward, rewards, tokens, ids)
    assert first.tolist() == pytest.approx([1 + 0.5**0.5, 1.0, 1.0], abs=1e-5)  # deviations 0.5 and √½


def test_turn_gae_takes_each_turn_for_a_step() -> None:
    """Turns of 2 and 1 tokens, values 0.5 and 0.25 before them, rewards 0.2 and 1. gamma 0.5, lam 0.5:

    δ_1 = 1 - 0.25 = 0.75;  δ_0 = 0.2 + 0.5 · 0.25 - 0.5 = -0.175;  A_0 = -0.175 + 0.25 · 0.75 = 0.0125
    """
    advantages, returns = turn_gae(
        torch.tensor([1.2]), lists([0.5, 9, 0.25]), lists([0.2, 0]), lists([2, 1]), lists([0, 1]), gamma=0.5, lam=0.5
    )
    assert advantages[0].tolist() == pytest.approx([0.0125, 0.0125, 0.75], abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0.5125, 0.5125, 1.0], abs=1e-6)


def test_turn_gae_goes_by_the_order_of_play_and_over_turns_without_tokens() -> None:
    """The second turn stands last and has no token: it is over, and its reward of 2 with it."""
    advantages, returns = turn_gae(
        torch.tensor([3.0, 1.0]), lists([0.5, 0, 0, 0.25], [1]), lists([0, 0, 2], [0]), lists([3, 1, 0], [1]),
        lists([0, 2, 1], [0]), lam=1.0,
    )  # fmt: skip
    assert [values.tolist() for values in returns] == [[1.0] * 4, [1.0]]
    assert [values.tolist() for values in advantages] == [[0.5, 0.5, 0.5, 0.75], [0.0]]


@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=6), st.integers(0, 2**16))
def test_with_one_turn_each_is_what_it_generalises(rewards: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    reward = torch.tensor(rewards)
    count = len(rewards)
    given_to = torch.randn(count, generator=generator)
    columns = [given_to[i : i + 1] for i in range(count)], lists(*[[1]] * count), lists(*[[0]] * count)
    group = group_advantage(reward)
    torch.testing.assert_close(torch.cat(gigpo(reward, *columns, states(*([i] for i in range(count))))), group)
    torch.testing.assert_close(torch.cat(gigpo(reward, *columns, states(*[[0]] * count))), 2 * group)  # at omega 1
    torch.testing.assert_close(torch.cat(mt_grpo(reward, *columns)), group)
    values = torch.randn(count, 1, generator=generator)
    expected = gae(reward.unsqueeze(-1), values, torch.ones(count, 1))
    for found, of_tokens in zip(turn_gae(reward, list(values), *columns), expected, strict=True):
        torch.testing.assert_close(torch.stack(found), of_tokens)


@pytest.mark.parametrize(("option", "value"), [("gamma", 1.5), ("omega", -1.0)])
def test_settings_of_gigpo_out_of_range_are_named(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=option):
        gigpo(torch.tensor([1.0]), lists([1]), lists([2]), lists([0]), states([0]), **{option: value})
