"""Search over samples: what the recipes' environments choose, ask and reward."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from penstock import Context, Task, Turn
from penstock.algorithms.catalogue import dataflow_of
from penstock.orchestrator.configuration.compose import load_config
from penstock.recipes.best_of_n.sums import Sums as BestOfN
from penstock.recipes.parallel_answers.sums import Sums as ParallelAnswers
from penstock.recipes.tree.coins import Tree, draw, paid

SUM = Task("0", 0, {"a": 47, "b": 38})


class Scripted(Context):
    """A context in which the policy says these answers, one after the other."""

    def __init__(self, answers: Sequence[str]) -> None:
        self.left, self.asked, self.options = list(answers), [], []
        self.total_reward, self.turn_rewards = 0.0, defaultdict(float)

    async def sample(self, messages: Any, tools: Any = (), *, train: bool = True, **options: Any) -> Turn:
        self.asked.append([message["content"] for message in messages])
        self.options.append(options)
        number, answer = len(self.asked) - 1, self.left.pop(0)
        message = {"role": "assistant", "content": answer}
        return Turn(number, None, message, [], [], [], [], [], "stop", answer)


def play(environment: Any, task: Task, answers: Sequence[str]) -> Scripted:
    ctx = Scripted(answers)
    asyncio.run(environment.run(task, ctx))
    assert ctx.left == []
    return ctx


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        (["?", "75", "85"], 1.0),
        (["?", "76", "85"], 0.0),  # 76 has the remainder of 85
        (["?", "75", "86"], 0.0),
        (["85", "76", "?"], 1.0),
    ],
)
def test_the_first_answer_that_the_verifier_takes_counts(answers: list[str], reward: float) -> None:
    ctx = play(BestOfN(n=3), SUM, answers)
    assert ctx.total_reward == reward
    assert ctx.options == [{"temperature": 1.0}] * 3


def test_a_single_sample_is_drawn_as_the_run_draws() -> None:
    assert play(BestOfN(), SUM, ["85"]).options == [{"temperature": None}]


def test_the_last_turn_reads_the_others_and_is_what_counts() -> None:
    ctx = play(ParallelAnswers(width=3), SUM, ["?", "85", "75", "85"])
    assert ctx.asked == [["47+38"]] * 3 + [["47+38 ? 85 75"]]
    assert ctx.total_reward == 1.0
    assert play(ParallelAnswers(width=0), SUM, ["?"]).asked == [["47+38"]]


def test_a_turn_of_a_tree_has_the_share_of_its_lines() -> None:
    """A coin of 25 and three of 1 pay 28; after a first coin of 1 and others of 1 something is left."""
    first, second, third = ["25", "1"], ["1"] * 4, ["1"] * 8
    last = ["1", "5", *["1"] * 14]
    ctx = play(Tree(width=2), Task("0", 0, {"amount": 28}), [*first, *second, *third, *last])
    assert ctx.total_reward == pytest.approx(sum(ctx.turn_rewards.values()))
    assert ctx.total_reward == 7 / 16
    assert ctx.turn_rewards[0] == 7 / 16 / 4
    assert ctx.turn_rewards[1] == 0
    assert [ctx.turn_rewards[14 + leaf] for leaf in range(8)] == [1 / 64, 0, *[1 / 64] * 6]
    assert ctx.asked[-1] == ["28", "1", "27", "1", "26", "1", "25"]


def test_a_tree_that_always_pays_is_right() -> None:
    assert play(Tree(), Task("0", 0, {"amount": 4}), ["1"] * 30).total_reward == 1.0


def test_amounts_can_be_paid_and_other_words_pay_nothing() -> None:
    draws = random.Random(0)
    assert all(4 <= draw(draws) <= 100 for _ in range(100))
    assert [paid(10, said) for said in ("5", "1", "?", "05", "7")] == [5, 9, 10, 10, 10]


def test_rewards_of_turns_are_those_of_the_environment() -> None:
    flow = dataflow_of(load_config(["recipe=tree"]))
    advantage = flow.stage("advantage")
    assert {"turn_rewards", "turn_ids", "reward"} <= set(advantage.reads)
    assert flow.has_environment
