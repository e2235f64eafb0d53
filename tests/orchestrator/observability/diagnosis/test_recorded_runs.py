"""Rules say nothing is wrong with runs that learn: those of the recipes, as `recorded/record.py` has kept them."""

import json
from pathlib import Path

import pytest

from penstock.conf.diagnosis import DiagnosisConfig
from penstock.orchestrator.observability.diagnosis import WARNING, Finding, History, findings
from tests.orchestrator.observability.diagnosis.recorded.record import is_read, steps_of

RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))


class Noting(History):
    """Notes what it is asked for."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.asked: set[str] = set()

    def last(self, key: str) -> list[float]:
        self.asked.add(key)
        return super().last(key)

    def first(self, key: str) -> list[float]:
        self.asked.add(key)
        return super().first(key)

    def increase(self, key: str) -> float:
        self.asked.add(key)
        return super().increase(key)


def found_in(file: Path, history: History) -> list[Finding]:
    bound = json.loads(file.read_text())["max_staleness"]
    found = []
    for metrics in steps_of(file):
        history.add(metrics)
        found += findings(history, DiagnosisConfig(window=history.window), bound)
    return found


@pytest.mark.parametrize("window", [5, DiagnosisConfig().window])
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_a_recipe_that_learns_is_told_that_nothing_is_wrong(file: Path, window: int) -> None:
    assert [one.text for one in found_in(file, History(window)) if one.level == WARNING] == []


def test_what_rules_read_is_what_is_recorded() -> None:
    asked = set()
    for file in RECORDED:
        found_in(file, history := Noting(5))
        asked |= history.asked
    assert {"agent", "code", "guess", "tictactoe", "tool_use"} == {file.stem for file in RECORDED}
    assert [key for key in asked if not is_read(key)] == []
