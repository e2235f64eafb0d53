"""A run's directory at its URL: what comes there, in which order, and what becomes of what does not."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run_directory.mirror import KIND, Mirror, MirrorRecord
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.store.data.rows import Rows
from tests.remote_places import Flaky, flaky

URL = "flaky://bucket/runs"
NEVER_S = 1000.0
"""Looks come when they are asked for."""


@pytest.fixture(autouse=True)
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Flaky]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("penstock.orchestrator.run_directory.mirror.LAST_PAUSE_S", 0.01)
    with flaky() as system:
        yield system


def new_run(*words: str, every_s: float = NEVER_S) -> RunDirectory:
    config = load_config([f"output_dir={URL}", "name=run", f"tracking.upload_every_s={every_s}", *words])
    directory = RunDirectory.create(config)
    directory.mirror(config.tracking)
    return directory


def at_url(name: str) -> str:
    with fsspec.open(f"{URL}/run/{name}", "r") as file:
        return str(file.read())


def names() -> list[str]:
    system, root = fsspec.core.url_to_fs(f"{URL}/run")
    return sorted(name.removeprefix(f"{root}/") for name in system.find(root))


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_all_that_a_run_leaves_is_at_its_url_in_the_end() -> None:
    directory = new_run()
    directory.event("start")
    directory.log_metrics({"step": 1})
    directory.write_samples(1, Rows.from_lists({"reward": [1.0]}))
    (directory.path / "sft" / "model").mkdir(parents=True)
    (directory.path / "sft" / "model" / "a").write_bytes(b"weights")
    (directory.path / "sft" / "events.jsonl").write_text('{"kind": "end"}\n')
    directory.checkpoints.mkdir()
    (directory.checkpoints / "x").write_text("")
    directory.close()
    expected = [
        "config.yaml",
        "events.jsonl",
        "metrics.jsonl",
        "run_id",
        "samples/step_1.parquet",
        "sft/events.jsonl",
        "sft/model/a",
        "timeline.json",
    ]
    assert names() == expected
    assert at_url("metrics.jsonl") == directory.metrics_file.read_text()
    assert not directory.failed_writes.lost
    directory.close()


def test_lines_come_while_the_run_goes_on_and_nothing_comes_twice(remote: type[Flaky]) -> None:
    directory = new_run(every_s=0.01)
    for step in (1, 2):
        directory.log_metrics({"step": step})
        wait_until(
            lambda step=step: "run/metrics.jsonl" in " ".join(remote.written) and f"{step}" in at_url("metrics.jsonl")
        )
    time.sleep(0.1)
    directory.close()
    assert remote.written.count("runs/run/config.yaml") == 1
    assert remote.written.count("runs/run/metrics.jsonl") == 2


def test_a_line_that_is_half_written_does_not_come() -> None:
    directory = new_run()
    directory.log_metrics({"step": 1})
    with directory.metrics_file.open("a") as file:
        file.write('{"step":')
    directory.upload_now(20)
    assert at_url("metrics.jsonl") == '{"step": 1}\n'
    directory.close()


@pytest.mark.parametrize("error", [OSError("no such bucket"), RuntimeError("a library's own")])
def test_failed_uploads_are_told_once_counted_and_made_later(remote: type[Flaky], error: Exception) -> None:
    directory = new_run(every_s=0.01)
    told: list[str] = []
    directory.failed_writes.set_printer(told.append)
    remote.refused["metrics.jsonl"] = error
    directory.log_metrics({"step": 1})
    directory.upload_now(20)
    directory.upload_now(20)
    assert directory.failed_writes.metrics() == {"recording/lost": 0.0, "recording/waiting": 1.0}
    remote.refused.clear()
    directory.upload_now(20)
    assert directory.failed_writes.waiting[KIND] == 0
    directory.close()
    cannot, works = told
    assert cannot.startswith(
        f"upload: cannot be written: metrics.jsonl: {error}. It is tried again; until then it is in "
    )
    assert works == "upload: can be written again"
    kinds = [json.loads(line)["kind"] for line in at_url("events.jsonl").splitlines()]
    assert kinds == ["recording_failed"]


def test_what_has_not_come_in_the_end_is_told_with_its_place_and_the_way_there(remote: type[Flaky]) -> None:
    directory = new_run()
    told: list[str] = []
    directory.failed_writes.set_printer(told.append)
    directory.model.mkdir()
    (directory.model / "weights").write_bytes(b"weights")
    directory.event("start")
    directory.event("end", steps=1)
    remote.refused["weights"] = OSError("full")
    directory.close()
    assert told[-1].startswith(f"upload: 2 file(s) are missing at {URL}/run: ")
    assert f"They are in {directory.path}; `penstock report {URL}/run` on this machine uploads them" in told[-1]
    assert directory.failed_writes.lost == {KIND: 2}
    assert json.loads(at_url("events.jsonl").splitlines()[-1])["kind"] != "end", "its model is not there"
    remote.refused.clear()
    again = RunDirectory.open(directory.path, directory.url)
    again.mirror(load_config([]).tracking)
    again.close()
    assert at_url("model/weights") == "weights"
    assert at_url("events.jsonl") == directory.events_file.read_text()


def test_one_that_hangs_is_waited_for_no_longer_than_its_deadline(remote: type[Flaky]) -> None:
    directory = new_run("tracking.upload_timeout_s=0.3")
    told: list[str] = []
    directory.failed_writes.set_printer(told.append)
    remote.hangs.clear()
    directory.event("start")
    directory.upload_now(0.1)
    directory.upload_now(3600.0)  # not waited for again
    directory.close()
    assert told[0].startswith("upload: cannot be written: no end within 0.1 s.")
    assert told[-1].startswith("upload: 4 file(s) are missing")
    remote.hangs.set()


def test_a_run_that_is_refused_leaves_nothing_there() -> None:
    directory = new_run()
    directory.event("start")
    directory.upload_now(20)
    assert names()
    directory.discard()
    assert names() == []
    assert not directory.path.exists()


def test_a_name_that_is_taken_there_is_refused_though_nothing_of_it_is_here(tmp_path: Path) -> None:
    first = new_run()
    first.log_metrics({"step": 1})
    first.close()
    first.path.rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match=rf"name=run: {URL}/run already holds a run\. Add resume=auto"):
        new_run()


def test_files_of_a_run_that_made_no_step_are_replaced(tmp_path: Path) -> None:
    first = new_run()
    (first.path / "initial_model").mkdir()
    (first.path / "initial_model" / "old").write_text("")
    first.close()
    assert "initial_model/old" in names()
    first.path.rename(tmp_path / "gone")
    new_run().close()
    assert "initial_model/old" not in names()


def test_runs_without_a_name_take_one_that_is_free_there(tmp_path: Path) -> None:
    made = []
    for machine in ("one", "other"):
        config = load_config([f"output_dir={URL}"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / machine))
            directory = RunDirectory.create(config, now=lambda: 0.0)
        directory.mirror(config.tracking)
        directory.log_metrics({"step": 1})
        directory.close()
        made.append(config.name)
    assert made[1] == f"{made[0]}-2"


def test_the_next_process_does_not_upload_again(remote: type[Flaky]) -> None:
    directory = new_run()
    directory.initial_model.mkdir()
    (directory.initial_model / "a").write_text("weights")
    directory.close()
    remote.written.clear()
    again = RunDirectory.open(directory.path, directory.url)
    again.mirror(load_config([]).tracking)
    again.event("resume")
    again.close()
    assert remote.written == ["runs/run/run_id", "runs/run/timeline.json", "runs/run/events.jsonl"]


def test_another_urls_record_says_nothing(tmp_path: Path) -> None:
    MirrorRecord("s3://other", {}).write(tmp_path)
    assert MirrorRecord.of(tmp_path, URL).url == URL
    (tmp_path / "mirror.json").write_text("{")
    assert MirrorRecord.read(tmp_path) is None


def test_a_mirror_that_never_began_ends_at_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, URL)
    mirror = Mirror(tmp_path, URL, load_config([]).tracking, directory.failed_writes)
    assert mirror.close() == []
    assert not mirror.upload_now(1.0)
