"""A run whose disk fills up goes on, and has its numbers when there is room again; without processes."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.orchestrator.control.controller import TrainingResult
from penstock.orchestrator.recovery.resume import open_run
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from tests.orchestrator.scripted_fleet import ScriptedFleet, controller_over, flow_of, scripted_config, store_of
from tests.run_files import metrics_of
from tests.small_files import let_files_grow_to
from tests.tmpfs import run_in_tmpfs
from tests.virtual_time import run_virtually

NUM_STEPS = 6
FULL_AT, BACK_AT = 2, 4


class Disk:
    """A sink that has the disk full from one step on, and back at another."""

    def __init__(self, fill: Callable[[], None], free: Callable[[], None]) -> None:
        self._at = {FULL_AT: fill, BACK_AT: free}

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._at.get(step, lambda: None)()

    def close(self) -> None: ...


def whole_run(place: Path, fill: Callable[[], None], free: Callable[[], None], *words: str) -> RunDirectory:
    """A run of six steps in `place`, which must end."""
    config = scripted_config(place, "tracking.samples_every_steps=1", f"trainer.max_steps={NUM_STEPS}", *words)

    async def live() -> tuple[RunDirectory, TrainingResult]:
        directory, _ = open_run(config)
        flow = flow_of(config)
        fleet = ScriptedFleet(store_of(config, flow), config, flow, Random(0))
        outcome = await asyncio.wait_for(controller_over(fleet, config, directory, [Disk(fill, free)]).run(), 1000)
        directory.event("end")
        directory.close()
        return directory, outcome

    directory, outcome = run_virtually(live())
    assert outcome.num_steps == NUM_STEPS
    return directory


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_the_numbers_of_every_step_are_there_once_a_full_disk_has_room_again(
    tmp_path: Path, max_staleness: int
) -> None:
    def fill() -> None:
        let_files_grow_to((tmp_path / "run" / "metrics.jsonl").stat().st_size + 100)

    try:
        directory = whole_run(tmp_path, fill, lambda: let_files_grow_to(-1), f"max_staleness={max_staleness}")
    finally:
        let_files_grow_to(-1)
    lines = metrics_of(directory.path)
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    waiting = [line["recording/waiting"] for line in lines[:BACK_AT]]
    assert waiting[:2] == [0.0, 0.0]
    assert all(lost <= found <= 2 * lost for lost, found in enumerate(waiting[2:], start=1))  # of spans.jsonl, too
    assert lines[-1]["recording/waiting"] == 0.0
    assert {"kind": "recording_failed", "what": "metrics"}.items() <= directory.read_events()[1].items()


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_directory_that_is_away_for_a_while_costs_its_samples(tmp_path: Path, max_staleness: int) -> None:
    run, away = tmp_path / "run", tmp_path / "away"

    def lose() -> None:
        let_files_grow_to(0)  # what is open fails as well, as a mount's files do
        run.rename(away)

    def come_back() -> None:
        away.rename(run)
        let_files_grow_to(-1)

    try:
        directory = whole_run(tmp_path, lose, come_back, f"max_staleness={max_staleness}")
    finally:
        let_files_grow_to(-1)
    lines = metrics_of(directory.path)
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    num_samples = len(directory.sample_files())
    assert lines[-1]["recording/lost"] == NUM_STEPS - num_samples > 0
    assert directory.read_events()[-1]["kind"] == "end"


REAL = """
import sys
from pathlib import Path
from tests.orchestrator.control.test_full_disks import whole_run
from tests.run_files import metrics_of

place = Path(sys.argv[1])
ballast = place / "ballast"

def fill():
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            pass

directory = whole_run(place, fill, ballast.unlink, "checkpoint.every_steps=3", "max_staleness=0")
lines = metrics_of(directory.path)
print([line["step"] for line in lines], [int(line["recording/lost"]) for line in lines])
print([int(file.stem[5:]) for file in directory.sample_files()])
print(int(lines[-1]["checkpoint/failed"]), *(path.parent.name for path in directory.checkpoints.glob("*/COMPLETE")))
print(*sorted({event["what"] for event in directory.read_events() if event["kind"] == "recording_failed"}))
print(*(event["kind"] for event in directory.read_events() if event["kind"] != "recording_failed"))
"""


@pytest.mark.real
def test_a_real_disk_that_is_full_for_a_while_costs_samples_and_checkpoints(
    tmp_path: Path, warm_python: list[str]
) -> None:
    output = run_in_tmpfs(REAL, tmp_path, "above, by sizes that files may have", warm_python)
    lines, samples, checkpoints, failed, events = output.splitlines()
    assert lines == "[1, 2, 3, 4, 5, 6] [0, 0, 1, 2, 2, 2]"
    assert samples == "[1, 2, 5, 6]"
    assert checkpoints == "1 global_step_6"
    assert {"metrics", "samples"} <= set(failed.split()) <= {"metrics", "samples", "spans", "state"}
    assert events == "start checkpoint_failed checkpoint end"
