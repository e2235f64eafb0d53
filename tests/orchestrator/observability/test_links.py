"""Links are measured once the first step has begun, from each node to the next, and nobody depends on it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.conf.errors import ResourceError
from penstock.network.connection import Address
from penstock.orchestrator.cluster.node_agents import RelayNodes
from penstock.orchestrator.observability.link_speeds import Links
from tests.fakes.actors import FakeHandle, never
from tests.virtual_time import run_virtually

Events = list[tuple[str, dict[str, Any]]]


async def measured(*agents: FakeHandle) -> tuple[Events, list[str]]:
    """Events and notes of a run with these agents, each on a node of its own with two actors."""
    nodes = [str(number) for number in range(len(agents))]
    relays = RelayNodes(
        {f"{what}-{node}": node for what in ("Rollout", "Trainer-policy") for node in nodes},
        {node: (agent.name, agent) for node, agent in zip(nodes, agents, strict=True)},
        {node: Address(f"10.0.0.{node}", 1) for node in nodes},
    )
    events, notes = Events(), list[str]()
    directory = SimpleNamespace(event=lambda kind, **fields: events.append((kind, fields)))
    links = Links(SimpleNamespace(relay_nodes=relays), directory, SimpleNamespace(note=notes.append))  # type: ignore[arg-type]
    running = asyncio.ensure_future(links.run())
    await asyncio.sleep(60)
    assert not events, "not beside the start"
    links.begun.set()
    await running
    return events, notes


def test_each_node_measures_its_link_to_the_next() -> None:
    agents = [FakeHandle(None, f"Agent-{number}", measure_link=rate) for number, rate in enumerate((3e9, 2e9, 1e9))]
    events, notes = run_virtually(measured(*agents))
    assert events == [
        ("link", {"source": f"Agent-{one}", "target": f"Agent-{other}", "bytes_per_s": rate})
        for one, other, rate in ((0, 1, 3_000_000_000), (1, 2, 2_000_000_000), (2, 0, 1_000_000_000))
    ]
    assert agents[0].calls[0].arguments == (Address("10.0.0.1", 1),)
    assert notes == ["links between nodes: 1 to 3 GB/s"]


@pytest.mark.parametrize("failure", [ResourceError("no way"), never])
def test_a_link_that_cannot_be_measured_is_told_and_the_others_are(failure: Any) -> None:
    agents = FakeHandle(None, "Agent-0", measure_link=failure), FakeHandle(None, "Agent-1", measure_link=1e9)
    events, _ = run_virtually(measured(*agents))
    assert [kind for kind, _ in events] == ["link_not_measured", "link"]


def test_on_one_node_nothing_is_measured() -> None:
    agent = FakeHandle(None, "Agent-0", measure_link=1e9)
    assert run_virtually(measured(agent)) == ([], [])
    assert not agent.calls
