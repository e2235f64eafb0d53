"""The Ray cluster of a run: the one that RAY_ADDRESS names, or a local one that ends with the run (`local_ray.py`).

Cluster   connects, and stays connected until the run ends
while_it_lives
          makes a call that needs Ray, where a local one may have ended before the run
look      the nodes that a run would have, without staying connected, for `penstock validate`: a process of its own
          joins the cluster, prints its nodes as JSON and leaves
"""

import contextlib
import json
import logging
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from typing import Any

import ray
from ray._private.ray_constants import KV_NAMESPACE_JOB
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._raylet import Config, GcsClient  # type: ignore[attr-defined]  # compiled
from ray.dashboard.modules.job.common import JOB_ID_METADATA_KEY, JobInfoStorageClient
from ray.exceptions import AuthenticationError, RpcError
from ray.job_config import JobConfig

from penstock.conf.errors import RayEnded, ResourceError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.local_ray import LocalRay, short_paths
from penstock.orchestrator.cluster.owners import OWNER
from penstock.orchestrator.cluster.placement.actors import RUN_PREFIX, ActorPlan, check_fits, needed
from penstock.orchestrator.cluster.placement.assignment import assign
from penstock.orchestrator.cluster.placement.nodes import Node, cluster_nodes
from penstock.orchestrator.cluster.ray_connection import (
    AUTH_MODE,
    PATIENCE,
    HeadWatch,
    check_token,
    cluster_address,
    keep_token_private,
    outliving_head,
    reach,
    reconnect_s,
)
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_place import try_place
from penstock.store.data.roots import sweep_stale

MIB = 2**20
LOOK_S = 90.0
"""Deadline in seconds for Ray to be imported, joined and asked."""
JOB_S = 10.0
"""Deadline in seconds to read or write what Ray has of a job."""
VERSIONS = "Version mismatch"
"""How Ray begins where its version or Python's is not the cluster's."""
WRONG_CLUSTER = "WrongClusterID"
"""What Ray says where the head has another identity than the one that was joined."""
TOLD_CHARS = 100
LOOKS_S = 0.2
"""Seconds between two looks whether a local Ray has ended."""
local_rays: dict[str, LocalRay] = {}
"""Clusters that this process has started, and that end with it, by address."""
watches: list[HeadWatch] = []
"""Watches of the heads of clusters that this process is connected to, one at most."""
_unanswered_calls: list[Future[None]] = []
"""Calls that waited for a Ray that has ended."""


