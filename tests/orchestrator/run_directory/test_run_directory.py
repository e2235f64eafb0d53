"""A run's files are whole whenever it stops."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pyarrow import parquet

from penstock.conf.errors import ConfigError, RunInUse
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import run_of
from penstock.orchestrator.cluster.ray_cluster import namespace_of
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.timeline import Timeline, chrome_trace
from penstock.store.data.rows import Rows


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
    directory = RunDirectory.create(config_in(tmp_path, "name=mine"))
    directory.log_metrics({"step": 1})
    directory.close()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"name=mine.*already holds a run"):
            RunDirectory.create(config_in(tmp_path, "name=mine"))


def test_a_run_that_never_began_does_not_block_its_name(tmp_path: Path) -> None:
    """The run's process was killed while actors started."""
    directory = RunDirectory.create(config_in(tmp_path, "name=mine", "seed=1"))
    directory.event("start")
    directory.initial_model.mkdir()
    directory.close()
    (directory.path / "notes.txt").write_text("the user's")
    again = RunDirectory.create(config_in(tmp_path, "name=mine", "seed=2"))
    assert again.read_config()["seed"] == 2
    assert again.read_events() == []
    assert not again.initial_model.exists()
    assert (again.path / "notes.txt").exists()


@pytest.mark.parametrize("result", ["model", "checkpoints", "samples", "warm_start"])
def test_what_a_run_has_made_keeps_its_name(tmp_path: Path, result: str) -> None:
    directory = RunDirectory.create(config_in(tmp_path, "name=mine"))
    if result == "warm_start":
        RunDirectory.create(config_in(directory.path, "name=warm_start")).close()
    else:
        (directory.path / result).mkdir()
    directory.close()
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDirectory.create(config_in(tmp_path, "name=mine"))


def test_a_run_that_is_discarded_leaves_nothing_but_what_others_put_there(tmp_path: Path) -> None:
    for left in (False, True):
        directory = RunDirectory.create(config_in(tmp_path, "name=mine"))
        directory.event("start")
        if left:
            (directory.path / "notes.txt").write_text("the user's")
        directory.discard()
        assert directory.path.exists() == left
    assert [path.name for path in directory.path.iterdir()] == ["notes.txt"]


def test_two_processes_are_not_in_one_run(tmp_path: Path) -> None:
    directory = RunDirectory.create(config_in(tmp_path, "name=mine"))
    with pytest.raises(RunInUse, match=r"name=mine: .*/mine is in use by process \d+"):
        RunDirectory.create(config_in(tmp_path, "name=mine"))
    directory.close()


def test_the_name_of_a_run_before_a_run_begins_with_its_parents(tmp_path: Path) -> None:
    parent = RunDirectory.create(config_in(tmp_path, "name=sums"))
    first = RunDirectory.create(config_in(parent.path, "name=warm_start"))
    before = RunDirectory.create(config_in(first.path, "name=teacher"))
    assert [run.full_name for run in (parent, first, before)] == ["sums", "sums.warm_start", "sums.warm_start.teacher"]
    assert run_of(namespace_of(first)) == ("sums.warm_start", first.run_id)


def test_no_two_starts_share_a_namespace(tmp_path: Path) -> None:
    """Neither runs of one name on one cluster nor a run and what a killed process left of it."""
    directory = RunDirectory.create(config_in(tmp_path, "name=warm_start"))
    assert len({namespace_of(directory) for _ in range(100)}) == 100


def test_runs_of_one_name_have_ids_and_a_resumed_run_keeps_its_own(tmp_path: Path) -> None:
    runs = [RunDirectory.create(config_in(tmp_path / where, "name=sums")) for where in ("a", "b")]
    ids = [run.run_id for run in runs]
    assert len(set(ids)) == 2
    for run in runs:
        run.close()
    assert [RunDirectory.open(run.path).run_id for run in runs] == ids
    runs[0].write_timeline()
    trace = json.loads((runs[0].path / "timeline.json").read_text())
    titles = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert titles == [f"sums ({ids[0]})"]


def test_an_id_is_no_result(tmp_path: Path) -> None:
    directory = RunDirectory.create(config_in(tmp_path, "name=refused"))
    assert directory.run_id
    directory.discard()
    assert not directory.path.exists()


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
def test_appending_after_a_kill_removes_the_line_that_was_cut_off(tmp_path: Path, size: int) -> None:
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


@pytest.mark.real
def test_a_run_killed_at_any_moment_leaves_whole_lines_but_perhaps_the_last(tmp_path: Path) -> None:
    script = (
        "import sys, itertools\nfrom penstock.orchestrator.configuration.compose import load_config\n"
        "from penstock.orchestrator.run_directory.run_directory import RunDirectory\n"
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
    timeline.span("engines", "load weights", 101.5, 101.6)
    trace = json.loads("".join(chrome_trace(timeline.rest())))
    names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(names[span["tid"]], span["name"], span["ts"], span["dur"]) for span in spans] == [
        ("trainer", "update", 0, 1_500_000),
        ("engines", "load weights", 1_500_000, 100_000),
    ]
    assert spans[0]["args"] == {"step": 3}


def test_a_timeline_is_bounded_and_counts_what_it_leaves_out() -> None:
    timeline = Timeline(max_spans=2)
    for index in range(5):
        timeline.span("a", "b", index, index + 1)
    assert (len(timeline), timeline.num_dropped) == (2, 3)
