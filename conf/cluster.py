"""Requests of the run to Ray."""

from dataclasses import dataclass, field

from penstock.conf.checks import POSITIVE, at_least, check_bounds
from penstock.conf.errors import ConfigError, suggest

PLACED_ROLES = ("trainer", "scorer", "rollout", "reward", "compute")
"""Roles of actors that may be on any node."""


@dataclass
class ClusterConfig:
    num_cpus: int | None = None
    """Logical CPUs of a local Ray that `penstock run` starts. `null`: as many as the run asks for. Ignored with
    RAY_ADDRESS."""
    num_gpus: int | None = None
    """GPUs that the run may use. `null`: what Ray finds."""
    gpu_memory_gib: float | None = None
    """Memory of one GPU, in GiB, for the table of `penstock validate` and for what is `auto`: 79 for an H100 of 80 GB.
    `null`: what Ray's label of the node's GPUs says, or this machine's driver."""
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
    """Deadline for one model, checkpoint or folder of code to be on every node that reads it, before actors are made.
    100 GB over 10 Gbit/s take two minutes; 60 GB that each node fetches from the Hugging Face hub at 50 MB/s take
    twenty. What has come stays in the node's cache (HF_HOME)."""
    wait_s: float = 0.0
    """Seconds that a run waits on a Ray cluster for room, also for nodes that are not there yet: `ray status` shows its
    request, for which the cluster's autoscaler brings nodes. Runs are served first come, first served. 0: a run that
    the present nodes could not hold is refused at once, and one whose room is taken waits for
    rollout.start_timeout_s. A member whose node is lost waits as long for another node."""
    reserve_memory: bool = True
    """Have ranks and engines reserve memory of their nodes, so that Ray, its autoscaler and other jobs count with it.
    An actor reserves what it holds of host memory by `penstock validate` (weights, optimizer, activations, keys and
    values, a checkpoint's copy; nothing that is shared or only possible), but no larger share of a node's memory than
    of its CPUs: what fits by CPUs fits by memory. It reserves none where the sizes of the model are not known, and with
    cluster.cpus_per_worker=0. A reservation limits nobody. false: none is made."""
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
    """Grace for actors to end on their own before they are killed: once for those that serve, when all is trained, and
    once for the whole fleet."""

    def __post_init__(self) -> None:
        check_bounds(
            self, "cluster",
            cpus_per_worker=0, object_store_mib=80, wait_s=0, shutdown_timeout_s=POSITIVE, files_timeout_s=POSITIVE,
            gpu_memory_gib=POSITIVE,
        )  # fmt: skip
        if self.ports is not None and (len(self.ports) != 2 or not 0 < self.ports[0] <= self.ports[1] < 65536):
            raise ConfigError(f"cluster.ports={self.ports}: write the first and the last port, such as [20000,20099].")
        for key in ("num_cpus", "num_gpus"):
            if getattr(self, key) is not None:
                at_least(f"cluster.{key}", getattr(self, key), 0)
        for role in self.labels:
            if role not in PLACED_ROLES:
                raise ConfigError(f"cluster.labels.{role}: no role that could be placed{suggest(role, PLACED_ROLES)}")
