"""Tracking: the records that a run writes, and the experiment trackers that its numbers are sent to, W&B, MLflow,
trackio. Their own environment variables hold wherever a key of theirs is null.
"""

from dataclasses import dataclass, field

from penstock.conf.checks import POSITIVE, check_bounds, one_of
from penstock.conf.errors import ConfigError
from penstock.conf.secret import hide_url

SINKS = ("tensorboard", "ray", "wandb", "mlflow", "trackio")
"""Names that `tracking.sinks` may have."""
RAY_METRICS = (
    "reward/mean", "accuracy/heldout", "response_length/mean", "response_length/clip_ratio", "actor/entropy",
    "actor/kl", "actor/grad_norm", "staleness/max", "mismatch/logprob_abs_mean", "timing_s/step", "idle/rollout",
    "idle/train", "perf/tokens_per_s", "faults/effective_time", "checkpoint/failed",
)  # fmt: skip
"""Default of `tracking.ray_metrics`."""
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
    else mlflow.db in output_dir, beside the runs: it needs no server. A password in it is never shown."""

    def __post_init__(self) -> None:
        self.tracking_uri = hide_url(self.tracking_uri) if self.tracking_uri else self.tracking_uri


@dataclass
class TrackioConfig:
    directory: str | None = None
    """Directory of trackio's database. `null`: TRACKIO_DIR, else its own default, where `trackio show` looks. Where
    TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set, numbers go to that server instead."""


@dataclass
class TrackingConfig:
    """Places that numbers go to besides `metrics.jsonl`, which is always written."""

    progress: bool = True
    """Live display in a terminal; plain lines where the output is no terminal."""
    sinks: list[str] = field(default_factory=lambda: ["tensorboard", "ray"])
    """Names of these places. tensorboard: event files in the run directory. ray: gauges for Ray's Prometheus endpoint
    and dashboard. wandb, mlflow, trackio: experiment trackers, which receive nothing unless they are named here."""
    ray_metrics: list[str] = field(default_factory=lambda: list(RAY_METRICS))
    """Metrics of each step that become gauges for Ray's Prometheus endpoint, by name or pattern, such as `reward/*`.
    The default has what alerts and a first look need, as Prometheus keeps each for weeks; `*` is all of a step."""
    project: str | None = None
    """Project in the trackers: W&B's and trackio's project, MLflow's experiment. `null`: WANDB_PROJECT,
    MLFLOW_EXPERIMENT_NAME, else penstock."""
    group: str | None = None
    """Group by which trackers show runs together. `null`: the recipe's name; `penstock sweep` gives its runs the name
    of its directory."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    close_timeout_s: float = 30.0
    """Seconds for trackers to send what is pending when the run has ended, all side by side. The rest is dropped:
    metrics.jsonl has everything."""
    samples_every_steps: int = 10
    """Write `samples/step_N.parquet` every so many steps. 0: never."""
    pictures_gib: float = 1.0
    """GiB of pictures that are kept in `pictures/` beside these samples, each once: a thousand photos of 1 MB. Further
    ones are left out, which is an event. 0: none. Runs of text alone keep none."""
    export_model: bool = True
    """Write the final weights as a HF model to `model/`."""
    upload_every_s: float = 5.0
    """Seconds between two looks for what is new in the run's directory, with a URL as output_dir. The records of so
    many seconds are lost with a machine. Two small files are uploaded each time, which costs cents a day where requests
    are paid for. The larger a file of lines is, the more rarely it is uploaded."""
    upload_timeout_s: float = 900.0
    """Deadline, in seconds, of uploading the rest at the end: 100 GB of a model over 1 Gbit/s take as long. What has
    not been uploaded by then stays in the working copy, whose place is printed."""
    tags: dict[str, str] = field(default_factory=dict)
    """Free labels, kept in config.yaml and in the Ray job's metadata, and given to trackers."""

    def __post_init__(self) -> None:
        for name in self.sinks:
            one_of("tracking.sinks", name, SINKS)
        if len(set(self.sinks)) < len(self.sinks):
            raise ConfigError(f"tracking.sinks={self.sinks}: a name is there twice.")
        check_bounds(
            self, "tracking",
            samples_every_steps=0, pictures_gib=0, close_timeout_s=POSITIVE, upload_every_s=POSITIVE,
            upload_timeout_s=POSITIVE,
        )  # fmt: skip
