"""A simulated run leaves what a run leaves, and what reads that finds in it what was simulated."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.orchestrator.observability.faults import faults_of
from penstock.orchestrator.observability.reporting.closing import cards_of
from penstock.orchestrator.observability.runs.columns import Columns
from penstock.orchestrator.observability.runs.found import Runs
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.planner.simulation.engines import FleetChanges
from penstock.planner.simulation.run_files import RunFiles, open_directory
from penstock.planner.simulation.simulation import Simulation, SimulationResult
from penstock.ui.activity import Traced
from tests.planner.simulation.played import EASY, FAULTS, TEN, config_of, played, with_stages

EPOCH_S = 1_000_000.0


def left(
    tmp_path: Path, changes: FleetChanges | None = None, *words: str, **keys: object
) -> tuple[Path, SimulationResult]:
    config = config_of(*words, name="run", **keys)
    directory, epoch_s = open_directory(config, tmp_path, EPOCH_S)
    durations = replace(with_stages(reward=0.05), turn=EASY.turn if config.placement == "disaggregated" else 3.0)
    simulation = Simulation(config, durations, TEN, changes or FleetChanges(), epoch_s=epoch_s)
    files = RunFiles(simulation, directory)
    found = played(simulation)
    files.close()
    return directory.path, found


@pytest.mark.parametrize("bound", [0, 1])
def test_the_page_reads_its_lanes_and_the_path_of_each_step(tmp_path: Path, bound: int) -> None:
    path, _ = left(tmp_path, max_staleness=bound)
    traced = Traced(path / "spans.jsonl")
    traced.update()
    assert traced.bounds == (1, 3)
    first, *_, last = traced.lines(1, 3)
    assert {"Rollout-0", "Rollout-1", "Reward-0", "Trainer-policy-0", "Trainer-policy-1"} <= first["lanes"].keys()
    names = {name for lane in last["lanes"].values() for name, *_ in lane}
    assert {"rollout", "reward", "load weights", "wait for batch", "update", "publish"} - names <= {"rollout", "reward"}
    assert first["start"] == EPOCH_S
    for line in (first, last):
        ends = [0, *(end for *_, end in line["path"])]
        assert [start for _, _, start, _ in line["path"]] == ends[:-1]  # without gaps
        assert ends[-1] == round(1000 * (line["end"] - line["start"]))
    assert first["path"][0][0].startswith("Rollout-")
    assert "update" in first["text"]
    assert json.loads((path / "timeline.json").read_text())["traceEvents"]


def test_a_version_that_holds_up_the_next_one_is_seen(tmp_path: Path) -> None:
    """Updates take a tenth of a second, a version 1.5 s until it is sealed and 0.5 s until it is loaded."""
    config = config_of(name="run", max_staleness=2, **{"trainer.max_steps": 6, "rollout.num_workers": 4})
    directory, epoch_s = open_directory(config, tmp_path, EPOCH_S)
    simulation = Simulation(config, replace(EASY, update_tokens_per_s=600.0), TEN, epoch_s=epoch_s)
    files = RunFiles(simulation, directory)
    played(simulation)
    files.close()
    traced = Traced(directory.path / "spans.jsonl")
    traced.update()
    lines = traced.lines(1, 6)
    assert any("wait for the version before" in line["text"] for line in lines)
    assert {name for line in lines for name, *_ in line["lanes"].get("weights", ())} == {"publish"}


def test_turns_are_seen_between_the_wait_and_the_update(tmp_path: Path) -> None:
    path, _ = left(tmp_path, None, "placement=colocated")
    traced = Traced(path / "spans.jsonl")
    traced.update()
    [line] = traced.lines(2, 2)
    assert [what for _, what, *_ in line["path"]][-5:] == [
        "change of turns", "update", "publish", "between phases", "load weights"
    ]  # fmt: skip


def test_its_numbers_are_those_of_the_outcome(tmp_path: Path) -> None:
    path, found = left(tmp_path, max_staleness=1)
    columns = Columns(path / "metrics.jsonl")
    columns.update()
    assert columns["timing_s/step"].tolist() == pytest.approx(list(found.steps_s))
    assert columns["staleness/max"].tolist() == [0, 1, 1]
    [line] = Runs(tmp_path).lines()
    assert (line.state, line.step, line.max_steps) == ("finished", 3, 3)
    assert line.seconds == pytest.approx(found.seconds, abs=0.01)
    labels = {card.label: card.value for card in cards_of(RunDirectory.open(path))}
    assert labels["Policy updates"] == "3"
    assert labels["Staleness"] == "1 ≤ 1"


def test_members_that_are_lost_and_join_are_events(tmp_path: Path) -> None:
    changes = replace(FAULTS, joins=((5.0, 1),))
    path, found = left(tmp_path, changes, **{"trainer.max_steps": 20})
    events = RunDirectory.open(path).read_events()
    faults = faults_of(events)
    assert found.num_faults <= len(faults)
    assert all(fault.seconds == pytest.approx(FAULTS.replaced_s) for fault in faults if fault.outcome == "replaced")
    assert [event["member"] for event in events if event["kind"] == "joined"] == ["Rollout-2"]
