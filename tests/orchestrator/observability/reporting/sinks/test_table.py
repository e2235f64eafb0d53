"""Sinks by name, and how they are told that the run is over."""

from pathlib import Path

import pytest

from penstock.conf.errors import DataError
from penstock.conf.tracking import SINKS
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.prerequisites import CHECKS
from penstock.orchestrator.observability.reporting.sinks import table
from penstock.orchestrator.observability.reporting.sinks.table import FILES, TRACKERS, opened_sinks
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from tests.orchestrator.observability.reporting.sinks.scripted_tracker import Scripted


def test_every_name_has_a_sink_and_every_tracker_a_check() -> None:
    assert {*FILES, *TRACKERS} == set(SINKS)
    assert CHECKS.keys() == TRACKERS.keys()


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted()
    monkeypatch.setattr(table, "TRACKERS", {"wandb": lambda tracking: scripted})
    return scripted


def test_a_trackers_end_has_the_outcome_of_the_run(tmp_path: Path, tracker: Scripted) -> None:
    config = load_config(["tracking.sinks=[wandb]", f"output_dir={tmp_path}", "name=run"])
    directory = RunDirectory.create(config)
    with opened_sinks(config, directory) as sinks:
        for sink in sinks:
            sink.log(1, {"reward/mean": 0.5})
    assert tracker.calls == ["open", "1", "finish"]
    assert tracker.end is not None
    assert tracker.end.state == "finished"
    assert tracker.end.cards["Mean reward"] == "0.500 → 0.500 (best step 0.500)"
    assert [line["step"] for line in directory.read_metrics()] == [1]


def test_a_run_that_fails_is_told_with_its_error(tmp_path: Path, tracker: Scripted) -> None:
    config = load_config(["tracking.sinks=[wandb]", f"output_dir={tmp_path}", "name=run"])
    with pytest.raises(DataError), opened_sinks(config, RunDirectory.create(config)):
        raise DataError("no rows")
    assert tracker.end is not None
    assert (tracker.end.state, tracker.end.error) == ("failed", "DataError: no rows")


def test_a_run_without_sinks_has_its_lines(tmp_path: Path) -> None:
    config = load_config(["tracking.sinks=[]", f"output_dir={tmp_path}", "name=run"])
    directory = RunDirectory.create(config)
    with opened_sinks(config, directory) as sinks:
        assert [type(sink).__name__ for sink in sinks] == ["JsonLines"]
