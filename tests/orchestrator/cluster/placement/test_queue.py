"""Runs that wait for room are served in the order in which they came, whichever requests Ray fills first."""

from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import ResourceError
from penstock.orchestrator.cluster.placement import queue
from penstock.orchestrator.cluster.placement.nodes import NODE_ID
from penstock.orchestrator.cluster.placement.queue import Queue, bundles_by_node, labels_of, runs_ahead
from tests.orchestrator.cluster.placement.clusters import node, planned

ENTRY = {
    "state": "CREATED",
    "bundles": {0: {"CPU": 1.0}, 1: {"CPU": 2.0}, 2: {"CPU": 4.0}},
    "bundles_to_node_id": {0: "a", 1: "b", 2: "a"},
}


class FakeRay:
    """Placement groups on one node of some CPUs. Pending ones are filled in any order."""

    def __init__(self, cpus: float, random: Random) -> None:
        self.cpus, self._random = cpus, random
        self.groups: dict[int, dict[str, Any]] = {}
        self.num_made = 0

    def reserve(self, bundles: list[dict[str, float]], labels: list[dict[str, str]], name: str) -> int:
        self.num_made += 1
        entry = {"name": name, "state": "PENDING", "bundles": dict(enumerate(bundles))}
        self.groups[self.num_made] = entry | {"bundles_to_node_id": dict.fromkeys(range(len(bundles)), "a")}
        return self.num_made

    def remove(self, group: int) -> None:
        self.groups[group]["state"] = "REMOVED"

    def table(self, group: int | None = None) -> Mapping[Any, Any]:
        return self.groups if group is None else self.groups[group]

    @property
    def free(self) -> float:
        held = [group for group in self.groups.values() if group["state"] == "CREATED"]
        return self.cpus - sum(self._cpus(group) for group in held)

    def fill(self) -> None:
        waiting = [group for group in self.groups.values() if group["state"] == "PENDING"]
        for group in self._random.sample(waiting, len(waiting)):
            if self._cpus(group) <= self.free:
                group["state"] = "CREATED"

    def _cpus(self, group: Mapping[str, Any]) -> float:
        return float(sum(bundle.get("CPU", 0.0) for bundle in group["bundles"].values()))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay(0, Random(1))
    installed(ray, monkeypatch)
    return ray


def installed(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "reserved", ray.reserve)
    monkeypatch.setattr(queue, "remove_placement_group", ray.remove)
    monkeypatch.setattr(queue, "placement_group_table", ray.table)


def looked(run: Queue, ray: FakeRay, cpus: float) -> bool:
    """One look of a run that wants so many CPUs. Returns whether it has them from now on."""
    before = run.ahead()
    if not before and run.share():
        run.close()
        ray.cpus -= cpus
        return True
    run.wait(is_first=not before)
    return False


def test_runs_are_ahead_in_the_order_in_which_they_came() -> None:
    names = ["a/waits-7", "b/waits-5", "b/request", "c/waits-9", "c", "d"]
    assert runs_ahead(names, "c", came=9) == ["b", "a"]
    assert runs_ahead(names, "b", came=5) == []
    assert runs_ahead(names, "d", came=8) == ["b", "a"]
    assert runs_ahead(names, "a") == ["b", "c"]


def test_runs_that_came_at_the_same_time_are_not_behind_each_other() -> None:
    names = ["a/waits-5", "b/waits-5"]
    assert runs_ahead(names, "a", came=5) == []
    assert runs_ahead(names, "b", came=5) == ["a"]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 4), st.integers(0, 1000))
def test_runs_are_served_first_come_first_served(wanted: list[int], cpus: int, seed: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        random = Random(seed)
        ray = FakeRay(cpus, random)
        installed(ray, monkeypatch)
        waiting = [(number, Queue(f"run-{number}", [{"CPU": 1.0}] * size, [])) for number, size in enumerate(wanted)]
        for _, run in waiting:
            assert not run.share()
            run.wait(is_first=False)
        served: list[int] = []
        for _ in range(300):
            ray.fill()
            number, run = random.choice(waiting)
            if looked(run, ray, wanted[number]):
                served.append(number)
                waiting.remove((number, run))
                ray.cpus += wanted[number] * random.randint(0, 1)  # it has ended
            ray.cpus += random.randint(0, 1)
            if not waiting:
                break
    assert served == list(range(len(wanted)))
    assert ray.num_made <= 4 * len(wanted)  # two places and two requests at most
    assert all(group["state"] == "REMOVED" for group in ray.groups.values())


def test_a_run_takes_back_what_it_gets_before_its_turn(fake: FakeRay) -> None:
    first, second = Queue("first", [{"CPU": 4.0}], []), Queue("second", [{"CPU": 1.0}], [])
    for run in (first, second):
        run.wait(is_first=run is first)
    fake.cpus = 1
    fake.fill()
    assert second.share() == {"a": [{"CPU": 1.0}]}
    for _ in range(5):
        assert not looked(second, fake, 1)
    assert fake.free == 1
    assert [group["name"] for group in fake.groups.values() if group["state"] == "PENDING"] == ["first/request"]
    fake.cpus = 5
    fake.fill()
    assert looked(first, fake, 4)
    assert not looked(second, fake, 1)  # it asks again
    fake.fill()
    assert looked(second, fake, 1)


def test_bundles_have_nodes_once_all_of_them_have() -> None:
    assert bundles_by_node(ENTRY) == {"a": [{"CPU": 1.0}, {"CPU": 4.0}], "b": [{"CPU": 2.0}]}
    assert bundles_by_node(ENTRY | {"state": "PENDING"}) == {}
    assert bundles_by_node({}) == {}


def test_a_request_names_the_labels_and_nodes_that_the_run_may_have() -> None:
    nodes = [node(1), node(2)]
    actors, config = planned("cluster.labels.rollout={accelerator: a100}")
    of_role = {actor.role: labels_of([actor], nodes, config.cluster) for actor in actors}
    assert of_role["rollout"] == {"accelerator": "a100"}
    assert of_role["trainer"] == {}
    actors, config = planned("cluster.nodes=[node-1,10.0.0.2]")
    assert labels_of(actors[:1], nodes, config.cluster) == {NODE_ID: f"in({nodes[0].id},{nodes[1].id})"}
    actors, config = planned("cluster.nodes=[node-3]")
    with pytest.raises(ResourceError, match="the cluster has no node 'node-3'"):
        labels_of(actors[:1], nodes, config.cluster)
