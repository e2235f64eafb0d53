"""A member whose node is lost waits for another node, which the cluster is asked for, as a run does at its start."""

import asyncio
from collections.abc import Callable, Iterable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.conf.errors import WorkerDied
from penstock.orchestrator.cluster.fleet import capacity
from penstock.orchestrator.cluster.fleet.capacity import Capacity
from penstock.orchestrator.cluster.placement.reservation import Reservation
from tests.orchestrator.cluster.placement.clusters import node, planned
from tests.orchestrator.cluster.placement.fake_ray import FakeRay

NAME = "penstock-mine-0123abcd-00000000"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """A cluster of two nodes, one of which is to be lost."""
    ray = FakeRay([node(1, 2), node(2, 2)], Random(1))
    ray.installed(monkeypatch)
    monkeypatch.setattr(capacity, "WAIT_S", 0.0)
    monkeypatch.setattr(capacity, "look", look)
    return ray


async def look(members: Iterable[Any]) -> list[None]:
    """All agents answer."""
    return [None for _ in members]


def without_node(ray: FakeRay, *words: str) -> tuple[Capacity, Reservation, str]:
    """The capacity of a run that has lost the node of its engine, whose name comes with it."""
    actors, config = planned("cluster.cpus_per_worker=2", "reward.cpus_per_worker=0", *words)
    made = Reservation.make(actors, config, NAME, 60)
    engine = next(actor.name for actor in actors if actor.role == "rollout")
    lost = made.assignment.node_of[engine]
    ray.nodes.remove(next(one for one in ray.nodes if one.id == lost.id))
    agents = SimpleNamespace(members={one.id: ("Agent", None) for one in (*ray.nodes, node(3))})
    table = SimpleNamespace(plan=actors, names_made=[], handle_of=str)
    maker = SimpleNamespace(bring_files_of=lambda *_: None)
    return Capacity(table, made, agents, maker, {}, config, NAME), made, engine  # type: ignore[arg-type]


async def until(found: Callable[[], object]) -> None:
    async with asyncio.timeout(900):
        while not found():
            await asyncio.sleep(0.001)


def test_a_member_without_a_node_waits_for_one_that_it_asks_for(ray: FakeRay, caplog: pytest.LogCaptureFixture) -> None:
    room, reservation, engine = without_node(ray, "cluster.wait_s=900")

    async def main() -> None:
        moving = asyncio.ensure_future(room.ensure_nodes([engine]))
        await until(lambda: ray.of("PENDING"))
        (request,) = (group for group in ray.groups if group.state == "PENDING")
        assert (request.bundles, request.labels) == ([{"CPU": 2.0}], [{}])
        assert f"{engine} is lost with its node, and waits up to 900 s (cluster.wait_s)" in caplog.text
        assert not moving.done()
        ray.nodes.append(node(3, 2))
        ray.fill()
        await moving

    asyncio.run(main())
    assert reservation.assignment.node_of[engine].id == node(3).id
    assert not ray.of("PENDING")


def test_a_node_that_does_not_come_in_time_ends_the_wait_once_for_all(ray: FakeRay) -> None:
    room, _, engine = without_node(ray, "cluster.wait_s=0.05")

    for _ in range(2):
        with pytest.raises(WorkerDied, match=r"no other came within 0\.05 s \(cluster\.wait_s\)\. No node"):
            asyncio.run(room.ensure_nodes([engine]))
    asked = [group for group in ray.groups if group.name.startswith(f"{NAME}/")]
    assert [group.state for group in asked] == ["REMOVED"]


def test_without_a_time_to_wait_nothing_is_asked_for(ray: FakeRay) -> None:
    room, _, engine = without_node(ray)

    with pytest.raises(WorkerDied, match=r"is lost with its node\. No node"):
        asyncio.run(room.ensure_nodes([engine]))
    assert not [group for group in ray.groups if group.name.startswith(f"{NAME}/")]


@pytest.mark.parametrize(("num_samplers", "may_leave"), [(1, [False, True]), (2, [True, True, True])])
def test_a_sampler_starts_again_where_only_engines_of_evaluations_are_left(
    ray: FakeRay, num_samplers: int, may_leave: list[bool]
) -> None:
    ray.nodes = [node(number, 2) for number in range(1, 5)]
    words = [f"rollout.num_workers={num_samplers}", "evaluation.num_workers=1", "evaluation.every_steps=1"]
    room, _, _ = without_node(ray, *words)
    engines = [actor for actor in planned(*words)[0] if actor.role == "rollout"]
    assert [room.can_leave(actor) for actor in engines] == may_leave
