"""Looks at the nodes of the cluster that a run would have without staying connected: for `penstock validate`.

A process of its own joins the cluster, prints its nodes as JSON and leaves, so that this one is connected to nothing
afterwards, and a cluster that does not answer costs only the deadline.
"""

import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import ray

from penstock.conf.errors import ResourceError
from penstock.orchestrator.cluster.cluster import join
from penstock.orchestrator.cluster.placement.nodes import Node, cluster_nodes

LOOK_S = 90.0
"""Deadline in seconds for Ray to be imported, joined and asked."""


def look(timeout_s: float = LOOK_S) -> list[Node] | None:
    """Nodes of the cluster, the driver's first. None where there is no cluster: the run would start a local Ray. Raises
    `ResourceError` if the cluster that RAY_ADDRESS names does not answer."""
    if ray.is_initialized():
        return cluster_nodes()
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return None
    try:
        looker = subprocess.run(
            [sys.executable, "-m", __name__], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"RAY_ADDRESS={address}: the cluster did not answer within {timeout_s:g} s. See `ray status` there."
        ) from None
    lines = looker.stdout.splitlines()
    if looker.returncode or not lines:
        reason = (looker.stderr.splitlines() or ["no reason given"])[-1]
        raise ResourceError(f"RAY_ADDRESS={address}: the cluster cannot be looked at ({reason}).")
    answer = json.loads(lines[-1])
    if "refused" in answer:
        raise ResourceError(answer["refused"])
    return [Node(**fields) for fields in answer["nodes"]]


def main() -> None:
    """Entry of the process of its own: print the nodes."""
    answer: dict[str, Any]
    try:
        join(os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR)
        answer = {"nodes": [asdict(node) for node in cluster_nodes()]}
        ray.shutdown()
    except ResourceError as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
