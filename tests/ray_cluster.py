"""One Ray cluster for all tests of a process, of workers that start quickly. The fixtures are in `tests/conftest.py`.

Run as a program it is the cluster: `python ray_cluster.py` prints its address and lives until its input ends.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

WARM_PYTHON = "PENSTOCK_TEST_WARM_PYTHON"
"""Environment variable: the command that starts a worker."""
NUM_CPUS, NUM_GPUS = 64, 2
"""Counted, not there: what tests may ask for at a time."""
OBJECT_STORE_BYTES = 200 * 2**20
QUIET = {"log_to_driver": False, "logging_level": "ERROR"}


@contextmanager
def running_cluster() -> Iterator[str]:
    """The address of a cluster in processes of its own."""
    cluster = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    try:
        yield next(line.split()[1] for line in cluster.stdout if line.startswith("address "))
    finally:
        cluster.stdin.close()
        cluster.wait(60)


@contextmanager
def connected(address: str, python: Sequence[str]) -> Iterator[None]:
    """This process as a driver; actors that it leaves end with the block."""
    ray.init(address, runtime_env={"py_executable": shlex.join(python)}, **QUIET)
    try:
        yield
    finally:
        ray.shutdown()


def with_warm_workers(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """What Ray calls in drivers that have this function's name in RAY_RUNTIME_ENV_HOOK."""
    return {**(runtime_env or {}), "py_executable": os.environ[WARM_PYTHON]}


def serve() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": NUM_CPUS,
            "num_gpus": NUM_GPUS,
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "dashboard_agent_listen_port": 0,  # any: a cluster that takes jobs must find the usual one free
            "include_log_monitor": False,  # it reads the files of all workers that there were, again and again
            # Actors of tests bring their own command: workers that are started ahead would wait in vain.
            "_system_config": {"prestart_worker_first_driver": False, "enable_worker_prestart": False},
        },
    )
    print("address", cluster.address, flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_worker_niceness", "0")
    serve()
