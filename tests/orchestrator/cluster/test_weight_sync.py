"""The calls that bring a version from the trainers to the engines. None is made where no engine waits for it."""

import asyncio
from pathlib import Path

import pytest

from penstock.conf.errors import WorkerDied
from penstock.conf.run import RunConfig
from penstock.network.connection import Address
from penstock.orchestrator.cluster import weight_sync as weight_sync_module
from penstock.orchestrator.cluster.node_agents import RelayNodes
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.weight_sync import WeightSync
from penstock.workers.weights.engine_calls import Delivery
from tests.fakes.actors import Call, FakeHandle, never
from tests.orchestrator.noting_actors import NotingActors

ALONE = ["trainer-0 begin_publishing", "trainer-0 finish_publishing"]
PUBLISHED = [f"trainer-{rank} {method}_publishing" for method in ("begin", "finish") for rank in range(2)]


async def published(sync: WeightSync, version: int) -> Delivery:
    await sync.begin(version)
    return await sync.finish(version)


@pytest.mark.parametrize(
    ("num_engines", "expected"),
    [
        (0, []),
        (1, [*PUBLISHED, "rollout-0 load", "agent reclaim_versions"]),
    ],
)
def test_a_version_is_written_where_an_engine_loads_it_and_only_there(
    tmp_path: Path, num_engines: int, expected: list[str]
) -> None:
    actors = NotingActors({"trainer": 2, "rollout": num_engines}, tmp_path)

    async def body() -> None:
        sync = WeightSync(actors, RunConfig())  # type: ignore[arg-type]
        await sync.connect()
        delivery = await published(sync, 3)
        assert delivery.version == 3
        assert await sync.load(delivery) < 10

    asyncio.run(body())
    assert actors.said == expected


def test_engines_that_are_all_replaced_at_a_takeover_load_the_newest_version(tmp_path: Path) -> None:
    """None of them is there when the next command begins."""
    actors = NotingActors({"trainer": 1, "rollout": 0}, tmp_path)
    actors.plan = [ActorPlan("rollout-0", "rollout")]

    async def body() -> None:
        sync = WeightSync(actors, RunConfig())  # type: ignore[arg-type]
        await sync.connect()
        await sync.load(await published(sync, 3))
        await sync.catch_up([("rollout-0", actors.handle("rollout-0"))])
        assert sync.serving == {"rollout-0": 3}

    asyncio.run(body())
    assert [said for said in actors.said if "agent" not in said] == [*ALONE, "rollout-0 load"]


def test_relays_are_told_before_a_version_is_written_and_awaited_before_loading() -> None:
    actors = NotingActors({"trainer": 2, "rollout": 2})
    where = {"trainer-0": "x", "trainer-1": "y", "rollout-0": "a", "rollout-1": "y"}
    agents = {node: (node, actors.handle(node)) for node in "xya"}
    actors.relay_nodes = RelayNodes(where, agents, {node: Address(node, 1) for node in "xya"})

    async def body() -> None:
        sync = WeightSync(actors, RunConfig())  # type: ignore[arg-type]
        await sync.connect()
        await sync.load(await published(sync, 1))

    asyncio.run(body())
    assert actors.said == [
        "trainer-0 plan_chunks", "trainer-1 plan_chunks", "x plan_chunks", "y plan_chunks", "a plan_chunks",
        "x begin_version", "y begin_version", "a begin_version", *PUBLISHED,
        "a wait_for_version", "y wait_for_version", "rollout-0 load", "rollout-1 load",
        "x reclaim_versions", "y reclaim_versions", "a reclaim_versions",
    ]  # fmt: skip


def test_an_engine_on_a_node_that_joins_is_sent_the_next_version_and_loads_that() -> None:
    actors = NotingActors({"trainer": 1, "rollout": 1})
    where = {"trainer-0": "x", "rollout-0": "x", "rollout-1": "a"}
    agents = {node: (node, actors.handle(node)) for node in "xa"}
    addresses = {node: Address(node, 1) for node in "xa"}
    actors.relay_nodes = RelayNodes(where, agents, addresses)
    newcomer = [("rollout-1", actors.handle("rollout-1"))]

    async def body() -> None:
        sync = WeightSync(actors, RunConfig())  # type: ignore[arg-type]
        await sync.connect()
        await sync.load(await published(sync, 1))
        assert actors.said == [*ALONE, "rollout-0 load", "x reclaim_versions"]
        actors.relay_nodes = RelayNodes(where, agents, addresses, ["rollout-0", "rollout-1"])
        coming = asyncio.ensure_future(sync.catch_up(newcomer))
        await asyncio.sleep(0.2)
        assert not coming.done()
        actors.calls.clear()
        await sync.load(await published(sync, 2))
        await coming

    asyncio.run(body())
    assert actors.said == [
        "trainer-0 plan_chunks", "x plan_chunks", "a plan_chunks", "x begin_version", "a begin_version",
        *ALONE, "a wait_for_version", "x wait_for_version", *actors.said[9:],
    ]  # fmt: skip
    assert sorted(actors.said[9:]) == ["a reclaim_versions", "rollout-0 load", "rollout-1 load", "x reclaim_versions"]


