"""One Ray cluster for all tests of a process, of workers that start quickly. The fixtures are in `tests/conftest.py`.

Run as a program it is the cluster: `ray_cluster.py NODES` prints its address and lives until its input ends. All its
nodes are on this machine, and are started by a Python whose forks are warm (`warm_workers.py`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

NUM_CPUS, NUM_GPUS = 64, 2
"""Counted, not there: what tests may ask for at a time."""
OBJECT_STORE_BYTES = 200 * 2**20
QUIET = {"REPORTER_UPDATE_INTERVAL_MS": "600000", "RAY_worker_niceness": "0"}
"""Nobody looks at the figures of its processes, which it would collect every few seconds."""


@contextmanager
def running_cluster(warm_python: Sequence[str], nodes: Sequence[Mapping[str, Any]] = ()) -> Iterator[str]:
    """The address of a cluster in processes of its own. `nodes`: one for each, with what it has; none: a single one."""
    cluster = subprocess.Popen(
        [*warm_python, __file__, json.dumps(list(nodes))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **QUIET},
    )
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    try:
        yield next(line.split()[1] for line in cluster.stdout if line.startswith("address "))
    finally:
        cluster.stdin.close()
        cluster.wait(60)


@contextmanager
def connected(address: str) -> Iterator[None]:
    """This process as a driver; actors that it leaves end with the block."""
    ray.init(address, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


def serve(nodes: Sequence[Mapping[str, Any]]) -> None:
    from ray.cluster_utils import Cluster

    common = {
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "dashboard_agent_listen_port": 0,  # any: a cluster that takes jobs must find the usual one free
        "include_log_monitor": False,  # it reads the files of all workers that there were, again and again
        "setup_worker_path": str(Path(__file__).with_name("warm_client.py")),
    }
    settings = {"prestart_worker_first_driver": False, "enable_worker_prestart": False}
    head, *others = nodes or [{"num_cpus": NUM_CPUS, "num_gpus": NUM_GPUS}]
    cluster = Cluster(initialize_head=True, head_node_args={**common, **head, "_system_config": settings})
    for node in others:
        cluster.add_node(**common, **node)
    print("address", cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
