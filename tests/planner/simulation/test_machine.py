"""A run on CPUs says how to split their cores for the next one."""

from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from penstock.cli import main as cli
from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.planner.calibration import read_pilot
from penstock.planner.candidates import with_keys
from penstock.planner.simulation.machine import CpuMachine, show
from tests.planner.test_processors import ALONE, recorded

WORDS = ("recipe=arithmetic", "algorithm.group_size=2", "trainer.groups_per_step=4")
LONGER = 1.2
"""How many times as long as its parts the recorded run's steps took."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of eight steps by one engine and one rank."""
    base = load_config([*WORDS, f"output_dir={tmp_path_factory.mktemp('runs')}", "name=pilot"])
    directory = RunDirectory.create(with_keys(base, ALONE))
    lines, rows = recorded(with_keys(base, ALONE), 6)
    for line in lines:
        spans = [span for lane in line["lanes"].values() for span in lane]
        seconds = LONGER * max(end for _, _, end, _ in spans) / 1000
        own = rows[line["step"]]
        directory.log_spans(line)
        directory.log_metrics(
            {"step": line["step"], "timing_s/step": seconds, "timing_s/train": 1.0, "idle/rollout": 0.5}
        )
        table = {"group_id": [group for group, _, _ in own], "prompt_ids": [[1] * prompt for _, prompt, _ in own],
                 "response_ids": [[1] * response for _, _, response in own]}  # fmt: skip
        directory.write_samples(line["step"], pa.table(table))
    directory.close()
    return directory.path


@pytest.fixture(scope="module")
def machine(place: Path) -> CpuMachine:
    return CpuMachine(2, read_pilot(str(place)), load_config([*WORDS, "max_staleness=1"]))


def test_the_runs_own_split_is_played_to_take_as_long_as_it_did(machine: CpuMachine) -> None:
    own = with_keys(machine.base, machine.pilot.keys)
    assert machine.simulate_split(own).step_s == pytest.approx(machine.pilot.step_s)


def test_no_side_alone_asks_for_more_threads_than_there_are_cores(machine: CpuMachine) -> None:
    found = list(machine.splits())
    assert len(found) == 3 * 3 * 2
    for keys in found:
        assert keys["rollout.num_workers"] * keys["rollout.num_threads"] <= 2
        assert keys["trainer.num_ranks"] * keys["trainer.num_threads"] <= 2


def test_the_fastest_split_comes_first_and_is_told_as_a_command(machine: CpuMachine) -> None:
    best = machine.best()
    assert best[0][0].step_s == pytest.approx(min(found.step_s for found, _ in best), abs=1e-3)
    assert best[0][0].step_s < machine.pilot.step_s
    console = Console(record=True, width=120)
    chosen = show(machine, console, WORDS)
    assert chosen == [*WORDS, *(f"{key}={value}" for key, value in best[0][1].items())]
    assert " ".join(["penstock run", *chosen]) in console.export_text().replace("'", "")


def test_the_commands_plan_and_simulate_take_the_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *WORDS, "max_staleness=1", "--from", str(place), "--steps", "8"]) == 0
    assert "seconds a step" in capsys.readouterr().out
    assert cli.main(["plan", *WORDS, "--from", str(place)]) == 0
    assert "penstock run recipe=arithmetic" in capsys.readouterr().out


def test_a_run_without_samples_is_refused_with_what_to_change(place: Path, tmp_path: Path) -> None:
    base = load_config([*WORDS, f"output_dir={tmp_path}", "name=short"])
    directory = RunDirectory.create(with_keys(base, ALONE))
    directory.log_metrics(
        {"step": 3, "timing_s/step": 1.0, "timing_s/train": 1.0, "idle/rollout": 0.5, "response_length/mean": 5.0,
         "response_length/max": 6.0}
    )  # fmt: skip
    directory.close()
    with pytest.raises(ConfigError, match=r"tracking\.samples_every_steps=1"):
        _ = CpuMachine(2, read_pilot(str(directory.path)), base).costs