@pytest.mark.parametrize("crosses_nodes", [True, False])
def test_an_engine_that_joins_beside_the_first_version_is_brought_it_or_ended(crosses_nodes: bool) -> None:
    """It had nothing to catch up with. Where no version goes between nodes yet, who takes its place waits for the
    next."""
    numbers = {"trainer": 1, "rollout": 1}
    actors = NotingActors(numbers)
    where = {"trainer-0": "x", "rollout-0": "b" if crosses_nodes else "x", "rollout-1": "a"}
    agents = {node: (node, actors.handle(node)) for node in "xba"}
    addresses = {node: Address(node, 1) for node in "xba"}
    actors.relay_nodes = RelayNodes(where, {node: agents[node] for node in "xb"}, addresses, ["rollout-0"])

    async def body() -> None:
        sync = WeightSync(actors, RunConfig())  # type: ignore[arg-type]
        await sync.connect()
        first = await published(sync, 1)
        actors.relay_nodes = RelayNodes(where, agents, addresses, ["rollout-0", "rollout-1"])
        numbers["rollout"] = 2
        actors.calls.clear()
        await sync.load(first)

    asyncio.run(body())
    loaded = [said for said in actors.said if said.endswith(" load")]
    if crosses_nodes:
        assert actors.said[-6:-3] == ["a begin_version", "a wait_for_version", "rollout-0 load"]
        assert loaded == ["rollout-0 load", "rollout-1 load"]
    else:
        assert (loaded, actors.removed) == (["rollout-0 load"], ["rollout-1"])


def test_an_engine_on_a_later_node_is_brought_the_version_once_for_each_agent() -> None:
    actors = NotingActors({"trainer": 1, "rollout": 1})
    where = {"trainer-0": "x", "rollout-0": "b", "rollout-1": "a"}
    agents = {node: (node, actors.handle(node)) for node in "xba"}
    addresses = {node: Address(node, 1) for node in "xba"}
    actors.relay_nodes = RelayNodes(where, {node: agents[node] for node in "xb"}, addresses, ["rollout-0"])
    newcomer = [("rollout-1", actors.handle("rollout-1"))]

    async def body() -> None:
        sync = WeightSync(actors, RunConfig())  # type: ignore[arg-type]
        await sync.connect()
        first = await published(sync, 1)
        await sync.load(first)
        actors.calls.clear()
        for agent in (agents["a"], ("a", actors.handle("another"))):
            actors.relay_nodes = RelayNodes(where, agents | {"a": agent}, addresses, ["rollout-0", "rollout-1"])
            await sync.catch_up(newcomer)
            await sync.catch_up(newcomer)

        second = await published(sync, 2)
        actors.relay_nodes = RelayNodes(where, agents, addresses, ["rollout-0", "rollout-1"])
        actors.calls.append(Call("while the next one", "is under way"))
        coming = asyncio.ensure_future(sync.catch_up(newcomer))
        await asyncio.sleep(0.2)
        assert not coming.done()
        await sync.load(second)
        await coming

    asyncio.run(body())
    brought = ["plan_chunks", "begin_version", "wait_for_version"]
    assert actors.said == [
        *(f"a {method}" for method in brought), "rollout-1 load", "rollout-1 load",
        *(f"another {method}" for method in brought), "rollout-1 load", "rollout-1 load",
        "x begin_version", "another begin_version", "b begin_version", *ALONE,
        "while the next one is under way",
        "another wait_for_version", "b wait_for_version", "rollout-0 load",
        "x reclaim_versions", "another reclaim_versions", "b reclaim_versions",
        *(f"a {method}" for method in brought), "rollout-1 load",
    ]  # fmt: skip


