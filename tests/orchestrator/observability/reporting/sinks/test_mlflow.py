"""MLflow's own client writes what a run says into a database, and reads it back."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.tracking import MlflowConfig
from penstock.orchestrator.observability.reporting.trackers import About, End, Mlflow, Sender, plain_name
from tests.orchestrator.observability.reporting.sinks.scripted_tracker import about, new_run, sent


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database: its tables take two seconds to make."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def tracked(uri: str, told: About, id: str | None, steps: range, end: End) -> str:
    tracker = Mlflow(MlflowConfig(tracking_uri=uri))
    opened = tracker.open(told, id)
    for step in steps:
        tracker.log(step, {"loss": step / 4, "accuracy/heldout_pass@8": 0.5})
    tracker.finish(end)
    return opened.id


def read(uri: str, id: str) -> tuple[Any, list[tuple[int, float]]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    return client.get_run(id), [(point.step, point.value) for point in client.get_metric_history(id, "loss")]


def test_a_run_and_what_goes_on_with_it_are_one_run(tmp_path: Path, uri: str) -> None:
    told = replace(about(new_run(tmp_path)), config={"seed": 1, "trainer": {"max_steps": 3, "dtype": "float32"}})
    id = tracked(uri, told, None, range(3), End("failed", "DataError: no rows"))
    run, points = read(uri, id)
    assert run.info.status == "FAILED"
    assert run.data.tags["error"] == "DataError: no rows"
    assert points == [(0, 0.0), (1, 0.25), (2, 0.5)]

    more = replace(told, config={"seed": 1, "trainer": {"max_steps": 5, "dtype": "float32"}})
    end = End("finished", "", {"Held-out accuracy": "33.6% → 99.6%"})
    assert tracked(uri, more, id, range(3, 5), end) == id
    run, points = read(uri, id)
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert points == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert run.data.params == {"seed": "1", "trainer.max_steps": "3", "trainer.dtype": "float32"}
    expected = {
        "group": "group", "recipe": "none", "now.trainer.max_steps": "5", "state": "finished",
        "summary/Held-out accuracy": "33.6% → 99.6%",
    }  # fmt: skip
    assert expected.items() <= run.data.tags.items()
    assert not run.data.tags.get("error")


def test_a_run_that_somebody_has_deleted_is_begun_anew(tmp_path: Path, uri: str) -> None:
    from mlflow import MlflowClient

    told = about(new_run(tmp_path))
    first = tracked(uri, told, None, range(1), End("finished"))
    MlflowClient(tracking_uri=uri).delete_run(first)
    second = tracked(uri, told, first, range(1), End("interrupted"))
    assert second not in (first, tracked(uri, told, "f" * 32, range(0), End("finished")))
    assert read(uri, second)[0].info.status == "KILLED"


def test_a_run_that_another_process_has_taken_over_is_not_over(tmp_path: Path, uri: str) -> None:
    id = tracked(uri, about(new_run(tmp_path)), None, range(1), End("taken_over"))
    assert read(uri, id)[0].info.status == "RUNNING"


def test_its_own_variables_hold(tmp_path: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "adding")
    tracker = Mlflow(MlflowConfig())
    opened = tracker.open(about(new_run(tmp_path)), None)
    tracker.finish(End("finished"))
    run = MlflowClient(tracking_uri=uri).get_run(opened.id)
    experiment = MlflowClient(tracking_uri=uri).get_experiment(run.info.experiment_id)
    assert experiment.name == "adding"
    assert experiment.artifact_location.endswith("/mlartifacts")


def test_a_server_that_is_down_costs_the_run_nothing(tmp_path: Path) -> None:
    with socket.socket() as nobody:  # bound, and not listening: whoever connects is refused
        nobody.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        directory, told = new_run(tmp_path), list[str]()
        directory.failed_writes.set_printer(told.append)
        sender = Sender("mlflow", Mlflow(MlflowConfig(tracking_uri=uri)), about(directory), directory, 60.0)
        sender.begin()
        sent(sender, *range(20))
    assert directory.failed_writes.lost == {"mlflow": 20}
    assert told[0].startswith("mlflow: cannot be written: MlflowException: API request to ")
    assert told[1:] == ["mlflow: It lacks 20 steps; metrics.jsonl has them."]


def test_names_are_written_as_it_allows_them() -> None:
    assert plain_name("accuracy/heldout_pass@8") == "accuracy/heldout_pass_8"
    assert plain_name("rollout/groups/Rollout-0") == "rollout/groups/Rollout-0"
