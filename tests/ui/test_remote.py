"""A copy that follows runs behind a URL."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile

from penstock.conf.errors import CheckpointError
from penstock.orchestrator.observability.runs.found import Runs
from penstock.ui import remote
from penstock.ui.answers import Answers
from penstock.ui.remote import SAMPLES_AT_ONCE, Copy
from penstock.ui.rollouts import Rollouts, SampleFilter
from tests.ui.made_runs import make_run, steps, write_pictures, write_samples

URL = "memory://bucket/runs"


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Path]:
    """A directory that `put` brings to the URL."""
    yield tmp_path / "there"
    fsspec.filesystem("memory").store.clear()


def put(there: Path) -> None:
    system = fsspec.filesystem("memory")
    for file in there.rglob("*"):
        if file.is_file():
            system.pipe_file(f"/bucket/runs/{file.relative_to(there)}", file.read_bytes())


def test_a_copy_equals_its_runs_and_follows_them(there: Path, tmp_path: Path) -> None:
    run = make_run(there / "sums", "start", metrics=steps(3))
    write_samples(run / "samples", 1, [{"group": 0, "reward": 1.0}])
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "weights.bin").write_bytes(b"x" * 1000)
    put(there)
    here = tmp_path / "here"
    here.mkdir()
    copy = Copy(URL, here)
    assert not copy.look()
    runs = Runs(here)
    assert [(line.id, line.state, line.step) for line in runs.lines()] == [("sums", "unfinished", 3)]
    assert not (here / "sums" / "checkpoints").exists()
    with (run / "metrics.jsonl").open("a") as opened:
        opened.write('{"step": 4}\n')
    with (run / "events.jsonl").open("a") as opened:
        opened.write('{"time": "2026-01-01T00:01:00.000Z", "kind": "end"}\n')
    put(there)
    copy.look()
    assert [(line.state, line.step) for line in runs.lines()] == [("finished", 4)]
    rollouts = Rollouts(here / "sums" / "samples")
    rollouts.update(10)
    assert rollouts.find(SampleFilter())["total"] == 1
    fsspec.filesystem("memory").rm("/bucket/runs/sums", recursive=True)
    copy.look()
    assert not runs.lines()
    assert not list(here.glob(".*"))


def test_unchanged_files_are_not_brought_again(there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(there / "sums", "start", "end", metrics=steps(3))
    put(there)
    brought: list[str] = []
    download = remote.download
    monkeypatch.setattr(
        remote, "download", lambda url, place, names: (brought.extend(names), download(url, place, names))
    )
    copy = Copy(URL, tmp_path)
    copy.look()
    copy.look()
    assert sorted(brought) == ["sums/config.yaml", "sums/events.jsonl", "sums/metrics.jsonl"]


def test_many_samples_come_a_few_at_a_time_the_newest_first(there: Path, tmp_path: Path) -> None:
    run = make_run(there / "sums", "start")
    for step in range(SAMPLES_AT_ONCE + 5):
        write_samples(run / "samples", step, [{"group": step, "reward": 1.0}])
    put(there)
    copy = Copy(URL, tmp_path)
    assert copy.look()
    found = {int(file.stem.removeprefix("step_")) for file in tmp_path.glob("sums/samples/*")}
    assert found == set(range(5, SAMPLES_AT_ONCE + 5))
    assert not copy.look()
    assert len(list(tmp_path.glob("sums/samples/*"))) == SAMPLES_AT_ONCE + 5


def test_a_url_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nosuch"), Copy("nosuch://bucket/runs", tmp_path).follow():
        pass


def test_a_picture_is_brought_once_it_is_asked_for(there: Path, tmp_path: Path) -> None:
    run = make_run(there / "sums", "start")
    (name,) = write_pictures(run, b"\x89PNG mine")
    put(there)
    here = tmp_path / "here"
    here.mkdir()
    copy = Copy(URL, here)
    copy.look()
    assert not (here / "sums" / "pictures").exists()
    opened = Answers(here, copy.bring).opened("sums")
    assert opened.picture(name) == b"\x89PNG mine"
    fsspec.filesystem("memory").rm("/bucket/runs/sums/pictures", recursive=True)
    assert opened.picture(name) == b"\x89PNG mine"
    with pytest.raises(OSError, match="sums/pictures"):
        opened.picture("0" * 32 + ".png")


def test_a_key_below_another_keeps_no_other_run_out_and_is_told_once(
    there: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(there / "sums", "start")
    put(there)
    store = fsspec.filesystem("memory").store
    for name in ("a/config.yaml", "a/config.yaml/logs/x.log"):
        store[f"/bucket/runs/{name}"] = MemoryFile(path=f"/bucket/runs/{name}", data=b"x")
    copy = Copy(URL, tmp_path / "here")
    for _ in range(2):
        copy.look()
    assert "sums" in [line.id for line in Runs(tmp_path / "here").lines()]
    assert ["cannot be copied" in record.getMessage() for record in caplog.records] == [True]


def test_a_key_that_leads_elsewhere_is_left_out_and_told_once(
    there: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(there / "sums", "start")
    put(there)
    here = tmp_path / "a" / "here"
    here.mkdir(parents=True)
    store = fsspec.filesystem("memory").store
    for name in ("../x/state.json", "sums/../../../y/config.yaml", "../samples/step_1.parquet"):
        store[f"/bucket/runs/{name}"] = MemoryFile(path=f"/bucket/runs/{name}", data=b"x")
    copy = Copy(URL, here)
    copy.look()
    copy.look()
    assert [line.id for line in Runs(here).lines()] == ["sums"]
    assert [path for path in tmp_path.rglob("*") if path.is_file() and here not in path.parents] == [
        path for path in there.rglob("*") if path.is_file()
    ]
    assert [record.getMessage() for record in caplog.records] == [
        f"{URL}: 3 files are left out, whose names lead out of it: '../samples/step_1.parquet' is the first."
    ]
