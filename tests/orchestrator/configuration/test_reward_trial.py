"""`penstock validate` calls each reward once, and tells what comes back."""

import json
from pathlib import Path

import pytest

from penstock.algorithms.catalogue import dataflow_of
from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.validate import try_rewards

pytestmark = pytest.mark.real

REWARDS = """
def brief(response, task): return -len(response)
def empty(response, answer): return answer / len(response)
def typo(response, task): return task["answr"]
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "3 + 1?", "answer": 4, "solution": "4"}) + "\n")
    (tmp_path / "mine.py").write_text(REWARDS)
    return file


def tried(rows: Path, *words: str) -> str:
    config = load_config(["recipe=gsm8k", f"data.path={rows}", "data.source=jsonl", *words])
    return try_rewards(config, dataflow_of(config))


def test_what_a_reward_gives_is_told(rows: Path) -> None:
    assert tried(rows) == f"math_verify on {rows} line 1: '' gets 0, 'The answer is 4.' gets 1"


def test_each_of_several_rewards_is_tried(rows: Path) -> None:
    rewards = f"[{{function: 'trl.rewards:accuracy_reward'}}, {{function: '{rows.parent}/mine.py:brief', weight: 0.1}}]"
    found = tried(rows, f"rewards={rewards}")
    assert "trl.rewards:accuracy_reward" in found
    assert "mine.py:brief on" in found
    assert "'The answer is 4.' gets -16" in found


def test_a_reward_that_fails_for_one_response_is_told(rows: Path) -> None:
    found = tried(rows, f"reward.function={rows.parent}/mine.py:empty")
    assert "'' fails (raised: ZeroDivisionError" in found
    assert "'The answer is 4.' gets 0.25" in found


def test_a_reward_that_fails_for_both_is_refused_with_the_line_that_raised(rows: Path) -> None:
    with pytest.raises(ConfigError, match=r"typo fails on .*rows.jsonl line 1: raised: KeyError: 'answr'.*mine.py:4"):
        tried(rows, f"reward.function={rows.parent}/mine.py:typo")
