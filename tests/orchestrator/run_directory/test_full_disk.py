"""A disk that is full, or away, costs what was to be written there, and not the run."""

import json
from pathlib import Path

import pytest
from pyarrow import parquet

from penstock.conf.errors import ConfigError, RunInUse
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_lock import FILE
from penstock.store.data.rows import Rows
from tests.small_files import files_up_to
from tests.tmpfs import run_in_tmpfs

ROWS = Rows.from_lists({"response_ids": [[1, 2], [3]], "reward": [1.0, 0.0]})


def new_run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(load_config([f"output_dir={tmp_path}", "name=run"]))


def kinds(directory: RunDirectory) -> list[str]:
    return [f"{event['kind']} {event.get('what', '')}".strip() for event in directory.read_events()]


def test_lines_of_a_full_disk_come_later_and_its_event_says_so(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    directory.event("start")
    directory.log_metrics({"step": 1})
    half = directory.metrics_file.stat().st_size + 5
    with files_up_to(half):
        directory.log_metrics({"step": 2})
        directory.event("checkpoint", step=2)
    assert directory.read_metrics() == [{"step": 1}]
    assert directory.failed_writes.waiting["metrics"] == 1
    directory.log_metrics({"step": 3})
    directory.event("end")
    directory.close()
    assert directory.metrics_file.read_text() == "".join(f'{{"step": {step}}}\n' for step in (1, 2, 3))
    assert kinds(directory) == ["start", "recording_failed metrics", "recording_failed events", "checkpoint", "end"]
    assert not directory.failed_writes.lost


def test_samples_that_cannot_be_written_are_dropped_and_counted(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    directory.write_samples(1, ROWS)
    with files_up_to(200):
        directory.write_samples(2, ROWS)
        directory.write_samples(3, ROWS)
    directory.write_samples(4, ROWS)
    assert sorted(path.name for path in directory.samples.iterdir()) == ["step_1.parquet", "step_4.parquet"]
    assert parquet.read_table(directory.sample_files()[-1]).num_rows == 2
    assert directory.failed_writes.lost == {"samples": 2}
    directory.close()
    assert kinds(directory) == ["recording_failed samples"]


def test_a_timeline_that_cannot_be_written_does_not_keep_the_lines_waiting(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    directory.timeline.span("trainer", "update" * 1000, 0.0, 1.0)
    with files_up_to(1000):
        directory.event("end")
        directory.close()
    assert kinds(directory) == ["end", "recording_failed timeline"]
    assert not (directory.path / "timeline.json").exists()
    assert (directory.path / FILE).read_bytes() == b""


def test_a_run_whose_directory_is_gone_ends_all_the_same(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    directory.log_metrics({"step": 1})
    with files_up_to(0):
        directory.log_metrics({"step": 2})
        directory.event("checkpoint")
    directory.path.rename(tmp_path / "away")
    directory.log_metrics({"step": 3})
    directory.write_samples(3, ROWS)
    assert directory.has_begun
    directory.close()
    directory.close()
    assert not directory.path.exists()
    assert directory.failed_writes.lost == {"metrics": 2, "events": 5, "samples": 1, "timeline": 1}


def test_a_line_that_waits_is_something_that_the_run_has_made(tmp_path: Path) -> None:
    directory = new_run(tmp_path)
    with files_up_to(0):
        directory.log_metrics({"step": 1})
    assert directory.read_metrics() == []
    assert directory.has_begun


def test_a_place_without_room_is_refused_at_the_start_and_left_as_it_was(tmp_path: Path) -> None:
    with files_up_to(500), pytest.raises(ConfigError, match=r"output_dir: cannot make .*/run \(File too large\)"):
        new_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
    directory = new_run(tmp_path)
    with files_up_to(500), pytest.raises(ConfigError, match=r"name=run: cannot go on in .*/run \(File too large\)"):
        directory.rewind(load_config([f"output_dir={tmp_path}", "name=run", "seed=5"]), 0)
    directory.close()


@pytest.mark.parametrize("is_full", [False, True])
def test_a_run_that_is_set_back_keeps_what_was_measured_late(tmp_path: Path, is_full: bool) -> None:
    directory, config = new_run(tmp_path), load_config([f"output_dir={tmp_path}", "name=run"])
    for step in (4, 5, 6, 7):
        directory.log_metrics({"step": step})
    directory.log_metrics({"step": 5, "evaluation/step": 5, "accuracy/heldout": 0.5})
    directory.log_metrics({"step": 8})
    directory.log_metrics({"step": 7, "evaluation/step": 7, "accuracy/heldout": 0.7})
    with files_up_to(5 if is_full else -1):
        directory.rewind(config, 6, {"step": 6})
    directory.log_metrics({"step": 7, "again": True})
    measured = {"step": 5, "evaluation/step": 5, "accuracy/heldout": 0.5}
    assert directory.read_metrics() == [{"step": 4}, measured, {"step": 6}, {"step": 7, "again": True}]
    directory.close()


@pytest.mark.parametrize("is_full", [False, True])
def test_a_run_is_set_back_on_a_full_disk_too(tmp_path: Path, is_full: bool) -> None:
    directory, config = new_run(tmp_path), load_config([f"output_dir={tmp_path}", "name=run"])
    for step in (1, 2):
        directory.log_metrics({"step": step})
    with files_up_to(5 if is_full else -1):
        for step in (3, 4, 5):
            directory.log_metrics({"step": step})
        directory.rewind(config, 4, {"step": 4})
        directory.rewind(config, 3, {"step": 3})
    directory.log_metrics({"step": 4, "again": True})
    with files_up_to(5 if is_full else -1):
        directory.rewind(config, 1)
        directory.rewind(config, 2, {"step": 2, "again": True})
    directory.log_metrics({"step": 3, "again": True})
    again = [{"step": step, "again": True} for step in (2, 3)]
    assert directory.read_metrics() == [{"step": 1}, *again]
    directory.close()
    assert not directory.failed_writes.lost


def test_a_run_that_another_process_has_taken_meanwhile_writes_nothing_more(tmp_path: Path) -> None:
    """The file system was away, and the lock with it; somebody went on with the run on another machine."""
    directory = new_run(tmp_path)
    directory.log_metrics({"step": 1})
    directory.event("start")
    with files_up_to(0):
        directory.log_metrics({"step": 2})
    other = {"pid": 1, "host": "elsewhere", "user": "me", "started": "2026-01-01T00:00:00Z"}
    (directory.path / FILE).write_text(json.dumps(other))
    directory.metrics_file.write_text('{"step": 2, "of": "the other"}\n')
    events = directory.events_file.read_text()
    with pytest.raises(RunInUse, match=r"name=run: .* is now in use by process 1 of me on elsewhere"):
        directory.log_metrics({"step": 3})
    assert directory.has_begun
    directory.event("failed")
    directory.close()
    assert directory.metrics_file.read_text() == '{"step": 2, "of": "the other"}\n'
    assert directory.events_file.read_text() == events
    assert json.loads((directory.path / FILE).read_text()) == other
    assert not (directory.path / "timeline.json").exists()


REAL = """
import sys
from pathlib import Path
from tests.orchestrator.run_directory.test_full_disk import ROWS, kinds, new_run

directory, told = new_run(Path(sys.argv[1])), []
directory.failed_writes.set_printer(told.append)
ballast = Path(sys.argv[1]) / "ballast"

def fill():
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            pass

for step in range(1, 601):
    if step in (100, 400):
        fill()
    if step in (300, 500):
        ballast.unlink()
    directory.log_metrics({"step": step, "text": "x" * 97})
    if step % 50 == 0:
        directory.write_samples(step, ROWS)
        directory.event("fifty", step=step)
    assert [line["step"] for line in directory.read_metrics()] == list(range(1, 1 + len(directory.read_metrics())))
directory.close()
assert [line["step"] for line in directory.read_metrics()] == list(range(1, 601))
assert len(directory.metrics_file.read_text().splitlines()) == 600
assert [event["step"] for event in directory.read_events() if event["kind"] == "fifty"] == list(range(50, 601, 50))
print(sorted(int(file.stem[5:]) for file in directory.sample_files()))
print(kinds(directory).count("recording_failed metrics"), kinds(directory).count("recording_failed samples"))
print(len(told), told[0])
"""


@pytest.mark.real
def test_a_real_disk_that_fills_up_twice_has_every_line_in_the_end(tmp_path: Path) -> None:
    samples, events, told = run_in_tmpfs(REAL, tmp_path, "above, by sizes that files may have").splitlines()
    assert samples == "[50, 300, 350, 500, 550, 600]"
    assert events == "2 2"
    assert told.startswith("8 samples: cannot be written: [Errno 28] ")
    assert "No space left on device" in told