def count_local_gpus() -> int:
    """Number of GPUs of this machine that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_resources(actors: list[ActorPlan], config: RunConfig) -> None:
    """Raise `ResourceError` before anything starts if no cluster answers at RAY_ADDRESS, or a local Ray could not hold
    the plan, and `ConfigError` for a RAY_TMPDIR that it cannot use. What a cluster has is known once connected."""
    if ray.is_initialized():
        return
    if (address := cluster_address()) is not None:
        reach(address)
        return
    check_token()
    short_paths(os.environ)
    if directory := os.environ.get("RAY_TMPDIR"):
        try_place(directory, "RAY_TMPDIR")
    gpus = count_local_gpus()
    if config.cluster.num_gpus is not None and config.cluster.num_gpus > gpus:
        raise ResourceError(
            f"cluster.num_gpus={config.cluster.num_gpus}, and this machine has {gpus}. Lower it or leave it out."
        )
    cpus = config.cluster.num_cpus if config.cluster.num_cpus is not None else needed(actors)[0]
    check_fits(actors, cpus, gpus if config.cluster.num_gpus is None else config.cluster.num_gpus)


def namespace_of(directory: RunDirectory) -> str:
    """A new namespace for a run's actors, at every start. So neither what a killed process has left in a cluster nor
    runs of the same name are in the way."""
    return f"{RUN_PREFIX}{directory.full_name}-{directory.run_id}-{uuid.uuid4().hex[:8]}"


def is_elsewhere() -> bool:
    """Return whether the cluster that `connect` connects to, or has, does not end with this process."""
    if ray.is_initialized():
        return ray.get_runtime_context().gcs_address not in local_rays
    return cluster_address() is not None


def is_over() -> bool:
    """Return whether the Ray of this process has ended before it was closed, or the head of its cluster is lost."""
    return any(local.is_over for local in local_rays.values()) or any(watch.is_lost for watch in watches)


def raise_if_over() -> None:
    """Raise `RayEnded` if the Ray of this process has ended before it was closed, or the head of its cluster is
    lost."""
    for watch in watches:
        watch.raise_if_lost()
    if is_over():
        raise RayEnded(
            "Ray has ended on this machine, and all actors with it. Out of memory is the usual reason, or a signal to "
            "every process of the run. Start the command again with resume=auto, or with --retries."
        )


def while_it_lives(call: Callable[[], None]) -> None:
    """Make a call that needs Ray, unless that has ended. Returns as soon as a local Ray ends, whatever the call waits
    for."""
    if is_over():
        return
    if not local_rays:
        _call_cluster(call)
        return
    calling: Future[None] = Future()
    _unanswered_calls.append(calling)
    threading.Thread(target=_resolve, args=(calling, call), daemon=True).start()
    while not (wait([calling], LOOKS_S).done or is_over()):
        pass
    if calling.done():
        _unanswered_calls.remove(calling)
        calling.result()


def _call_cluster(call: Callable[[], None]) -> None:
    """Make a call. Raises `RayEnded` if the head of the cluster has started anew and has forgotten the run."""
    try:
        call()
    except AuthenticationError as error:
        if WRONG_CLUSTER not in str(error):
            raise
        raise RayEnded(
            "The head of the Ray cluster has started anew and has forgotten this run, whose actors are lost. Start the "
            "command again with resume=auto. A head that is started with RAY_REDIS_ADDRESS remembers."
        ) from error


def _resolve(calling: "Future[None]", call: Callable[[], None]) -> None:
    try:
        call()
        calling.set_result(None)
    except BaseException as error:  # noqa: BLE001 - the caller raises it
        calling.set_exception(error)


class Cluster:
    """The cluster that a run is on. One that this process was connected to already is used and left alone.

    Lifecycle: `connect`, a second time of which changes nothing; `close`.
    """

    def __init__(self, actors: Sequence[ActorPlan], config: RunConfig) -> None:
        """`actors`: those that must fit."""
        self._actors, self._config = list(actors), config
        self._is_connected = self._is_own = False
        self._watch: HeadWatch | None = None

    def connect(self, directory: RunDirectory) -> None:
        """Connect. Raises `ResourceError`, also where the plan does not fit."""
        if self._is_connected:
            return
        if not ray.is_initialized():
            check_resources(self._actors, self._config)
            metadata = metadata_of(self._config, directory)
            _start(self._actors, self._config, namespace_of(directory), metadata)
            add_to_submission(metadata)
            self._is_own = True
        self._is_connected = True
        if is_elsewhere() and not watches:
            watches.append(HeadWatch(ray.get_runtime_context().gcs_address, PATIENCE * reconnect_s()))
            self._watch = watches[0]
        if not self._config.cluster.wait_s:
            nodes = cluster_nodes()
            check_fits(self._actors, sum(node.cpus for node in nodes), sum(node.gpus for node in nodes))

    def close(self) -> None:
        if self._is_own:
            if all(call.done() for call in _unanswered_calls):  # else it would start another Ray when it continues
                ray.shutdown()
            _end_started()
        if self._watch is not None:
            self._watch.close()
            watches.remove(self._watch)
            self._watch = None
        self._is_connected = self._is_own = False


def check_placement(actors: Sequence[ActorPlan], config: RunConfig) -> None:
    """Raise `ResourceError` if the nodes of the cluster that this process is connected to could not hold the plan even
    if they were empty, unless the run waits for others."""
    if not config.cluster.wait_s:
        assign(actors, cluster_nodes(), config)


def look(timeout_s: float = LOOK_S) -> list[Node] | None:
    """Nodes of the cluster, the driver's first. None where there is no cluster: the run would start a local Ray. Raises
    `ResourceError` if the cluster that RAY_ADDRESS names does not answer."""
    if ray.is_initialized():
        return cluster_nodes()
    answer = _ask(timeout_s)
    return None if answer is None else [Node(**fields) for fields in answer["nodes"]]


def has_owner(namespace: str, timeout_s: float = LOOK_S) -> bool:
    """Return whether the cluster has the owner of a run's actors, which may be those of a command that has died. Raises
    as `look` does."""
    if ray.is_initialized():
        return _has_owner(namespace)
    answer = _ask(timeout_s, namespace)
    return answer is not None and bool(answer["has_owner"])


def _has_owner(namespace: str) -> bool:
    with contextlib.suppress(ValueError):
        ray.get_actor(OWNER, namespace=namespace)
        return True
    return False


def _ask(timeout_s: float, *arguments: str) -> dict[str, Any] | None:
    """What a process of its own finds on the cluster; None where there is none."""
    if (address := cluster_address()) is None:
        return None
    reach(address)
    try:
        looker = subprocess.run(
            [sys.executable, "-m", __name__, *arguments],
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"RAY_ADDRESS={address}: the cluster did not answer within {timeout_s:g} s. See `ray status` there."
        ) from None
    lines = looker.stdout.splitlines()
    if looker.returncode or not lines:
        reason = (looker.stderr.splitlines() or ["no reason given"])[-1]
        raise ResourceError(f"RAY_ADDRESS={address}: the cluster cannot be looked at ({reason}).")
    answer: dict[str, Any] = json.loads(lines[-1])
    if "refused" in answer:
        raise ResourceError(answer["refused"])
    return answer


def join(address: str, **options: Any) -> None:
    """Connect to the Ray cluster at `address`. Raises `ResourceError` if none answers there, soon where nothing
    listens, or it wants another token."""
    reach(address)
    try:
        with _refused_for_token(address):
            ray.init(address=address, **options)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        hint = (
            "Install the cluster's versions here."
            if reason.startswith(VERSIONS)
            else f"It has to be a node of that cluster: `ray start --address={address}`."
        )
        raise ResourceError(
            f"RAY_ADDRESS={address}: this machine cannot join ({reason}). {hint} From elsewhere, send the run there "
            "with `ray job submit`."
        ) from error


@contextlib.contextmanager
def _refused_for_token(address: str) -> Iterator[None]:
    """Tell what a cluster that wants a token is to be given. It does not say that it wants one: Ray cannot connect to
    a port that answers."""
    try:
        yield
    except (AuthenticationError, ConnectionError) as error:
        wants_one = os.environ.get(AUTH_MODE, "").lower() == "token"
        unset = "" if wants_one else f"{AUTH_MODE}=token, and "
        raise ResourceError(
            f"RAY_ADDRESS={address}: the cluster does not let this process in "
            f"({' '.join(str(error).split())[:TOLD_CHARS]}). Name the port that `ray start --head` prints. Where the "
            f"cluster wants a token, set {unset}RAY_AUTH_TOKEN_PATH to the file that has it, or RAY_AUTH_TOKEN to the "
            "token."
        ) from error


def metadata_of(config: RunConfig, directory: RunDirectory) -> dict[str, str]:
    """Texts that Ray's dashboard shows of the run's job, by name."""
    known = {
        "penstock.run": directory.full_name, "penstock.run_id": directory.run_id, "penstock.recipe": config.recipe,
        "penstock.algorithm": config.algorithm.name, "penstock.directory": directory.place,
        "penstock.page": f"penstock ui {shlex.quote(directory.place)}",
    }  # fmt: skip
    return {name: value for name, value in known.items() if value} | config.tracking.tags


def add_to_submission(metadata: dict[str, str]) -> None:
    """Add texts to the job of `ray job submit` that this process is in, if any: Ray shows those of the submission, and
    not those that its driver brings. Texts that the user has given stay. Ray has no public call for it."""
    given = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}")).get("metadata", {})
    if (submission := given.get(JOB_ID_METADATA_KEY)) is None:
        return
    gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
    key = JobInfoStorageClient.JOB_DATA_KEY.format(job_id=submission).encode()
    with contextlib.suppress(RpcError):
        if (found := gcs.internal_kv_get(key, KV_NAMESPACE_JOB, timeout=JOB_S)) is not None:
            info = json.loads(found)
            info["metadata"] = metadata | (info["metadata"] or {})
            gcs.internal_kv_put(key, json.dumps(info).encode(), True, KV_NAMESPACE_JOB, timeout=JOB_S)


def _start(actors: list[ActorPlan], config: RunConfig, namespace: str, metadata: dict[str, str]) -> None:
    common: dict[str, Any] = {
        "namespace": namespace,
        "job_config": JobConfig(metadata=metadata),
        "log_to_driver": config.cluster.worker_logs,
        "logging_level": logging.ERROR,
    }
    address = cluster_address()
    keep_token_private(is_joining=address is not None)
    with _own_sigterm():
        if address is not None:
            with outliving_head():
                join(address, **common)
        else:
            _start_local(actors, config, common)


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the command's own handler of SIGTERM, if it has one: Ray's drivers exit at once, after a dump of their
    stacks."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def _start_local(actors: list[ActorPlan], config: RunConfig, common: dict[str, Any]) -> None:
    """Start a Ray on this machine, not whatever cluster somebody has started there, and connect to it."""
    # Ray's workers are niced by 15 unless told otherwise. Threads that meet at barriers then wait for the one that
    # shares its core with any other process: a step becomes twenty times slower.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Where memory runs low, Ray counts what processes hold without their children, and ends all that it takes at once.
    os.environ.setdefault("RAY_worker_killing_policy_by_group", "1")  # one at a time, the newest first
    os.environ.setdefault(AUTH_MODE, "token")  # as `ray.init` does where it starts Ray in its own process
    Config.initialize("")  # Ray has read its environment when it was imported
    local = LocalRay({
        "num_cpus": config.cluster.num_cpus or max(1, math.ceil(needed(actors)[0])),
        "num_gpus": config.cluster.num_gpus,
        "include_dashboard": config.cluster.dashboard,
        "object_store_memory": config.cluster.object_store_mib * MIB,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
    })  # fmt: skip
    local_rays[local.address] = local
    try:
        ray.init(address=local.address, **common)
    except BaseException:
        _end_started()
        raise


def _end_started() -> None:
    """End the local Ray. What its processes have in shared memory goes with them, also where they were killed."""
    for local in local_rays.values():
        local.close()
    local_rays.clear()
    sweep_stale()


def main() -> None:
    """Entry of the process of its own: print the nodes, and whether the namespace that is given has an owner."""
    answer: dict[str, Any]
    try:
        join(str(cluster_address()), log_to_driver=False, logging_level=logging.ERROR)
        answer = {"nodes": [asdict(node) for node in cluster_nodes()]}
        answer["has_owner"] = any(map(_has_owner, sys.argv[1:]))
        ray.shutdown()
    except ResourceError as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
