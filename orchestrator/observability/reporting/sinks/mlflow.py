"""The tracker MLflow, by its client (the package `mlflow-skinny` has it). MLFLOW_* variables keep their meaning."""

import os
import time
from collections.abc import Mapping
from typing import Any

from penstock.conf.tracking import MlflowConfig
from penstock.orchestrator.observability.reporting.sinks.tracker import (
    DEFAULT_PROJECT,
    FAILED,
    FINISHED,
    INTERRUPTED,
    About,
    End,
    Opened,
)  # fmt: skip

STATUSES = {FINISHED: "FINISHED", FAILED: "FAILED", INTERRUPTED: "KILLED"}
MAX_BATCH = 100
"""Most parameters or tags of one call."""
MAX_PARAM_CHARS, MAX_TAG_CHARS = 6_000, 5_000
DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # with its own 7 a server that is down is told after two minutes
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Defaults of MLflow's environment variables, where the user has not set them."""


class Mlflow:
    def __init__(self, config: MlflowConfig) -> None:
        self._uri = config.tracking_uri
        self._client: Any = None
        self._id = ""

    def open(self, about: About, id: str | None) -> Opened:
        client = self._connected(about)
        experiment = about.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
        run = self._found(id) if id else None
        if run is None:
            tags = {"mlflow.runName": about.name, "group": about.group, **about.tags}
            run = client.create_run(self._experiment(experiment, about), run_name=about.name, tags=tags)
        else:
            client.update_run(run.info.run_id, status="RUNNING")
        self._id = run.info.run_id
        self._give_params(flat(about.config), run.data.params)
        return Opened(self._id, f"experiment {experiment}, run {about.name}, at {client.tracking_uri}")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        entries = [Metric(plain_name(name), value, now_ms, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=entries, synchronous=True)

    def finish(self, end: End) -> None:
        from mlflow.entities import RunTag

        facts = end.facts()
        self._client.log_batch(
            self._id, tags=[RunTag(plain_name(name), value[:MAX_TAG_CHARS]) for name, value in facts.items()],
            synchronous=True,
        )  # fmt: skip
        if end.state in STATUSES:
            self._client.set_terminated(self._id, STATUSES[end.state])

    def _connected(self, about: About) -> Any:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient  # late: a second, and only where it is asked for

        beside = f"sqlite:///{about.directory.parent / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=self._uri or os.environ.get("MLFLOW_TRACKING_URI") or beside)
        return self._client

    def _found(self, id: str) -> Any:
        """The run of an earlier process; None if it is not there, as people delete runs and change servers."""
        from mlflow.exceptions import MlflowException

        try:
            run = self._client.get_run(id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return run if run.info.lifecycle_stage == "active" else None

    def _experiment(self, name: str, about: About) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        is_file = self._client.tracking_uri.startswith("sqlite:")
        artifacts = (about.directory.parent / "mlartifacts").as_uri() if is_file else None
        return str(self._client.create_experiment(name, artifact_location=artifacts))

    def _give_params(self, params: Mapping[str, str], known: Mapping[str, str]) -> None:
        """Log parameters. MLflow's never change: what differs in a run that goes on becomes a tag."""
        from mlflow.entities import Param, RunTag

        new = [Param(name, value) for name, value in params.items() if name not in known]
        changed = [RunTag(f"now.{name}", value) for name, value in params.items() if known.get(name, value) != value]
        for first in range(0, len(new), MAX_BATCH):
            self._client.log_batch(self._id, params=new[first : first + MAX_BATCH], synchronous=True)
        if changed:
            self._client.log_batch(self._id, tags=changed[:MAX_BATCH], synchronous=True)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten a configuration to names with dots.

    >>> flat({"seed": 1, "trainer": {"optimizer": {"lr": 0.1}}})
    {'seed': '1', 'trainer.optimizer.lr': '0.1'}
    """
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[plain_name(f"{prefix}{name}")] = str(value)[:MAX_PARAM_CHARS]
    return found


def plain_name(name: str) -> str:
    """The name as MLflow allows it: pass@8 and faults of oddly named roles are not allowed."""
    return "".join(sign if sign.isalnum() or sign in "_-. :/" else "_" for sign in name)[:250]
