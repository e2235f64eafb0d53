"""Requests of the run to Ray, and the records that it writes."""

from dataclasses import dataclass, field

from penstock.conf.checks import above, at_least, one_of
from penstock.conf.errors import ConfigError, suggest
from penstock.conf.trackers import SINKS, MlflowConfig, TrackioConfig, WandbConfig

PLACED_ROLES = ("trainer", "scorer", "rollout", "reward", "compute")
"""Roles of actors that may be on any node."""


@dataclass
class ClusterConfig:
    num_cpus: int | None = None
    """Logical CPUs of a local Ray that `penstock run` starts. `null`: as many as the run asks for. Ignored with
    RAY_ADDRESS."""
    num_gpus: int | None = None
    """GPUs that the run may use. `null`: what Ray finds."""
    dashboard: bool = False
    """Start the Ray dashboard with a local Ray. A cluster has its own."""
    object_store_mib: int = 512
    """Shared memory of a local Ray's object store."""
    ports: list[int] | None = None
    """First and last port that the run's node agents and its store may listen on, for a firewall between the nodes: two
    are taken on the store's node and one on each other, for each run. `null`: any free ones."""
    files_dir: str | None = None
    """Place on nodes that lack the driver's model, checkpoint or code, for a copy while the run lasts. `null`: the
    temporary directory. A path that all nodes share needs no copies."""
    files_timeout_s: float = 1800.0
    """Deadline for one model, checkpoint or folder of code to be on every node that reads it: 100 GB over 10 Gbit/s
    take two minutes."""
    worker_logs: bool = False
    """Show what actors print in this terminal. They are in Ray's session directory either way."""
    nodes: list[str] = field(default_factory=list)
    """Nodes of a Ray cluster that the run may take, by host name or address. Empty: all. The store and the prompts are
    on the driver's node in any case."""
    labels: dict[str, dict[str, str]] = field(default_factory=dict)
    """Labels that the nodes of a role must have, for clusters of unlike nodes, such as
    cluster.labels.rollout={accelerator: a100}. Roles: trainer, scorer, rollout, reward, compute. Nodes get them by `ray
    start --labels accelerator=a100`; some are Ray's own (ray.io/accelerator-type)."""
    cpus_per_worker: float = 1.0
    """Logical CPUs that each rollout, trainer and scorer actor reserves."""
    shutdown_timeout_s: float = 20.0
    """Grace for actors to end on their own before they are killed."""

    def __post_init__(self) -> None:
        at_least("cluster.cpus_per_worker", self.cpus_per_worker, 0)
        at_least("cluster.object_store_mib", self.object_store_mib, 80)
        above("cluster.shutdown_timeout_s", self.shutdown_timeout_s, 0)
        above("cluster.files_timeout_s", self.files_timeout_s, 0)
        if self.ports is not None and (len(self.ports) != 2 or not 0 < self.ports[0] <= self.ports[1] < 65536):
            raise ConfigError(f"cluster.ports={self.ports}: write the first and the last port, such as [20000,20099].")
        if self.num_gpus is not None:
            at_least("cluster.num_gpus", self.num_gpus, 0)
        for role in self.labels:
            if role not in PLACED_ROLES:
                raise ConfigError(f"cluster.labels.{role}: no role that could be placed{suggest(role, PLACED_ROLES)}")


@dataclass
class TrackingConfig:
    """Places that numbers go to besides `metrics.jsonl`, which is always written."""

    progress: bool = True
    """Live display in a terminal; plain lines where the output is no terminal."""
    sinks: list[str] = field(default_factory=lambda: ["tensorboard", "ray"])
    """Names of these places. tensorboard: event files in the run directory. ray: gauges for Ray's Prometheus endpoint
    and dashboard. wandb, mlflow, trackio: experiment trackers, of which none is told anything unless it is named
    here."""
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
    """Seconds for trackers to take what they lack when the run has ended, all side by side. Then they are left:
    metrics.jsonl has everything."""
    samples_every_steps: int = 10
    """Write `samples/step_N.parquet` every so many steps. 0: never."""
    export_model: bool = True
    """Write the final weights as a HF model to `model/`."""
    upload_every_s: float = 5.0
    """Seconds between two looks for what is new in the run's directory, with a URL as output_dir. A machine that is
    lost takes so much of its records with it; two small files each time cost cents a day where requests are paid for. A
    file of lines is uploaded the more rarely the more MiB it has."""
    upload_timeout_s: float = 900.0
    """Deadline, in seconds, of uploading the rest at the end: 100 GB of a model over 1 Gbit/s take as long. What has
    not been uploaded by then stays in the working copy, and its place is told."""
    tags: dict[str, str] = field(default_factory=dict)
    """Free labels, kept in config.yaml and in the Ray job's metadata, and given to trackers."""

    def __post_init__(self) -> None:
        for name in self.sinks:
            one_of("tracking.sinks", name, SINKS)
        if len(set(self.sinks)) < len(self.sinks):
            raise ConfigError(f"tracking.sinks={self.sinks}: a name is there twice.")
        above("tracking.close_timeout_s", self.close_timeout_s, 0)
        at_least("tracking.samples_every_steps", self.samples_every_steps, 0)
        above("tracking.upload_every_s", self.upload_every_s, 0)
        above("tracking.upload_timeout_s", self.upload_timeout_s, 0)
