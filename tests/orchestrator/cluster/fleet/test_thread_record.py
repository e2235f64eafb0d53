"""What a run keeps of its numbers of threads."""

import json
from pathlib import Path

import pytest

from penstock.orchestrator.cluster.placement import threads
from penstock.orchestrator.cluster.placement.threads import FILE, SharedNode, Threads, Trial, read_trials, write_trials
from penstock.orchestrator.run_directory.run_directory import RunDirectory

TRIALS = {
    SharedNode(2, 1, 1): Trial(Threads(1, 2), {1: 1.5e-4, 2: 1.75e-4}, {1: 3e-4, 2: 2e-4}),
    SharedNode(4, 2, 1): Trial(Threads(1, 4), {1: 1.5e-4}, {4: 1e-4}),
}


def test_a_run_that_goes_on_has_what_was_found(tmp_path: Path) -> None:
    write_trials(RunDirectory(tmp_path), TRIALS)
    assert read_trials(RunDirectory(tmp_path)) == TRIALS
    assert json.loads((tmp_path / FILE).read_text())[0]["threads"] == {"rollout": 1, "trainer": 2}


def test_what_was_found_on_another_cpu_is_found_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trials(RunDirectory(tmp_path), TRIALS)
    monkeypatch.setattr(threads, "cpu_name", lambda: "another")
    assert read_trials(RunDirectory(tmp_path)) == {}


@pytest.mark.parametrize("text", ["", "[{}]", "{", '[{"cpu": 3}]', "null"])
def test_a_file_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert read_trials(RunDirectory(tmp_path)) == {}


def test_a_run_without_trials_has_none(tmp_path: Path) -> None:
    assert read_trials(RunDirectory(tmp_path)) == {}
