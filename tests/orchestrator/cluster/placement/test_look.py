"""A cluster is looked at from outside, and one that does not answer is told so in time."""

import contextlib
import io
import socket
import threading
import time

import pytest
import ray
from rich.console import Console

from penstock.conf.errors import ResourceError
from penstock.orchestrator.cluster.ray_cluster import look
from penstock.orchestrator.configuration import validate
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.validate import PlacementView, validate_run
from tests.orchestrator.cluster.placement.clusters import node, planned


def validated(*words: str) -> tuple[int, str]:
    screen = io.StringIO()
    code = validate_run(load_config(["recipe=arithmetic", *words]), Console(file=screen, width=140))
    return code, screen.getvalue()


@pytest.mark.real
def test_without_a_cluster_a_local_ray_has_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert look() is None
    code, shown = validated()
    assert code == 0
    assert "of a local Ray" in shown
    assert "nodes of the cluster" not in shown


@pytest.mark.real
def test_validate_says_who_goes_where_and_leaves_the_cluster(
    three_node_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", three_node_address)
    nodes = look()
    assert nodes is not None
    assert sorted(node.cpus for node in nodes) == [2, 3, 3]
    assert not ray.is_initialized()
    code, shown = validated("rollout.num_workers=2", "cluster.labels.trainer={zone: b}")
    assert code == 0
    zone_b = next(node for node in nodes if node.labels.get("zone") == "b")
    assert f"({zone_b.id[:8]})" in next(line for line in shown.splitlines() if line.startswith("Trainer-policy-0"))
    assert "7 actors on 3 of the cluster's 3 node(s) reserve 4 logical CPU(s)" in shown
    code, shown = validated("rollout.num_workers=2", "cluster.cpus_per_worker=4")
    assert code == 2
    assert "✗ resources: Trainer-policy-0 wants 4 CPU(s) on one node, and the largest of the cluster's" in shown


def test_validate_says_what_a_run_would_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "look", lambda: [node(1, 1)])
    plan, config = planned("cluster.wait_s=60")
    view = PlacementView.of(plan, config)
    assert view.summary().startswith("the run waits for nodes for up to 60 s (cluster.wait_s): The run reserves")
    plan, config = planned()
    with pytest.raises(ResourceError, match="and the cluster has 1"):
        PlacementView.of(plan, config).summary()


@pytest.mark.real
@pytest.mark.parametrize(("answers", "message"), [(False, "no Ray cluster answers there"), (True, "within 10 s")])
def test_an_address_without_a_cluster_is_told_in_time(
    monkeypatch: pytest.MonkeyPatch, answers: bool, message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        if answers:
            threading.Thread(target=greet, args=(server,), daemon=True).start()
        else:
            server.close()
        started = time.monotonic()
        with pytest.raises(ResourceError, match=message):
            look(60.0 if not answers else 10.0)
        assert time.monotonic() - started < 60


def greet(server: socket.socket) -> None:
    """Begin as a server of gRPC does, on each connection, and say nothing more."""
    with contextlib.suppress(OSError):  # the test is over
        while True:
            server.accept()[0].sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
