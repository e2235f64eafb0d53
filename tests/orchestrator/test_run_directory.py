"""A run's files are whole whenever it stops."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.reporting.timeline import Timeline
from penstock.orchestrator.run_directory import RunDirectory
from penstock.store.rows import Rows


def config_in(tmp_path: Path, *words: str) -> RunConfig:
    return load_config([f"output_dir={tmp_path}", *words])


def test_a_run_without_a_name_is_called_after_recipe_and_time(tmp_path: Path) -> None:
    config = config_in(tmp_path, "recipe=arithmetic")
    directory = RunDirectory.create(config, now=lambda: 1_800_000_000.0)
    assert (
        directory.path.name == config.name == time.strftime("arithmetic-%Y%m%d-%H%M%S", time.localtime(1_800_000_000))
    )
    assert directory.read_config()["recipe"] == "arithmetic"


def test_two_runs_of_one_second_get_two_directories(tmp_path: Path) -> None:
    paths = {RunDirectory.create(config_in(tmp_path), now=lambda: 0.0).path for _ in range(3)}
    assert len(paths) == 3


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    RunDirectory.create(config_in(tmp_path, "name=mine")).close()
    with pytest.raises(ConfigError, match=r"name=mine.*already holds a run"):
        RunDirectory.create(config_in(tmp_path, "name=mine"))


@pytest.mark.parametrize("name", ["../up", "a/b", ".."])
def test_a_name_that_is_no_directorys_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name="):
        RunDirectory.create(config_in(tmp_path, f"name={name}"))


def test_a_place_that_cannot_be_written_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir"):
        RunDirectory.create(config_in(tmp_path / "file" / "below"))


def test_metrics_are_one_valid_object_a_line_whatever_the_numbers(tmp_path: Path) -> None:
    directory = RunDirectory.create(config_in(tmp_path))
    directory.log_metrics({"step": 1, "a": float("nan"), "b": np.float32(0.5), "c": float("inf"), "d": np.int64(3)})
    lines = directory.metrics_file.read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail) for line in lines] == [
        {"step": 1, "a": None, "b": 0.5, "c": None, "d": 3}
    ]


def test_events_carry_time_and_kind(tmp_path: Path) -> None:
    directory = RunDirectory.create(config_in(tmp_path))
    directory.event("failed", worker="Rollout-0", path=tmp_path)
    (event,) = directory.read_events()
    assert event["kind"] == "failed"
    assert event["time"].endswith("Z")
    assert event["path"] == str(tmp_path)


def test_samples_are_parquet_by_step(tmp_path: Path) -> None:
    directory = RunDirectory.create(config_in(tmp_path))
    rows = Rows.from_lists({"response_ids": [[1, 2], [3]], "reward": [1.0, 0.0]})
    for step in (10, 9, 100):
        directory.write_samples(step, rows)
    assert [file.name for file in directory.sample_files()] == ["step_9.parquet", "step_10.parquet", "step_100.parquet"]
    assert parquet.read_table(directory.sample_files()[0]).column("response_ids").to_pylist() == [[1, 2], [3]]


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    directory = RunDirectory.create(config_in(tmp_path))
    directory.log_metrics({"step": 1})
    with directory.metrics_file.open("a") as file:
        file.write('{"step": 2, "rew')
    assert directory.read_metrics() == [{"step": 1}]


@pytest.mark.parametrize("size", [5, 70_000, 200_000])
def test_who_appends_after_a_kill_removes_the_line_that_was_cut_off(tmp_path: Path, size: int) -> None:
    directory = RunDirectory.create(config_in(tmp_path))
    directory.log_metrics({"step": 1})
    directory.log_metrics({"step": 2, "text": "x" * size})
    with directory.metrics_file.open("a") as file:
        file.write('{"step": 3, "text": "' + "x" * size)
    RunDirectory.open(directory.path).log_metrics({"step": 3})
    lines = directory.metrics_file.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_text_with_unicode_line_ends_stays_one_line(tmp_path: Path) -> None:
    directory = RunDirectory.create(config_in(tmp_path))
    directory.log_metrics({"step": 1, "text": "a\u2028b\x85c"})
    assert directory.read_metrics() == [{"step": 1, "text": "a\u2028b\x85c"}]


def test_a_run_killed_at_any_moment_leaves_whole_lines_but_perhaps_the_last(tmp_path: Path) -> None:
    script = (
        "import sys, itertools\nfrom penstock.orchestrator.configuration.compose import load_config\n"
        "from penstock.orchestrator.run_directory import RunDirectory\n"
        f"d = RunDirectory.create(load_config(['output_dir={tmp_path}', 'name=killed']))\n"
        "for step in itertools.count():\n    d.log_metrics({'step': step, 'text': 'x' * 5000})\n"
        "    if step == 50: print('going', flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "going"
    process.kill()
    process.wait()
    process.stdout.close()
    directory = RunDirectory.open(tmp_path / "killed")
    text = directory.metrics_file.read_text()
    whole = text[: text.rindex("\n")].split("\n")
    assert len(whole) > 50
    assert [json.loads(line)["step"] for line in whole] == list(range(len(whole)))
    assert [line["step"] for line in directory.read_metrics()] == list(range(len(whole)))


def test_opening_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        RunDirectory.open(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        RunDirectory.open(tmp_path)


def test_the_timeline_is_a_chrome_trace_in_microseconds_with_named_tracks() -> None:
    timeline = Timeline()
    timeline.span("trainer", "update", 100.0, 101.5, step=3)
    timeline.span("engines", "update weights", 101.5, 101.6)
    trace = json.loads(timeline.to_json())
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(names[span["tid"]], span["name"], span["ts"], span["dur"]) for span in spans] == [
        ("trainer", "update", 0, 1_500_000),
        ("engines", "update weights", 1_500_000, 100_000),
    ]
    assert spans[0]["args"] == {"step": 3}


def test_a_timeline_is_bounded_and_counts_what_it_leaves_out() -> None:
    timeline = Timeline(max_spans=2)
    for index in range(5):
        timeline.span("a", "b", index, index + 1)
    assert (len(timeline), timeline.num_dropped) == (2, 3)
