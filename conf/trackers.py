"""Experiment trackers that a run's numbers are sent to: W&B, MLflow, trackio. Their own environment variables hold
wherever a key is null."""

from dataclasses import dataclass

from penstock.conf.checks import one_of

SINKS = ("tensorboard", "ray", "wandb", "mlflow", "trackio")
"""Names that `tracking.sinks` may have."""
WANDB_MODES = ("online", "offline", "disabled")


@dataclass
class WandbConfig:
    entity: str | None = None
    """User or team that the project belongs to. `null`: WANDB_ENTITY, else the default of the account."""
    mode: str | None = None
    """Mode of wandb. online; offline: files only, for `wandb sync` later; disabled. `null`: WANDB_MODE, else online."""
    directory: str | None = None
    """Directory of wandb's files, in a folder `wandb` below. `null`: WANDB_DIR, else the run's directory, so that they
    come and go with it."""

    def __post_init__(self) -> None:
        if self.mode is not None:
            one_of("tracking.wandb.mode", self.mode, WANDB_MODES)


@dataclass
class MlflowConfig:
    tracking_uri: str | None = None
    """Address of the server or database: http://HOST:5000, sqlite:///FILE, databricks, … `null`: MLFLOW_TRACKING_URI,
    else mlflow.db in output_dir, beside the runs: it needs no server."""


@dataclass
class TrackioConfig:
    directory: str | None = None
    """Directory of trackio's database. `null`: TRACKIO_DIR, else its own default, where `trackio show` looks. Where
    TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set, numbers go to that server instead."""
