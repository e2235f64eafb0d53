"""The address of a run while it goes on: `cluster.json` in its directory, written by the process that drives it, and
read by others that ask it something (`penstock status`, `penstock scale`).
"""

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from typing import Any

from penstock.conf.errors import ResourceError
from penstock.orchestrator.run_directory.run_directory import RunDirectory

AUTH_MODE = "RAY_AUTH_MODE"
"""Environment variable that Ray sets in the process that starts a cluster; one that joins must have the same."""


def note_connection(directory: RunDirectory, namespace: str) -> None:
    """Write where the run that this process drives can be found. Ray must be up."""
    import ray

    from penstock.orchestrator.cluster.placement.nodes import cluster_nodes

    content = {
        "address": ray.get_runtime_context().gcs_address,
        "host": cluster_nodes()[0].address,
        "namespace": namespace,
        "pid": os.getpid(),
        "auth_mode": os.environ.get(AUTH_MODE),
    }
    with directory.failed_writes.tolerating("cluster.json", "`penstock status` will not find the run."):
        directory.write_text(directory.cluster_file.name, json.dumps(content) + "\n")


@contextlib.contextmanager
def at_run(directory: RunDirectory, whom: str) -> Iterator[dict[str, Any]]:
    """Connect to the Ray of a run that goes on, by its `cluster.json`, which this yields. A process that is connected
    already stays so. Raises `ResourceError` where it is not there, or `whom` does not answer in the block."""
    found = json.loads(directory.cluster_file.read_text())
    if found["auth_mode"] is not None:
        os.environ.setdefault(AUTH_MODE, found["auth_mode"])
    import ray  # late: it reads its environment now

    borrowed = ray.is_initialized()
    try:
        if not borrowed:
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            ray.init(address=found["address"], namespace=found["namespace"], **quiet)
        yield found
    except (ConnectionError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        raise ResourceError(
            f"{whom} of {directory.path.name} does not answer at {found['address']} ({type(error).__name__}). Is "
            f"process {found['pid']} still there? A run that was killed says no more; its numbers are in "
            f"{directory.place}/{directory.metrics_file.name}."
        ) from None
    finally:
        if not borrowed:
            ray.shutdown()
