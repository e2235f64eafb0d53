"""W&B's own package writes what a run says, without a connection."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.tracking import WandbConfig
from penstock.orchestrator.observability.reporting.trackers import End, Wandb
from tests.orchestrator.observability.reporting.sinks.scripted_tracker import about, new_run

pytestmark = pytest.mark.real

MAGIC_BYTES, BLOCK_BYTES, HEADER_BYTES = 7, 1 << 15, 7
FULL, LAST = 1, 4
"""Kinds of a chunk: LevelDB's log, which wandb's files are."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))


def files_below(place: Path) -> list[list[Any]]:
    """The records of each file, older ones first."""
    import wandb

    wandb.teardown()  # its service writes on for a moment after a run's end
    return [list(records_of(file.read_bytes())) for file in sorted(place.glob("wandb/offline-run-*/*.wandb"))]


def records_of(data: bytes) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole = MAGIC_BYTES, b""
    assert data[:4] == b":W&B"
    while at < len(data):
        if (room := BLOCK_BYTES - at % BLOCK_BYTES) < HEADER_BYTES:
            at += room
            continue
        num_bytes, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + HEADER_BYTES : at + HEADER_BYTES + num_bytes]
        at += HEADER_BYTES + num_bytes
        if kind in (FULL, LAST):
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def history_of(records: list[Any]) -> list[tuple[int, float]]:
    """(step, loss)."""
    lines = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    return [(line["_step"], line["loss"]) for line in lines]


def test_a_run_and_what_goes_on_with_it_are_one_run(tmp_path: Path) -> None:
    directory, ids = new_run(tmp_path), []
    for steps, end in (
        (range(3), End("failed", "DataError: no rows")),
        (range(3, 5), End("finished", "", {"Reward": "0.5"})),
    ):
        tracker = Wandb(WandbConfig(mode="offline"), 60.0)
        opened = tracker.open(about(directory), ids[-1] if ids else None)
        ids.append(opened.id)
        assert opened.place.startswith(f"wandb sync {directory.path}/wandb/offline-run-")
        for step in steps:
            tracker.log(step, {"loss": step / 4})
        tracker.finish(end)
    assert ids[0] == ids[1]
    first, second = files_below(directory.path)
    assert history_of(first) == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert history_of(second) == [(3, 0.75), (4, 1.0)]
    (run,) = [record.run for record in first if record.WhichOneof("record_type") == "run"][:1]
    assert (run.run_id, run.display_name, run.run_group, run.project) == (ids[0], "run", "group", "penstock")
    assert list(run.tags) == ["recipe: none"]
    assert {item.key: item.value_json for item in run.config.update}["seed"] == "1"
    assert summary_of(first)["error"] == "DataError: no rows"
    assert summary_of(second) == {"state": "finished", "error": "", "summary/Reward": "0.5"}
    assert [exit_code(records) for records in (first, second)] == [1, 0]


def test_an_evaluation_is_drawn_over_the_step_that_it_has_measured(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    tracker = Wandb(WandbConfig(mode="offline"), 60.0)
    tracker.open(replace(about(directory), config={"max_staleness": 2, "trainer": {"policies": {"solver": {}}}}), None)
    for step in (1, 2, 3):
        tracker.log(step, {"loss": step / 4})
    tracker.log(1, {"accuracy/heldout": 0.5, "evaluation/step": 1})
    tracker.log(4, {"loss": 1.0})
    tracker.finish(End("finished"))
    (records,) = files_below(directory.path)
    lines = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    (measured,) = [line for line in lines if "accuracy/heldout" in line]
    assert (measured["accuracy/heldout"], measured["evaluation/step"], measured["_step"]) == (0.5, 1, 3)
    defined = [record.metric for record in records if record.WhichOneof("record_type") == "metric"]
    assert {metric.glob_name for metric in defined} >= {"accuracy/*", "heldout_reward/*", "solver/heldout_reward/*"}
    assert {metric.step_metric for metric in defined if metric.glob_name} == {"evaluation/step"}


def summary_of(records: list[Any]) -> dict[str, Any]:
    """What was set of it by hand."""
    items = [
        item for record in records if record.WhichOneof("record_type") == "summary" for item in record.summary.update
    ]
    found = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
    return {key: value for key, value in found.items() if isinstance(value, str)}


def exit_code(records: list[Any]) -> int:
    (code,) = [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"]
    return int(code)


def test_its_own_variables_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "adding")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracker = Wandb(WandbConfig(), 60.0)
    tracker.open(about(new_run(tmp_path)), None)
    tracker.finish(End("interrupted"))
    (records,) = files_below(tmp_path)
    assert {record.run.project for record in records if record.WhichOneof("record_type") == "run"} == {"adding"}
    assert exit_code(records) == 255
