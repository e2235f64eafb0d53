"""Finds the number of runs of a sweep that the machine or the cluster has room for."""

import math
import os
from collections.abc import Sequence

from penstock.algorithms.catalogue import dataflow_of
from penstock.orchestrator.cluster.cluster import count_local_gpus, join
from penstock.orchestrator.cluster.placement.actors import needed, plan_actors
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.sweeping.points import Point


def jobs_for(points: Sequence[Point]) -> int:
    """Number of runs side by side, by the run that reserves most. Every point's words are read, so that a wrong one
    ends the sweep before its first run. Raises `ConfigError`, `ResourceError`."""
    needs = []
    for point in points:
        config = load_config([*point.words, f"name={point.name}"])
        needs.append(needed(plan_actors(dataflow_of(config), config)))
    cpus, gpus = max(cpus for cpus, _ in needs), max(gpus for _, gpus in needs)
    return room_for(cpus, gpus, *_room())


def _room() -> tuple[float, float]:
    """Numbers of CPUs and GPUs of the machine or the cluster."""
    if address := os.environ.get("RAY_ADDRESS"):
        import ray

        join(address, log_to_driver=False)
        try:
            found = ray.cluster_resources()  # type: ignore[no-untyped-call]
        finally:
            ray.shutdown()
        return found.get("CPU", 0.0), found.get("GPU", 0.0)
    return float(len(os.sched_getaffinity(0))), float(count_local_gpus())


def room_for(cpus: float, gpus: float, have_cpus: float, have_gpus: float) -> int:
    """Number of runs side by side that need so much each; at least one.

    >>> room_for(3, 0, 8, 0), room_for(3, 1, 64, 2), room_for(3, 0, 2, 0)
    (2, 2, 1)
    """
    by = [have / need for have, need in ((have_cpus, cpus), (have_gpus, gpus)) if need]
    return max(1, math.floor(min(by))) if by else max(1, os.cpu_count() or 1)
