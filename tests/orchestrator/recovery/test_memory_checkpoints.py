"""Second copies of the trainer's state: made after each step, found and brought when ranks start elsewhere, given up
when they fail or cost too much."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import MemoryCheckpointError, WorkerDied
from penstock.network.connection import Address
from penstock.orchestrator.cluster.node_agents import StateNodes
from penstock.orchestrator.recovery.memory_checkpoints import FREE_S, MAX_FAILURES, MemoryCheckpoints
from tests.fakes.actors import FakeHandle


class Agent:
    """Agent of one node. `copies`: rank and step of each copy that it has. `is_full`: it has no room for more."""

    def __init__(self, node: str, nodes: "Mapping[str, FakeHandle]") -> None:
        self.node, self._nodes = node, nodes
        self.copies: set[tuple[int, int]] = set()
        self.is_full = False
        self.fetched = 0

    def stats(self) -> dict[str, float]:
        return {}

    def memory_checkpoints(self, trainer: str) -> dict[int, list[int]]:
        ranks = {rank for rank, _ in self.copies}
        return {rank: sorted(step for other, step in self.copies if other == rank) for rank in ranks}

    def fetch_states(self, trainer: str, copies: dict[int, int], source: Address) -> None:
        their = self._nodes[source.host]
        if self.is_full or their.is_dead or not set(copies.items()) <= their.actor.copies:
            raise MemoryCheckpointError(f"{self.node}: no room, or nothing there")
        self.copies |= set(copies.items())
        self.fetched += len(copies)

    def keep_only_states(self, trainer: str, ranks: list[int], up_to: int) -> None:
        self.copies = {(rank, step) for rank, step in self.copies if rank in ranks and step <= up_to}


class Bed:
    """Nodes by letters, and the node of each rank. Time is what a test says."""

    def __init__(self, nodes: str, ranks: str, share: float = 1.0) -> None:
        self.handles: dict[str, FakeHandle] = {}
        self.agents = {node: Agent(node, self.handles) for node in nodes}
        self.handles |= {node: FakeHandle(agent, f"Agent-{node}") for node, agent in self.agents.items()}
        self.node_of_rank = dict(enumerate(ranks))
        self.told: list[str] = []
        self.now = 0.0
        self.gone: set[str] = set()
        """Nodes that have left."""
        self.states = MemoryCheckpoints(self.look, share, 5.0, self.told.append, lambda: self.now)

    def look(self) -> StateNodes:
        there = [node for node in self.agents if node not in self.gone]
        handles = {node: (f"Agent-{node}", self.handles[node]) for node in there}
        return StateNodes(self.node_of_rank, handles, {node: Address(node, 1) for node in there})

    def step(self, step: int) -> None:
        """Ranks keep their copies, which are copied."""
        for rank, node in self.node_of_rank.items():
            self.agents[node].copies = {(r, s) for r, s in self.agents[node].copies if r != rank or s >= step - 1}
            self.agents[node].copies.add((rank, step))
        asyncio.run(self.states.copy(step))

    def lose(self, node: str) -> None:
        self.handles[node].kill()
        self.gone.add(node)


@given(st.integers(2, 5), st.data())
def test_whichever_node_is_lost_its_ranks_go_on_elsewhere(num_nodes: int, data: st.DataObject) -> None:
    nodes = "abcde"[:num_nodes]
    bed = Bed(nodes, data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=8)))
    for step in range(1, 4):
        bed.step(step)
    lost = data.draw(st.sampled_from(nodes))
    bed.lose(lost)
    living = [node for node in nodes if node != lost]
    bed.node_of_rank = {
        rank: node if node != lost else data.draw(st.sampled_from(living)) for rank, node in bed.node_of_rank.items()
    }
    assert asyncio.run(bed.states.are_available(3))
    asyncio.run(bed.states.bring(3))
    assert all((rank, 3) in bed.agents[node].copies for rank, node in bed.node_of_rank.items())
    bed.step(4)  # and the next one can be lost
    if len(living) > 1:
        bed.lose(living[0])
        assert asyncio.run(bed.states.are_available(4))


def test_copies_of_later_steps_go_with_those_that_nobody_needs() -> None:
    bed = Bed("abc", "ab")
    bed.step(1)
    bed.agents["a"].copies.add((0, 2))  # of a step that was not trained
    bed.agents["c"].copies |= {(1, 2), (0, 1)}  # the first of a partner before
    bed.lose("b")
    bed.node_of_rank[1] = "a"
    asyncio.run(bed.states.bring(1))
    assert bed.agents["a"].copies == {(0, 1), (1, 1)}
    assert bed.agents["c"].copies == {(0, 1), (1, 1)}


def test_a_step_whose_ranks_node_is_gone_before_it_was_copied_is_lost() -> None:
    bed = Bed("ab", "b")
    bed.step(1)
    bed.handles["b"].kill()
    with pytest.raises(WorkerDied, match="Agent-b has died"):
        bed.step(2)
    bed.gone.add("b")
    with pytest.raises(WorkerDied, match="rank 0 has left after step 2"):
        bed.step(2)
    assert asyncio.run(bed.states.are_available(1))
    assert not asyncio.run(bed.states.are_available(2))
    bed.node_of_rank[0] = "a"
    with pytest.raises(MemoryCheckpointError, match="no node has the copy of rank 0 after step 2"):
        asyncio.run(bed.states.bring(2))


def test_a_partner_that_is_gone_costs_one_copy_and_another_takes_its_place() -> None:
    bed = Bed("abc", "a")
    bed.handles["b"].kill()
    bed.step(1)
    bed.gone.add("b")
    bed.step(2)
    assert bed.agents["c"].copies == {(0, 2)}
    assert not bed.told


def test_copies_that_fail_again_and_again_are_given_up_and_told_once() -> None:
    bed = Bed("ab", "a")
    bed.agents["b"].is_full = True
    for step in range(1, MAX_FAILURES + 3):
        bed.step(step)
    (told,) = bed.told
    assert "b: no room" in told
    assert "return to the last checkpoint" in told


def test_copies_that_take_too_much_of_the_time_are_given_up() -> None:
    bed = Bed("ab", "a", share=0.1)
    fetch = bed.agents["b"].fetch_states

    def slow(*arguments: Any) -> None:
        bed.now += FREE_S / 4
        fetch(*arguments)

    bed.handles["b"].answers["fetch_states"] = slow
    for step in range(1, 10):
        bed.now += FREE_S / 4
        bed.step(step)
    assert bed.agents["b"].fetched == 7  # the first takes room as well; 6 of the others are 15 s of 30 s
    assert bed.told[0].startswith("No more copies of the trainer's state are made on second nodes. They took 50%")


@pytest.mark.parametrize(("nodes", "share"), [("a", 1.0), ("ab", 0.0)])
def test_where_there_is_no_partner_or_none_is_wanted_nothing_is_copied(nodes: str, share: float) -> None:
    bed = Bed(nodes, "a", share)
    bed.step(1)
    assert asyncio.run(bed.states.copy(1)) == 0.0
    assert all(agent.fetched == 0 for agent in bed.agents.values())
