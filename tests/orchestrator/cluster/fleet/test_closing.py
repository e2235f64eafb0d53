"""A fleet ends its actors within the time that all have together, though one of them hangs."""

import time
from pathlib import Path
from random import Random

import pytest
import ray

from penstock.orchestrator.cluster.fleet import fleet as fleet_module
from tests.orchestrator.scripted_cluster import Cluster, ScriptedNodesFleet
from tests.orchestrator.scripted_fleet import flow_of, scripted_config


@pytest.mark.parametrize("hangs", [True, False])
def test_who_hangs_leaves_the_store_and_the_agents_moments(
    hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("cluster.cpus_per_worker=0", "reward.cpus_per_worker=0", "cluster.shutdown_timeout_s=0.5")
    config, cluster, graces = scripted_config(tmp_path, *words), Cluster(2), list[float]()
    cluster.patch(monkeypatch)
    monkeypatch.setattr(fleet_module, "LEAST_GRACE_S", 0.1)
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: time.sleep(timeout * hangs))
    fleet = ScriptedNodesFleet(cluster, config, flow_of(config), Random(1))
    fleet.create()
    fleet.store_process.end = graces.append  # type: ignore[union-attr, method-assign]
    fleet.agents.close = graces.append  # type: ignore[method-assign]
    fleet.close()
    assert not fleet.actors
    assert graces == [0.1, 0.1] if hangs else min(graces) > 0.1