def test_a_node_without_engines_is_told_nothing_and_a_dying_one_delays_nobody() -> None:
    actors = NotingActors({"trainer": 1, "rollout": 1})
    where = {"trainer-0": "x", "rollout-0": "x", "rollout-1": "a"}
    agents = {node: (node, actors.handle(node)) for node in "xa"}
    addresses = {node: Address(node, 1) for node in "xa"}
    actors.relay_nodes = RelayNodes(where, agents, addresses, ["rollout-0", "rollout-1"])

    dead = FakeHandle(None, "Agent-a")
    dead.kill()

    async def body() -> None:
        sync = WeightSync(actors, RunConfig())  # type: ignore[arg-type]
        await sync.connect()
        actors.relay_nodes = RelayNodes(where, agents | {"a": ("a", dead)}, addresses, ["rollout-0", "rollout-1"])
        actors.calls.clear()
        await sync.load(await published(sync, 1))
        assert actors.said[-2:] == ["rollout-0 load", "x reclaim_versions"]
        actors.relay_nodes = RelayNodes(where, {"x": agents["x"]}, addresses, ["rollout-0"])
        actors.calls.clear()
        await sync.load(await published(sync, 2))

    asyncio.run(body())
    assert actors.said == [
        "x begin_version", *ALONE, "x wait_for_version", "rollout-0 load", "x reclaim_versions",
    ]  # fmt: skip


@pytest.mark.parametrize("plans_alike", [True, False])
def test_an_engine_whose_node_was_away_when_ranks_came_back_gets_the_version(
    plans_alike: bool,
) -> None:
    """No later version comes: the ranks wait for what it is to sample. Where the new ranks have another plan of chunks,
    the version is to be published again."""
    plans, where = ["a plan"], {"trainer-0": "x", "rollout-0": "a"}
    answers = {"trainer-0": {"plan_chunks": lambda *_: plans[-1]}}
    actors = NotingActors({"trainer": 1, "rollout": 0}, answers=answers)
    actors.plan = [ActorPlan("rollout-0", "rollout")]
    agents = {node: (node, actors.handle(node)) for node in "xa"}
    addresses = {node: Address(node, 1) for node in "xa"}
    actors.relay_nodes = RelayNodes(where, agents, addresses, ["rollout-0"])

    async def body() -> None:
        sync = WeightSync(actors, RunConfig())  # type: ignore[arg-type]
        await sync.connect()
        await sync.load(await published(sync, 1))
        if plans_alike:
            actors.relay_nodes = RelayNodes({"trainer-0": "x"}, {"x": agents["x"]}, addresses, ["rollout-0"])
        else:
            plans.append("another plan")
        await sync.connect()  # of new ranks
        assert sync.needs_republication is not plans_alike
        again = ("a", actors.handle("another"))
        actors.relay_nodes = RelayNodes(where, agents | {"a": again}, addresses, ["rollout-0"])
        if sync.needs_republication:
            await sync.load(await published(sync, 1))
        assert not sync.needs_republication
        await asyncio.wait_for(sync.catch_up([("rollout-0", actors.handle("rollout-0"))]), 5)

    asyncio.run(body())
    own = [said for said in actors.said if said.startswith(("another", "rollout"))]
    brought = ["another plan_chunks", "another begin_version", "another wait_for_version"]
    assert own == [*brought, *["another reclaim_versions"] * (not plans_alike), "rollout-0 load"]


def test_a_version_whose_source_is_gone_is_awaited_no_longer_nor_brought(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_sync_module, "PASSED_ON_S", 0.1)
    monkeypatch.setattr(weight_sync_module, "SOURCE_CHECK_S", 0.01)
    actors = NotingActors({"trainer": 1, "rollout": 1})
    where = {"trainer-0": "x", "rollout-0": "a", "rollout-1": "b"}
    agents = {node: (node, actors.handle(node)) for node in "xab"}
    addresses = {node: Address(node, 1) for node in "xab"}
    actors.relay_nodes = RelayNodes(where, agents, addresses, ["rollout-0"])
    newcomer = [("rollout-1", actors.handle("rollout-1"))]

    async def body() -> None:
        sync = WeightSync(actors, RunConfig())  # type: ignore[arg-type]
        await sync.connect()
        await sync.load(await published(sync, 1))
        assert not sync.needs_republication
        second = await published(sync, 2)
        agents["a"][1].answers["wait_for_version"] = never
        loading = asyncio.ensure_future(sync.load(second))
        await asyncio.sleep(0.05)
        without = {node: agent for node, agent in agents.items() if node != "x"}
        actors.relay_nodes = RelayNodes(where, without, addresses, ["rollout-0", "rollout-1"])
        assert sync.needs_republication
        with pytest.raises(WorkerDied, match="x: gone before the others had the weights"):
            await loading
        actors.calls.clear()
        coming = asyncio.ensure_future(sync.catch_up(newcomer))
        await asyncio.sleep(0.2)
        coming.cancel()
        assert actors.said == []

    asyncio.run(body())
