"""Tasks of a dataset that are solved with tools and scored by a reward function."""

from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError
from penstock.workers.agents.environment import Task
from penstock.workers.agents.trajectory import COMPLETED, FAILED
from tests.workers.agents.adapters.adapted import adapter, heard, played

CODE = '''
import time

def add(a: int, b: int) -> int:
    """The sum."""
    return a + b

def length(response, task):
    return len(response) / task["most"]

def raises(response, answer):
    raise KeyError("no such column")

def hangs(response):
    time.sleep(60)
'''
ROW = {"prompt": "2+2?", "answer": "4", "index": 0}


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tools") / "my_tools.py"
    path.write_text(CODE)
    return str(path)


@pytest.mark.real
def test_tools_are_called_until_there_is_an_answer(code: str) -> None:
    environment = adapter("tools", tools=[f"{code}:add"], system="Add.")
    attempt, counts = played(environment, ROW, ["[add(2,2)]", "[add(2,1]", "It is 4."])
    assert (attempt.outcome.kind, attempt.reward) == (COMPLETED, 1.0)
    assert heard(attempt, "system") == ["Add."]
    assert heard(attempt, "tool") == ["4"]
    assert heard(attempt)[0] == "2+2?"
    assert heard(attempt)[1].startswith("Error: ")
    assert (counts["tools"], counts["calls_unreadable"]) == (1, 1)


@pytest.mark.real
def test_what_is_said_after_the_last_round_is_the_answer(code: str) -> None:
    environment = adapter("tools", tools=[f"{code}:add"], max_rounds=1)
    attempt, counts = played(environment, ROW, ["[add(2,2)]", "[add(2,2)]"])
    assert (attempt.outcome.kind, attempt.reward, counts["tools"]) == (COMPLETED, 0.0, 1)


@pytest.mark.real
def test_a_reward_of_a_file_sees_the_row(code: str) -> None:
    environment = adapter("tools", reward=f"{code}:length")
    assert played(environment, {**ROW, "most": 8}, ["four"])[0].reward == 0.5


def test_without_a_reward_other_stages_score() -> None:
    attempt, _ = played(adapter("tools", reward=None), ROW, ["4"])
    assert (attempt.outcome.kind, attempt.reward) == (COMPLETED, 0.0)


@pytest.mark.real
def test_an_answer_that_cannot_be_scored_has_failed_and_is_not_wrong(code: str) -> None:
    attempt, _ = played(adapter("tools", reward=f"{code}:raises"), ROW, ["4"])
    assert attempt.outcome.kind == FAILED
    assert "raises cannot score this answer: raised: KeyError: 'no such column'" in attempt.outcome.detail


@pytest.mark.real
def test_a_reward_that_hangs_is_given_up(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = adapter("tools", reward=f"{code}:hangs")
    environment.scoring.pool.timeout_s = 0.5
    attempt, _ = played(environment, ROW, ["4"])
    assert attempt.outcome.kind == FAILED
    assert "hangs cannot score this answer: timeout" in attempt.outcome.detail


@pytest.mark.real
def test_an_answer_whose_scoring_runs_out_of_time_has_failed_and_is_not_wrong(code: str) -> None:
    attempt, _ = played(adapter("tools", reward=f"{code}:hangs"), ROW, ["4"], timeout_s=1.0)
    assert (attempt.outcome.kind, attempt.outcome.reason) == (FAILED, "timeout_in_reward")
    assert "environment.timeout_s" in attempt.outcome.detail


@pytest.mark.real
def test_a_conversation_is_gone_on_with() -> None:
    rows = {"messages": [{"role": "system", "content": "Short."}, {"role": "user", "content": "2+2?"}], "answer": "4"}
    attempt, _ = played(adapter("tools", prompt="messages"), rows, ["4"])
    assert (heard(attempt, "system"), heard(attempt), attempt.reward) == (["Short."], ["2+2?"], 1.0)


@pytest.mark.real
def test_a_row_begins_with_its_system_prompt_and_what_was_said_before() -> None:
    said = [
        {"role": "system", "content": "Short."}, {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "one"}, {"role": "user", "content": "2+2?"},
    ]  # fmt: skip
    attempt, _ = played(adapter("tools", system="Mine."), Task("0", 0, ROW, said), ["4"])
    assert (heard(attempt, "system"), heard(attempt), attempt.reward) == (["Short."], ["1?", "2+2?"], 1.0)
    attempt, _ = played(adapter("tools", system="Mine."), Task("0", 0, ROW, said[1:]), ["4"])
    assert heard(attempt, "system") == ["Mine."]


@pytest.mark.real
def test_the_system_prompt_of_the_data_is_before_the_text_of_another_column() -> None:
    row = {**ROW, "question": "3+1?"}
    said = [{"role": "system", "content": "Short."}, {"role": "user", "content": "2+2?"}]
    environment = adapter("tools", system="Mine.", prompt="question")
    attempt, _ = played(environment, Task("0", 0, row, said), ["4"])
    assert (heard(attempt, "system"), heard(attempt), attempt.reward) == (["Short."], ["3+1?"], 1.0)
    attempt, _ = played(environment, Task("0", 0, row, said[1:]), ["4"])
    assert heard(attempt, "system") == ["Mine."]
    own = {**ROW, "question": [{"role": "system", "content": "Own."}, {"role": "user", "content": "3+1?"}]}
    attempt, _ = played(environment, Task("0", 0, own, said), ["4"])
    assert heard(attempt, "system") == ["Own."]


def test_the_sandbox_is_a_tool() -> None:
    (tool,) = adapter("tools", tools=["python"], reward=None).tools
    assert tool.__module__ == "penstock.workers.agents.toolbox"


def test_what_is_not_there_is_named_with_what_is(code: str) -> None:
    with pytest.raises(ConfigError, match=r"no tool 'pyton'; did you mean 'python'"):
        adapter("tools", tools=["pyton"])
    with pytest.raises(ConfigError, match="did you mean 'math_verify'"):
        adapter("tools", reward="math_verifi")
    with pytest.raises(ConfigError, match="did you mean 'add'"):
        adapter("tools", tools=[f"{Path(code)}:ad"])
    with pytest.raises(ConfigError, match="max_rounds=-1"):
        adapter("tools", max_rounds=-1)
    attempt, _ = played(adapter("tools", prompt="question"), ROW, ["4"])
    assert "environment.options.prompt=question: task 0 has no such column" in attempt.outcome.detail
