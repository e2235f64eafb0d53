"""Step environments of the real packages, and how observations become text and answers actions."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import ConfigError
from penstock.workers.agents.adapters.gymnasium import NamedActions, as_text, without_colours
from penstock.workers.agents.environment import Task
from penstock.workers.agents.trajectory import COMPLETED, TRUNCATED
from tests.workers.agents.adapters.adapted import adapter, heard, played

TASK = Task("0", 7)
STILL = {"is_slippery": False}


def lake(answers: Sequence[str], **options: Any) -> Any:
    return played(adapter("gymnasium", id="FrozenLake-v1", kwargs=STILL, **options), TASK, answers)


def test_a_lake_is_crossed_in_named_steps() -> None:
    attempt, counts = lake(["I go Down.", "1", "left or right? right", "down", "right", "2"])
    assert (attempt.outcome.kind, attempt.reward, attempt.turn_rewards[5]) == (COMPLETED, 1.0, 1.0)
    first, second, *_ = heard(attempt)
    assert first.splitlines()[1:6] == [
        "[S]FFF",
        "FHFH",
        "FFFH",
        "HFFG",
        "Actions: left, down, right, up. Answer with one of them.",
    ]
    assert second.splitlines() == ["  (Down)", "SFFF", "[F]HFH", "FFFH", "HFFG"]
    assert counts["no_action"] == 0


def test_an_answer_that_is_no_action_costs_a_turn_and_the_penalty() -> None:
    attempt, counts = lake(["jump", "9", "down", "right"], penalty=0.25)
    assert attempt.turn_rewards == {0: -0.25, 1: -0.25, 2: 0.0, 3: 0.0}
    assert heard(attempt)[1] == "That is no action. Actions: left, down, right, up."
    assert (counts["no_action"], attempt.outcome.kind) == (2, COMPLETED)


def test_who_never_acts_is_truncated_by_turns() -> None:
    attempt, counts = played(adapter("gymnasium", id="FrozenLake-v1"), TASK, ["no"] * 9)
    assert (attempt.outcome.kind, attempt.outcome.reason, counts["no_action"]) == (TRUNCATED, "turns", 8)


def test_what_the_environment_cuts_off_is_complete_with_what_it_got() -> None:
    attempt, _ = lake(["up", "up"], prompt="{observation}")
    assert attempt.outcome.kind != COMPLETED
    environment = adapter("gymnasium", id="CliffWalking-v1", kwargs={"max_episode_steps": 2}, threads=True)
    attempt, _ = played(environment, TASK, ["up", "up"])
    assert (attempt.outcome.kind, attempt.reward) == (COMPLETED, -2.0)


def test_a_task_is_a_seed_and_seeds_follow_the_runs() -> None:
    environment = adapter("gymnasium", id="Blackjack-v1")
    told = [heard(played(environment, task, ["stick"])[0])[0] for task in itertools.islice(environment.tasks(40), 4)]
    assert told == [heard(played(environment, Task("", 40 + index), ["0"])[0])[0] for index in range(4)]
    assert len(set(told)) > 1
    assert "Actions: stick, hit." in told[0]


def test_a_taxi_is_read_without_colours() -> None:
    told = heard(played(adapter("gymnasium", id="Taxi-v4"), TASK, ["south"] * 8)[0])
    assert "\x1b" not in "".join(told)
    assert told[0].count("[") == 2  # in the legend, and the taxi
    assert "(blue)" in told[0]
    assert "(magenta)" in told[0]


def test_an_agent_in_a_grid_is_told_its_mission_and_what_it_sees() -> None:
    answers = ["forward", "forward", "right", "forward", "forward"]
    attempt, _ = played(adapter("gymnasium", id="MiniGrid-Empty-5x5-v0"), TASK, answers)
    told = heard(attempt)
    assert told[0].splitlines() == [
        "mission: get to the green goal square",
        "looking right",
        "wall left 1; wall right 3; wall ahead 3; green goal ahead 2, right 2",
        "Actions: left, right, forward, pickup, drop, toggle, done. Answer with one of them.",
    ]
    assert told[4].splitlines()[1:] == ["looking down", "wall left 1; green goal ahead 1; wall ahead 2; wall right 3"]
    assert attempt.reward > 0.9
    assert attempt.outcome.kind == COMPLETED
    seen = [turn.state for turn in attempt.turns]
    assert [str(seen[0]) in told[0], *seen[1:]] == [True, *told[1:]]


def test_what_is_carried_and_doors_are_told() -> None:
    image = np.ones((7, 7, 3), int)
    image[3, 6], image[3, 4], image[1, 6] = (5, 4, 0), (4, 4, 2), (9, 0, 0)
    assert as_text({"image": image, "direction": 3, "mission": "m"}).splitlines() == [
        "mission: m", "looking up, carrying a yellow key", "lava left 2; locked yellow door ahead 2",
    ]  # fmt: skip


def test_other_observations_are_their_numbers() -> None:
    assert as_text((14, np.int64(10), 0)) == "14 10 0"
    assert as_text({"speed": np.array([0.5, 1 / 3]), "name": "a"}) == "speed: 0.5 0.3333\nname: a"
    assert without_colours("\n\x1b[35m\x1b[43mY\x1b[0m\x1b[0m|\x1b[34;1mB\x1b[0m\n") == "[Y(magenta)]|B(blue)"


@given(st.integers(-3, 9), st.sampled_from(["", " ", "no: 0 ", "down, "]))
def test_the_last_number_is_the_action_if_there_is_such(number: int, before: str) -> None:
    said = NamedActions(["left", "down", "right"], start=1)(f"{before}{number}." if before else str(number))
    assert said == (number if 1 <= number <= 3 else None)


@pytest.mark.parametrize(
    ("answer", "action"),
    [("right", 2), ("2.5", None), ("upright", None), ("turn LEFT now", 0), ("", None), ("left 7", None), ("²", None)],
)
def test_what_an_answer_says(answer: str, action: int | None) -> None:
    assert NamedActions(["left", "down", "right"])(answer) == action


def test_functions_of_a_file_describe_and_act(tmp_path: Path) -> None:
    file = tmp_path / "pole.py"
    file.write_text(
        "def say(observation): return f'{len(observation)} numbers'\n"
        "def push(answer): return {'l': 0, 'r': 1}.get(answer[:1])\n"
    )
    options = {"describe": f"{file}:say", "act": f"{file}:push", "kwargs": {"max_episode_steps": 2}}
    attempt, _ = played(adapter("gymnasium", id="CartPole-v1", **options), TASK, ["l", "x", "r"])
    assert (attempt.reward, heard(attempt)[1]) == (2.0, "4 numbers")


def test_what_cannot_be_is_refused_with_what_can() -> None:
    with pytest.raises(ConfigError, match=r"options\.id=FrozenLke-v1.*did you mean 'FrozenLake-v1'"):
        adapter("gymnasium", id="FrozenLke-v1")
    with pytest.raises(ConfigError, match="no_such_module"):
        adapter("gymnasium", id="no_such_module:Env-v0")
    with pytest.raises(ConfigError, match="is_slipery"):
        adapter("gymnasium", id="FrozenLake-v1", kwargs={"is_slipery": False})
    with pytest.raises(ConfigError, match="2 names, and FrozenLake-v1 has 4"):
        adapter("gymnasium", id="FrozenLake-v1", actions=["a", "b"])
    with pytest.raises(ConfigError, match=r"options\.act=file\.py:function"):
        adapter("gymnasium", id="Pendulum-v1")
