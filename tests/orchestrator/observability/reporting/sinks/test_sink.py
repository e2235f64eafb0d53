"""Numbers reach every sink that can take them, and TensorBoard reads what is written."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.reporting.sinks.sink import (
    JsonLines,
    RayGauges,
    TensorBoard,
    close_sinks,
    gauge_name,
    log_to,
)
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from tests.small_files import files_up_to


def new_run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(load_config([f"output_dir={tmp_path}", "name=run"]))


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
    assert not directory.losses.lost


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
    directory.losses.tell_to(told.append)
    sinks = [own, JsonLines(directory)]
    for step in (1, 2, 3):
        log_to(sinks, step, {"a": step}, directory.losses)
    close_sinks(sinks, directory.losses)
    assert own.steps == [1, 2, 3]
    assert [line["step"] for line in directory.read_metrics()] == [1, 2, 3]
    assert directory.losses.lost == {"Own": 3}
    assert [text.partition(":")[0] for text in told] == ["Own"] * 3
    assert [event["what"] for event in directory.read_events()] == ["Own"] * 2


def test_a_mistake_of_its_author_is_raised(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    with pytest.raises(KeyError):
        log_to([Own(KeyError("reward"))], 1, {}, directory.losses)
    with pytest.raises(KeyError):
        close_sinks([Own(KeyError("reward"))], directory.losses)


def test_a_gauge_of_a_step_has_a_name_of_its_own() -> None:
    assert gauge_name("actor/pg_loss") == "penstock_step_actor_pg_loss"
    assert gauge_name("accuracy/heldout_avg@4") == "penstock_step_accuracy_heldout_avg_4"


def test_the_gauges_of_steps_end_with_the_run() -> None:
    gauges = RayGauges("sums")
    gauges.log(1, {"reward/mean": 0.5, "note": "text"})
    gauges.log(2, {"reward/mean": 0.7})
    gauges.close()
    RayGauges("none").close()
