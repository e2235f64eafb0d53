"""Recipes of two policies: who speaks, and what each of them is paid."""

import asyncio
from collections.abc import Callable

import pytest
import torch

from penstock.recipes.proposer.sums import ASK, Sums, answers_against_each_other, sums_against_each_other
from penstock.recipes.tictactoe_two.duel import Duel
from penstock.workers.agents.environment import Task
from penstock.workers.agents.trajectory import Trajectory
from penstock.workers.protocols import Sampling
from tests.workers.agents.played import ScriptedEngines, make_runner


def played(environment: object, task: Task, policies: list[str], says: Callable[[str, Sampling], str]) -> Trajectory:
    runner = make_runner(environment, ScriptedEngines(says), policies=policies, max_turns=12)
    return asyncio.run(runner.attempt(task, Sampling(max_tokens=8, seed=5)))


def test_a_proposer_is_paid_most_for_sums_that_are_right_as_often_as_wrong() -> None:
    answers = iter(["26"] * 3 + ["16"])

    def says(prompt: str, sampling: Sampling) -> str:
        assert (ASK in prompt) == (sampling.policy == "proposer")
        return "19+7" if sampling.policy == "proposer" else next(answers)

    attempt = played(Sums(answers=4), Task("0", 0, {"a": 1, "b": 1}), ["solver", "proposer"], says)
    assert attempt.rewards == {"solver": 3.0, "proposer": 4 * 0.75 * 0.25}
    assert sorted(attempt.turn_rewards.values()) == [0.0, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("proposal", ["7", "07+5", "1+2+3", "100+1", "1 + 2", ""])
def test_what_is_no_sum_is_not_asked(proposal: str) -> None:
    attempt = played(Sums(), Task("0", 0, {"a": 1, "b": 1}), ["solver", "proposer"], lambda *_: proposal)
    assert attempt.rewards["proposer"] == 0.0
    assert [turn.policy for turn in attempt.turns] == ["proposer"]


def test_held_out_sums_are_the_tasks_own() -> None:
    attempt = played(Sums(propose=False), Task("0", 0, {"a": 58, "b": 67}), ["solver", "proposer"], lambda *_: "125")
    assert attempt.rewards["solver"] == 1.0
    assert [turn.policy for turn in attempt.turns] == ["solver"]


def test_answers_and_sums_are_compared_with_their_like() -> None:
    of_answers = answers_against_each_other(
        [torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])], [torch.tensor([2, 1]), torch.tensor([1, 1])]
    )
    assert [one.tolist() for one in of_answers] == [[0.5, 0.5, -0.5], [0.0, 0.0]]
    of_sums = sums_against_each_other(torch.tensor([1.0, 0.0]), [torch.tensor([3]), torch.tensor([2])])
    assert [one.round(decimals=3).tolist() for one in of_sums] == [[1.0] * 3, [-1.0] * 2]


def says_squares(first: str, second: str) -> Callable[[str, Sampling], str]:
    said = {"first": iter(first), "second": iter(second)}
    return lambda _, sampling: next(said[sampling.policy])


@pytest.mark.parametrize(
    ("first", "second", "rewards"),
    [
        ("123", "45", (1.0, 0.0)),
        ("1", "1", (1.0, 0.0)),  # a square that is taken
        ("12", "4x", (1.0, 0.0)),
        ("1x", "4", (0.0, 1.0)),
        ("13489", "2567", (0.5, 0.5)),
    ],
)
def test_each_player_gets_the_result_of_its_own_side(first: str, second: str, rewards: tuple[float, float]) -> None:
    task = Task("0", 0, {"opponent": "self", "mark": "x"})
    attempt = played(Duel(), task, ["first", "second"], says_squares(first, second))
    assert (attempt.rewards["first"], attempt.rewards["second"]) == rewards


@pytest.mark.parametrize(("mark", "policy"), [("x", "first"), ("o", "second")])
def test_against_another_player_one_policy_speaks(mark: str, policy: str) -> None:
    task = Task("0", 3, {"opponent": "perfect", "mark": mark})
    attempt = played(Duel(["perfect"]), task, ["first", "second"], lambda *_: "x")
    assert {turn.policy for turn in attempt.turns} == {policy}
    assert attempt.rewards[policy] == 0.0
