"""Weights between machines that are cut off, come back, or do not."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.machines.weights import Case, Nodes, plan_of, shapes
from tests.machines.cluster import Cluster, machines

pytestmark = [pytest.mark.real, pytest.mark.machines]

TENSORS = shapes(vocabulary=2048, num_layers=2)
CASE = Case((1,), (2, 3))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with machines(3, rate="200mbit") as made:
        yield made


@pytest.fixture
def nodes(cluster: Cluster, tmp_path: Path) -> Iterator[Nodes]:
    with Nodes(cluster, CASE, plan_of(TENSORS, CASE), tmp_path) as made:
        yield made


def at(delay_s: float, happen: object) -> None:
    threading.Timer(delay_s, happen).start()  # type: ignore[arg-type]


def test_each_link_carries_the_payload_once(nodes: Nodes) -> None:
    sent = nodes.send()
    payload = nodes.plan.layout.num_bytes
    assert 0.9 * payload < sent["most_link_bytes"] < 1.05 * payload + 200_000  # heartbeats of a busy machine
    assert sum(stats["bytes_in"] for stats in sent["stats"]) == 2 * payload - 2 * len(nodes.plan.layout.header)


def test_a_machine_that_is_cut_off_for_five_seconds_gets_the_version_afterwards(cluster: Cluster, nodes: Nodes) -> None:
    first = nodes.first_of_next()
    at(0.3, cluster[first].cut)
    at(5.3, cluster[first].mend)
    sent = nodes.send()
    assert sent["seconds"] > 5


def test_a_machine_cut_off_for_good_costs_the_others_two_seconds_at_most(cluster: Cluster, nodes: Nodes) -> None:
    nodes.send()
    undisturbed = nodes.send()["seconds"]
    first = nodes.first_of_next()
    at(0.5 * undisturbed, cluster[first].cut)
    (other,) = set(CASE.receivers) - {first}
    sent = nodes.send(await_of=[other])
    assert sent["seconds"] < undisturbed + 30  # `benchmarks.machines` says how much less


def test_after_a_small_step_links_carry_what_changed(cluster: Cluster, nodes: Nodes) -> None:
    """Also where a machine is cut off meanwhile."""
    payload = nodes.plan.layout.num_bytes
    nodes.send(anew=False)
    nodes.step(1e-6)
    sent = nodes.send(anew=False)
    assert sent["most_link_bytes"] < 0.06 * payload + 200_000
    nodes.step(1e-6)
    first = nodes.first_of_next()
    cluster[first].cut()
    at(3.0, cluster[first].mend)
    sent = nodes.send(anew=False)
    assert sent["seconds"] > 2
    assert all(stats["damaged"] == 0 and stats["differences"] > 0 for stats in sent["stats"])
