"""Numbers reach every sink that can take them, TensorBoard reads what is written, and trackers are told of the end."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.conf.errors import DataError
from penstock.conf.tracking import RAY_METRICS, SINKS
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.prerequisites import CHECKS
from penstock.orchestrator.observability.reporting import sinks
from penstock.orchestrator.observability.reporting.sinks import (
    FILES,
    JsonLines,
    RayGauges,
    TensorBoard,
    close_sinks,
    gauge_of,
    log_to,
    opened_sinks,
)
from penstock.orchestrator.observability.reporting.trackers import TRACKERS
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from tests.metering.measured import Recording
from tests.orchestrator.observability.reporting.sinks.scripted_tracker import Scripted, new_run
from tests.small_files import files_up_to


def points(directory: RunDirectory, tag: str) -> list[tuple[int, float]]:
    read = EventAccumulator(str(directory.tensorboard)).Reload()
    return [(event.step, event.value) for event in read.Scalars(tag)]


class Own:
    """A user's sink that cannot do what it is asked to, twice."""

    def __init__(self, error: Exception) -> None:
        self._error = error
        self.steps: list[int] = []

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.steps.append(step)
        if step <= 2:
            raise self._error

    def close(self) -> None:
        raise self._error


def test_tensorboard_reads_every_number_by_its_step(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    sink = TensorBoard(directory)
    for step in range(3):
        sink.log(step, {"reward/mean": step / 4, "note": "no number", "odd": float("nan")})
    sink.close()
    assert points(directory, "reward/mean") == [(0, 0.0), (1, 0.25), (2, 0.5)]
    read = EventAccumulator(str(directory.tensorboard)).Reload()
    assert read.Tags()["scalars"] == ["reward/mean"]


def test_tensorboard_has_every_step_once_though_its_disk_was_full(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    sink = TensorBoard(directory)
    for step in range(1, 10):
        with files_up_to({3: 0, 4: 120, 5: 150, 6: 200}.get(step, -1)):
            sink.log(step, {"reward/mean": float(step)})
    sink.close()
    assert points(directory, "reward/mean") == [(step, float(step)) for step in range(1, 10)]
    assert len(list(directory.tensorboard.iterdir())) == 1
    assert not directory.failed_writes.lost


def test_records_are_whole_as_they_are_written(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    sink = TensorBoard(directory)
    sink.log(1, {"a": 1.0})
    (file,) = directory.tensorboard.iterdir()
    data, lengths = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        data = data[8 + 4 + length + 4 :]
        lengths.append(length)
    assert len(lengths) == 2
    sink.close()


@pytest.mark.parametrize("error", [ConnectionRefusedError("its server is gone"), OSError(28, "No space left")])
def test_a_sink_of_ones_own_that_cannot_write_costs_its_own_numbers(tmp_path: Path, error: OSError) -> None:
    directory, own = new_run(tmp_path), Own(error)
    told: list[str] = []
    directory.failed_writes.set_printer(told.append)
    sinks = [own, JsonLines(directory)]
    for step in (1, 2, 3):
        log_to(sinks, step, {"a": step}, directory.failed_writes)
    close_sinks(sinks, directory.failed_writes)
    assert own.steps == [1, 2, 3]
    assert [line["step"] for line in directory.read_metrics()] == [1, 2, 3]
    assert directory.failed_writes.lost == {"Own": 3}
    assert [text.partition(":")[0] for text in told] == ["Own"] * 3
    assert [event["what"] for event in directory.read_events()] == ["Own"] * 2


def test_a_mistake_of_its_author_is_raised(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    with pytest.raises(KeyError):
        log_to([Own(KeyError("reward"))], 1, {}, directory.failed_writes)
    with pytest.raises(KeyError):
        close_sinks([Own(KeyError("reward"))], directory.failed_writes)


def test_a_gauge_of_a_step_has_a_name_of_its_own() -> None:
    assert gauge_of("actor/pg_loss") == ("penstock_step_actor_pg_loss", {})
    assert gauge_of("accuracy/heldout_avg@4") == ("penstock_step_accuracy_heldout_avg_4", {})


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (RAY_METRICS, {"penstock_step_reward_mean"}),
        (["rollout/*"], {"penstock_step_rollout_groups Rollout-0", "penstock_step_rollout_groups Rollout-1"}),
        ([], set()),
    ],
)
def test_the_metrics_that_are_asked_for_become_gauges(
    patterns: Sequence[str], expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, directory = Recording(monkeypatch), new_run(tmp_path)
    gauges = RayGauges(directory, patterns)
    line = {"reward/mean": 0.5, "reward/p10": 0.1, "rollout/groups/Rollout-0": 3, "rollout/groups/Rollout-1": 4}
    gauges.log(1, {**line, "note": "text"})
    gauges.close()
    assert recording.series() == expected
    RayGauges(directory, patterns).close()


def test_every_name_has_a_sink_and_every_tracker_a_check() -> None:
    assert {*FILES, *TRACKERS} == set(SINKS)
    assert CHECKS.keys() == TRACKERS.keys()


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    scripted = Scripted()
    monkeypatch.setattr(sinks, "TRACKERS", {"wandb": lambda tracking: scripted})
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
