"""Plans of runs have the GPUs of a real Ray that counts some which are not there."""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.orchestrator.cluster.placement.nodes import Node, cluster_nodes, free_nodes
from penstock.orchestrator.cluster.placement.reservation import Reservation
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.memory_view import ACCELERATOR
from penstock.orchestrator.configuration.resolved import resolve
from penstock.planner import plan_inputs
from tests.planner.table_of_gpus import CPUS_PER_GPU, outcome, planned_words, words_of
from tests.ray_cluster import connected, running_cluster

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def nodes(warm_python: list[str]) -> Iterator[list[Node]]:
    """Two nodes of eight."""
    with (
        running_cluster(warm_python, [{"num_cpus": 8 * CPUS_PER_GPU, "num_gpus": 8}] * 2) as address,
        connected(address),
    ):
        yield cluster_nodes()


def wait_until_used(nodes: list[Node], gpus: float) -> None:
    """Wait until so many GPUs are reserved: Ray tells it a moment later."""
    deadline, used = time.monotonic() + 300, -1.0
    while used != pytest.approx(gpus, abs=0.01):
        assert time.monotonic() < deadline, (used, gpus)
        used = sum(node.gpus for node in nodes) - sum(node.gpus for node in free_nodes())
        time.sleep(0.05)


@pytest.mark.parametrize(("model", "lora", "kl", "label", "used"), [
    ("0.5B", 0, 0.0, "L4", 2), ("7B", 0, 0.01, "A100-40G", 2), ("7B", 32, 0.01, "L4", 1), ("32B", 0, 0.0, "H200", 2),
    ("30B-A3B", 32, 0.01, "A100", 2),
])  # fmt: skip
def test_ray_gives_a_run_the_gpus_of_its_plan(
    model: str, lora: int, kl: float, label: str, used: int, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [replace(node, labels={**node.labels, ACCELERATOR: label}, memory=0.0) for node in nodes[:used]]
    monkeypatch.setattr(plan_inputs, "look", lambda: known)
    words = words_of(model, lora, kl)
    assert outcome(known, *words).starts
    run = resolve(load_config(planned_words(*words)))
    reservation = Reservation.make(run.plan, run.config, f"penstock-{model}-0123abcd-00000000", 300)
    try:
        wait_until_used(nodes, sum(actor.num_gpus for actor in run.plan))
    finally:
        reservation.release()
    wait_until_used(nodes, 0)
