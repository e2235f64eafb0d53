"""A run that is refused before it has begun leaves nothing; one that is stopped or fails leaves its directory."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.errors import PenstockError, ResourceError, RunInUse, WorkerDied
from penstock.conf.run import RunConfig
from penstock.orchestrator import run as running
from penstock.orchestrator import session as handles
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_lock import RunLock
from penstock.serve import command as serving


@pytest.fixture
def words(small_run: list[str], tmp_path: Path) -> list[str]:
    return [*small_run, "rollout.engine=hf", f"output_dir={tmp_path}", "name=refused"]


def connecting(error: BaseException, begun: Callable[[RunConfig], None] = lambda config: None) -> Any:
    """Plays a cluster that does not take the run. `begun`: what comes before."""

    class Cluster:
        def __init__(self, actors: object, config: RunConfig) -> None:
            self._config = config

        def connect(self, directory: RunDirectory) -> None:
            begun(self._config)
            raise error

        def close(self) -> None:
            """Nothing is to be closed: there was no connection."""

    return Cluster


def write_a_line(config: RunConfig) -> None:
    directory = RunDirectory(Path(config.output_dir) / str(config.name))
    directory.log_metrics({"step": 1})
    directory.close()


STARTS: dict[str, Any] = {
    "run": running.run,
    "session": lambda config: handles.session(config).__enter__(),
    "serve": lambda config: serving.serve(config, None, lambda text: None),
}


@pytest.mark.parametrize("started", STARTS)
def test_a_run_that_is_refused_leaves_its_name_free(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str
) -> None:
    cluster = connecting(ResourceError("the cluster has 0 GPUs"))
    monkeypatch.setattr(running, "Cluster", cluster)
    monkeypatch.setattr(handles, "Cluster", cluster)
    with pytest.raises(ResourceError):
        STARTS[started](load_config(words))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("started", STARTS)
def test_a_run_that_is_stopped_while_it_starts_keeps_its_logs(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str
) -> None:
    def start_actors(config: RunConfig) -> None:
        (tmp_path / "refused" / "logs").mkdir()
        (tmp_path / "refused" / "logs" / "Rollout-0.log").write_text("loading")

    cluster = connecting(KeyboardInterrupt(), start_actors)
    monkeypatch.setattr(running, "Cluster", cluster)
    monkeypatch.setattr(handles, "Cluster", cluster)
    with pytest.raises(KeyboardInterrupt):
        STARTS[started](load_config(words))
    assert (tmp_path / "refused" / "logs" / "Rollout-0.log").read_text() == "loading"
    monkeypatch.setattr(running, "Cluster", connecting(ResourceError("the cluster has 0 GPUs")))
    if started == "run":
        with pytest.raises(ResourceError):
            running.run(load_config([*words, "resume=auto"]))
        assert (tmp_path / "refused" / "logs").exists(), "the directory was another command's"
    RunDirectory.create(load_config(words)).discard()
    assert not (tmp_path / "refused" / "logs").exists(), "the name is free"


def test_a_run_whose_checkpoints_another_run_has_leaves_nothing(words: list[str], tmp_path: Path) -> None:
    words = [*words, f"checkpoint.directory={tmp_path}/checkpoints"]
    lock = RunLock.take(tmp_path / "checkpoints", "checkpoint.directory")
    with pytest.raises(RunInUse, match=r"checkpoint\.directory"):
        running.run(load_config(words))
    lock.release()
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("started", ["run", "session"])
def test_a_run_that_is_refused_leaves_its_name_free_at_a_url_too(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bucket = tmp_path / "bucket"

    def wait_for_upload(config: RunConfig) -> None:
        deadline = time.monotonic() + 300
        while not (bucket / "refused" / "config.yaml").is_file() and time.monotonic() < deadline:
            time.sleep(0.005)

    cluster = connecting(ResourceError("the cluster has 0 GPUs"), wait_for_upload)
    monkeypatch.setattr(running, "Cluster", cluster)
    monkeypatch.setattr(handles, "Cluster", cluster)
    start: Any = running.run if started == "run" else lambda config: handles.session(config).__enter__()
    with pytest.raises(ResourceError):
        start(load_config([*words, f"output_dir=file://{bucket}", "tracking.upload_every_s=0.01"]))
    assert not [path for path in bucket.rglob("*") if path.is_file()]
    assert RunDirectory.create(load_config([*words, f"output_dir=file://{bucket}"])).url == f"file://{bucket}/refused"


@pytest.mark.parametrize(
    ("error", "begun", "kind"),
    [
        (ResourceError("the second run before this one does not fit"), True, "failed"),
        (KeyboardInterrupt(), True, "interrupted"),
        (KeyboardInterrupt(), False, "interrupted"),
        (WorkerDied("Rollout-0 has died"), False, "failed"),
    ],
)
def test_a_run_that_has_begun_or_died_tells_how_it_ended(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: PenstockError, begun: bool, kind: str
) -> None:
    monkeypatch.setattr(running, "Cluster", connecting(error, *([write_a_line] if begun else [])))
    with pytest.raises(type(error)):
        running.run(load_config(words), quiet=True)
    directory = RunDirectory.open(tmp_path / "refused")
    assert [event["kind"] for event in directory.read_events()] == ["start", kind]
    assert f'class="state {kind}"' in directory.report.read_text()


def test_a_report_that_cannot_be_written_is_told_and_changes_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "refused" / "report.html" / "in the way").mkdir(parents=True)
    monkeypatch.setattr(running, "Cluster", connecting(WorkerDied("Rollout-0 has died")))
    with pytest.raises(WorkerDied, match="Rollout-0 has died"):
        running.run(load_config(words))
    directory = RunDirectory.open(tmp_path / "refused")
    events = [(event["kind"], event.get("what")) for event in directory.read_events()]
    assert events == [("start", None), ("failed", None), ("recording_failed", "report")]
    told = rf"report: cannot be written: \[Errno 21\] Is a directory: .* `penstock report {directory.path}` makes it."
    assert re.search(told, capsys.readouterr().out)
