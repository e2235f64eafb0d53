"""Runs that wait for room are served in the order in which they came, whichever requests Ray fills first."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import ResourceError
from penstock.orchestrator.cluster.placement.nodes import NODE_ID, Node
from penstock.orchestrator.cluster.placement.reservation import (
    Queue,
    Reservation,
    bundles_by_node,
    labels_of,
    runs_ahead,
)
from tests.orchestrator.cluster.placement.clusters import node, planned
from tests.orchestrator.cluster.placement.fake_ray import FakeRay

ENTRY = {
    "state": "CREATED",
    "bundles": {0: {"CPU": 1.0}, 1: {"CPU": 2.0}, 2: {"CPU": 4.0}},
    "bundles_to_node_id": {0: "a", 1: "b", 2: "a"},
}
NAME = "penstock-mine-0123abcd-00000000"
OTHER = "penstock-other-0123abcd-00000000"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """A head without CPUs."""
    ray = FakeRay([node(1, 0)], Random(1))
    ray.installed(monkeypatch)
    return ray


def queue_of(name: str, num_bundles: int) -> Queue:
    return Queue(name, [{"CPU": 1.0}] * num_bundles, [{}] * num_bundles)


def made(timeout_s: float, *words: str) -> Reservation:
    """A reservation of two actors of two CPUs each."""
    actors, config = planned("cluster.cpus_per_worker=2", "reward.cpus_per_worker=0", *words)
    return Reservation.make(actors, config, NAME, timeout_s)


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


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(0, 1000))
def test_runs_are_served_first_come_first_served(wanted: list[int], seed: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        random = Random(seed)
        ray = FakeRay([], random)
        ray.installed(monkeypatch)
        waiting = [(number, queue_of(f"run-{number}", size)) for number, size in enumerate(wanted)]
        for number, run in waiting:
            run.wait(is_first=number == 0)
        served: list[int] = []
        for second in range(300):
            if random.random() < 0.5:
                ray.nodes.append(node(second % 100, 1))
            ray.fill()
            number, run = random.choice(waiting)
            if (before := run.ahead()) or not run.share():
                run.wait(is_first=not before)
                continue
            run.take_back()
            reserved = ray.reserve([{"CPU": 1.0}] * wanted[number], [{}] * wanted[number], f"run-{number}")
            if not reserved.wait(0):  # the request of a run behind was faster
                ray.remove(reserved)
                continue
            run.close()
            served.append(number)
            waiting.remove((number, run))
            if not waiting:
                break
    assert served == list(range(len(wanted)))
    assert len(ray.of("CREATED")) == len(wanted)


def test_a_run_takes_back_what_it_gets_before_its_turn(ray: FakeRay) -> None:
    first, second = queue_of("first", 4), queue_of("second", 1)
    for run in (first, second):
        run.wait(is_first=run is first)
    ray.nodes.append(node(2, 1))
    ray.fill()
    assert second.share() == {node(2).id: [{"CPU": 1.0}]}
    for _ in range(5):
        assert second.ahead() == ["first"]
        second.wait(is_first=False)
        ray.fill()
    assert not second.share()
    assert ray.of("PENDING") == ["first/request"]
    first.close()
    assert second.ahead() == []
    second.wait(is_first=True)  # it asks again
    ray.fill()
    assert second.share()


def test_a_run_waits_for_nodes_and_is_pinned_to_those_that_come(ray: FakeRay, caplog: pytest.LogCaptureFixture) -> None:
    ray.at(50, lambda: ray.nodes.append(node(2, 2)))
    ray.at(80, lambda: ray.nodes.append(node(3, 2)))
    found = made(100, "cluster.wait_s=100")
    placed = {name: its.name for name, its in found.assignment.node_of.items()}
    assert {placed["Rollout-0"], placed["Trainer-policy-0"]} == {"node-2", "node-3"}
    assert placed["Store"] == "node-1"
    (group,) = [group for group in ray.groups if group.state == "CREATED"]
    assert group.name == NAME
    assert sorted(labels[NODE_ID] for labels in group.labels) == [node(2).id, node(3).id]
    assert len(ray.groups) == 3  # the place, the request and the reservation, in 80 seconds
    (line,) = caplog.messages
    assert line.startswith("waiting up to 100 s (cluster.wait_s) for 4 CPU(s).")
    assert "`ray status` shows what was asked for." in line


def test_nodes_that_never_come_end_the_run_at_its_deadline(ray: FakeRay) -> None:
    message = (
        r"not free within 100 s \(cluster.wait_s\): 4 CPU\(s\). No node came that has room for it. .*cluster has 0"
    )
    with pytest.raises(ResourceError, match=message):
        made(100, "cluster.wait_s=100")
    assert ray.of("PENDING") == ray.of("CREATED") == []


def test_without_a_time_to_wait_a_run_that_never_fits_is_refused_at_once(ray: FakeRay) -> None:
    with pytest.raises(ResourceError, match="cluster has 0"):
        made(100)
    assert not ray.groups


def test_a_run_waits_behind_those_that_came_before(ray: FakeRay, caplog: pytest.LogCaptureFixture) -> None:
    ray.nodes.append(node(2, 4))
    other = queue_of(OTHER, 8)
    other.wait(is_first=True)
    ray.at(20, other.close)
    found = made(100, "cluster.wait_s=100")
    assert found.assignment.node_of["Rollout-0"].name == "node-2"
    assert ray.of("CREATED") == [NAME]
    behind, first = caplog.messages
    assert "for 4 CPU(s), behind Run other (0123abcd)." in behind
    assert "behind" not in first


def test_a_run_whose_memory_is_taken_asks_once_and_waits(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.nodes.append(node(2, 4))
    monkeypatch.setattr(ray, "fill", lambda: None)  # the CPUs are free, and Ray reserves nothing
    with pytest.raises(ResourceError, match="not free within 100 s"):
        made(100)
    assert [group.name.removeprefix(NAME) for group in ray.groups][2:] == ["/request"]


def test_room_that_was_asked_for_is_kept_for_those_who_join(ray: FakeRay) -> None:
    ray.nodes += [node(2, 4)]
    actors, config = planned("cluster.cpus_per_worker=2", "reward.cpus_per_worker=0")
    found = Reservation.make(actors, config, NAME, 100)
    engine = next(actor for actor in actors if actor.role == "rollout")
    found.ask_for(2, engine, config, NAME)
    assert found.num_received(engine) == 0
    ray.nodes.append(node(3, 2))
    ray.fill()
    assert found.num_received(engine) == 1
    assert found.is_asking
    found.ask_for(0, engine, config, NAME)
    assert not found.is_asking
    claim = found.claim(engine, actors, config, NAME)
    assert (claim.node.name, claim.is_own) == ("node-3", True)
    assert found.num_received(engine) == 0
    claim.release()
    found.release()
    assert ray.of("PENDING") == ray.of("CREATED") == []


def test_what_joined_for_nothing_is_given_back_at_the_end(ray: FakeRay) -> None:
    ray.nodes += [node(2, 4), node(3, 2)]
    actors, config = planned("cluster.cpus_per_worker=2", "reward.cpus_per_worker=0")
    found = Reservation.make(actors, config, NAME, 100)
    found.ask_for(2, actors[2], config, NAME)
    ray.fill()
    assert found.num_received(actors[2]) == 1
    assert len(found.groups) == 3
    found.release()
    assert ray.of("PENDING") == ray.of("CREATED") == []


def test_bundles_have_nodes_once_all_of_them_have() -> None:
    assert bundles_by_node(ENTRY) == {"a": [{"CPU": 1.0}, {"CPU": 4.0}], "b": [{"CPU": 2.0}]}
    assert bundles_by_node(ENTRY | {"state": "PENDING"}) == {}
    assert bundles_by_node({}) == {}


def test_a_request_names_the_labels_and_nodes_that_the_run_may_have() -> None:
    nodes: list[Node] = [node(1), node(2)]
    actors, config = planned("cluster.labels.rollout={accelerator: a100}")
    of_role: dict[str, Any] = {actor.role: labels_of([actor], nodes, config.cluster) for actor in actors}
    assert of_role["rollout"] == {"accelerator": "a100"}
    assert of_role["trainer"] == {}
    actors, config = planned("cluster.nodes=[node-1,10.0.0.2]")
    assert labels_of(actors[:1], nodes, config.cluster) == {NODE_ID: f"in({nodes[0].id},{nodes[1].id})"}
    actors, config = planned("cluster.nodes=[node-3]")
    with pytest.raises(ResourceError, match="the cluster has no node 'node-3'"):
        labels_of(actors[:1], nodes, config.cluster)
