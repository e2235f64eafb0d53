"""The experiment trackers Weights & Biases, MLflow (by its client, which `mlflow-skinny` has) and trackio, by their own
packages. `wandb login` and the variables WANDB_*, MLFLOW_* and TRACKIO_* keep their meaning.
"""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.conf.errors import ConfigError
from penstock.conf.secret import hide_in, reveal
from penstock.conf.tracking import MlflowConfig, TrackioConfig, WandbConfig
from penstock.orchestrator.observability.differences import flat
from penstock.orchestrator.observability.reporting.sinks.tracker import (
    DEFAULT_PROJECT,
    FAILED,
    FINISHED,
    INTERRUPTED,
    About,
    End,
    Opened,
)  # fmt: skip

WANDB_EXIT_CODES = {FAILED: 1, INTERRUPTED: 255}
"""Exit codes that W&B shows as failed and as killed."""
WANDB_TAG_CHARS = 64
MLFLOW_STATUSES = {FINISHED: "FINISHED", FAILED: "FAILED", INTERRUPTED: "KILLED"}
MLFLOW_BATCH = 100
"""Most parameters or tags of one call."""
MLFLOW_PARAM_CHARS, MLFLOW_TAG_CHARS = 6_000, 5_000
MLFLOW_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # with its own 7 a server that is down is told after two minutes
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Defaults of MLflow's environment variables, where the user has not set them."""


class Wandb:
    """W&B: its service, or files to be sent later."""

    def __init__(self, config: WandbConfig, timeout_s: float) -> None:
        """`timeout_s`: deadline of W&B's uploads at the end."""
        self._config, self._timeout_s = config, timeout_s
        self._run: Any = None

    def open(self, about: About, id: str | None) -> Opened:
        import wandb  # late: half a second, and only where it is asked for

        mode: Any = self._config.mode or os.environ.get("WANDB_MODE")  # wandb looks at it once in a process
        self._run = wandb.init(
            entity=self._config.entity,
            project=about.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            dir=self._config.directory or os.environ.get("WANDB_DIR") or about.directory,
            mode=mode,
            id=id,
            resume="allow" if id else None,
            reinit="create_new",  # a program may have a run of its own
            name=about.name,
            group=about.group,
            tags=tags_of(about.tags),
            config=dict(about.config),
            allow_val_change=True,  # a run may go on for more steps
            # A console that is captured is no terminal, and the display needs one.
            settings=wandb.Settings(console="off", silent=True, finish_timeout=self._timeout_s),
        )
        place = f"wandb sync {self._run.settings.sync_dir}" if self._run.offline else str(self._run.url)
        return Opened(self._run.id, place)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def finish(self, end: End) -> None:
        self._run.summary.update(end.facts())
        self._run.finish(exit_code=WANDB_EXIT_CODES.get(end.state, 0))


class Mlflow:
    """MLflow: a server, or a database beside the run's directory."""

    def __init__(self, config: MlflowConfig) -> None:
        self._uri = reveal(config.tracking_uri)
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
        params = {plain_name(name): str(value)[:MLFLOW_PARAM_CHARS] for name, value in flat(about.config)}
        self._give_params(params, run.data.params)
        return Opened(self._id, f"experiment {experiment}, run {about.name}, at {hide_in(client.tracking_uri)}")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        entries = [Metric(plain_name(name), value, now_ms, step) for name, value in numbers.items()]
        self._client.log_batch(self._id, metrics=entries, synchronous=True)

    def finish(self, end: End) -> None:
        from mlflow.entities import RunTag

        facts = end.facts()
        self._client.log_batch(
            self._id, tags=[RunTag(plain_name(name), value[:MLFLOW_TAG_CHARS]) for name, value in facts.items()],
            synchronous=True,
        )  # fmt: skip
        if end.state in MLFLOW_STATUSES:
            self._client.set_terminated(self._id, MLFLOW_STATUSES[end.state])

    def _connected(self, about: About) -> Any:
        for name, value in MLFLOW_DEFAULTS.items():
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
        for first in range(0, len(new), MLFLOW_BATCH):
            self._client.log_batch(self._id, params=new[first : first + MLFLOW_BATCH], synchronous=True)
        if changed:
            self._client.log_batch(self._id, tags=changed[:MLFLOW_BATCH], synchronous=True)


class Trackio:
    """trackio: a database here, or a server or a Space by TRACKIO_SERVER_URL or TRACKIO_SPACE_ID."""

    def __init__(self, config: TrackioConfig) -> None:
        self._config = config
        self._run: Any = None
        self._last = 0

    def open(self, about: About, id: str | None) -> Opened:
        wanted = Path(self._config.directory).expanduser().resolve() if self._config.directory is not None else None
        if wanted is not None:
            os.environ["TRACKIO_DIR"] = str(wanted)  # read as trackio is imported
        import trackio  # late: half a second, and only where it is asked for

        if wanted is not None and wanted != trackio.utils.TRACKIO_DIR:
            raise ConfigError(
                f"tracking.trackio.directory={self._config.directory}: trackio has been imported before, and writes to "
                f"{trackio.utils.TRACKIO_DIR}. Set TRACKIO_DIR for the whole process."
            )
        project = about.project or DEFAULT_PROJECT
        self._run = trackio.init(
            project=project,
            name=about.name,
            group=about.group,
            config={**about.config, "tags": dict(about.tags)},
            resume="allow" if id else "never",
            embed=False,
        )
        where = f"TRACKIO_DIR={wanted} " if wanted is not None else ""
        return Opened(self._run.id, f"{where}trackio show --project {project}")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._last = step
        self._run.log(dict(numbers), step=step)

    def finish(self, end: End) -> None:
        import trackio

        text = "\n".join(f"- **{name}**: {value}" for name, value in end.facts().items() if value)
        self._run.log({"end": trackio.Markdown(text)}, step=self._last)
        if end.state == FAILED:
            self._run.alert("the run has failed", end.error, level=trackio.AlertLevel.ERROR, step=self._last)
        self._run.finish()


def tags_of(tags: Mapping[str, str]) -> list[str]:
    """Tags for W&B, whose tags have no names.

    >>> tags_of({"recipe": "arithmetic", "team": "blue"})
    ['recipe: arithmetic', 'team: blue']
    """
    return [re.sub(r"\s+", " ", f"{name}: {value}")[:WANDB_TAG_CHARS] for name, value in tags.items()]


def plain_name(name: str) -> str:
    """The name as MLflow allows it: pass@8 and faults of oddly named roles are not allowed."""
    return "".join(sign if sign.isalnum() or sign in "_-. :/" else "_" for sign in name)[:250]
