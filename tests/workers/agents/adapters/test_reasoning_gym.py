"""Problems with several attempts at each."""

import itertools

import pytest

from penstock.conf.errors import ConfigError
from penstock.workers.agents.environment import Task
from penstock.workers.agents.trajectory import COMPLETED
from tests.workers.agents.adapters.adapted import adapter, heard, played

EASY = {"max_terms": 2, "max_digits": 1}


def first_task(environment: object, seed: int = 3) -> Task:
    return next(environment.tasks(seed))  # type: ignore[attr-defined]


@pytest.mark.real
def test_a_wrong_answer_is_told_and_the_next_one_counts() -> None:
    environment = adapter("reasoning_gym", task="chain_sum", options=EASY, attempts=3, discount=0.5)
    task = first_task(environment)
    attempt, _ = played(environment, task, ["none", task.data["entry"]["answer"]])
    assert attempt.outcome.kind == COMPLETED
    assert heard(attempt) == [task.data["question"], "That is wrong. Try again."]
    assert (attempt.reward, attempt.turn_rewards) == (0.5, {1: 0.5})


@pytest.mark.real
def test_after_the_last_attempt_its_score_is_the_reward() -> None:
    environment = adapter("reasoning_gym", task="chain_sum", options=EASY, attempts=2)
    attempt, counts = played(environment, first_task(environment), ["", "wrong"])
    assert attempt.reward < 1
    assert counts["turns"] == 2


def test_the_same_seed_gives_the_same_tasks_and_another_one_others() -> None:
    environment = adapter("reasoning_gym", task="chain_sum", size=4)
    same, again, other = (list(environment.tasks(seed)) for seed in (3, 3, 100))
    assert same == again
    assert len(same) == 4
    assert [task.data["question"] for task in same] != [task.data["question"] for task in other]
    assert len(list(itertools.islice(adapter("reasoning_gym", task="chain_sum").tasks(0), 9))) == 9


def test_what_cannot_be_is_refused_with_what_can() -> None:
    with pytest.raises(ConfigError, match=r"environment\.options\.task=chain_sums.*did you mean 'chain_sum'"):
        adapter("reasoning_gym", task="chain_sums")
    with pytest.raises(ConfigError, match=r"environment\.options\.options\.max_digit: "):
        adapter("reasoning_gym", task="chain_sum", options={"max_digit": 2})
    with pytest.raises(ConfigError, match=r"no \{question\}"):
        adapter("reasoning_gym", task="chain_sum", prompt="Solve it.")
    with pytest.raises(ConfigError, match="attempts"):
        adapter("reasoning_gym", task="chain_sum", attempts=0)
