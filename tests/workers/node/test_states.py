"""In-memory checkpoints on a second node: whole, verified, and the one before stays until the next is."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import MemoryCheckpointError
from penstock.network.connection import new_token
from penstock.workers.node.node_agent import NodeAgent
from penstock.workers.node.node_transfers import partners
from penstock.workers.trainer.memory_slots import SLOTS, Block, Header, PieceInfo, Slots, reserve_slots

HOST, TRAINER = "127.0.0.1", "policy"
NUM_BYTES, BLOCK = 3_000_000, 1_000_000
Agents = tuple[NodeAgent, NodeAgent]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    token = new_token()
    both = tuple(NodeAgent(tmp_path / f"penstock-{name}", name, HOST, token) for name in ("a", "b"))
    yield both
    for agent in both:
        agent.close()
        assert not agent.root.exists()


def slots_of(agent: NodeAgent, rank: int = 0) -> Slots:
    return Slots(agent.root / "states" / TRAINER, rank)


def contents(step: int, rank: int) -> bytes:
    return np.random.default_rng([step, rank]).bytes(NUM_BYTES)


def keep(agent: NodeAgent, step: int, rank: int = 0, lineage: str = "a", leave_bytes: int = 0) -> None:
    """Keep a state as the rank does, on its own node."""
    slots, data = slots_of(agent, rank), contents(step, rank)
    assert reserve_slots(slots, NUM_BYTES, 0) is None
    slot = slots.begin(step)
    with slots.data(slot).open("r+b") as file:
        file.write(data)
    blocks = tuple(
        Block(BLOCK, xxhash.xxh3_128_hexdigest(data[start : start + BLOCK])) for start in range(0, NUM_BYTES, BLOCK)
    )
    part = PieceInfo("policy/weights/w", "uint8", (NUM_BYTES,), 0, (NUM_BYTES,))
    slots.seal(slot, Header(step, rank, 2, lineage, NUM_BYTES, leave_bytes, (part,), blocks, "{}"))


def held(agent: NodeAgent, rank: int = 0) -> dict[int, bytes]:
    """Bytes by step."""
    slots = slots_of(agent, rank)
    return {step: slots.data(slot).read_bytes() for step, (slot, _) in slots.copies().items()}


def fetch(agent: NodeAgent, copies: dict[int, int], source: NodeAgent) -> None:
    agent.states.fetch(TRAINER, copies, source.facts.address)


@pytest.mark.real
def test_a_partner_brings_copies_of_several_ranks_to_the_same_place(agents: Agents) -> None:
    has, partner = agents
    for rank in range(6):
        keep(has, 4, rank)
        keep(has, 5, rank)
    fetch(partner, dict.fromkeys(range(6), 5), has)
    for rank in range(6):
        assert held(partner, rank) == {5: contents(5, rank)}
        assert slots_of(partner, rank).copies()[5][1] == slots_of(has, rank).copies()[5][1]
    assert partner.states.there(TRAINER) == {rank: [5] for rank in range(6)}
    assert has.states.there(TRAINER) == {rank: [4, 5] for rank in range(6)}
    assert partner.stats()["node/states/received_bytes"] == 6 * NUM_BYTES


@pytest.mark.real
def test_two_slots_take_turns_there_too(agents: Agents) -> None:
    has, partner = agents
    inodes = set()
    for step in range(1, 6):
        keep(has, step)
        fetch(partner, {0: step}, has)
        assert held(partner) == {number: contents(number, 0) for number in (step - 1, step) if number}
        inodes |= {slots_of(partner).data(slot).stat().st_ino for slot in SLOTS}
    assert len(inodes) == 2


@pytest.mark.real
def test_what_is_there_already_stays_as_it_is(agents: Agents) -> None:
    has, partner = agents
    keep(has, 1)
    fetch(partner, {0: 1}, has)
    slots_of(partner).data(0).write_bytes(b"x" * NUM_BYTES)
    fetch(partner, {0: 1}, has)
    assert held(partner)[1][:1] == b"x"
    keep(has, 1, lineage="made again")
    fetch(partner, {0: 1}, has)
    assert held(partner) == {1: contents(1, 0)}


@pytest.mark.real
def test_a_step_that_is_not_there_is_named_and_changes_nothing(agents: Agents) -> None:
    has, partner = agents
    keep(has, 1)
    fetch(partner, {0: 1}, has)
    with pytest.raises(
        MemoryCheckpointError, match=r"rank 0 after step 2 could not be fetched .* those of steps \[1\]"
    ):
        fetch(partner, {0: 2}, has)
    assert held(partner) == {1: contents(1, 0)}


@pytest.mark.real
def test_a_copy_that_arrives_damaged_is_none_and_the_one_before_stays(agents: Agents) -> None:
    """The rank may have written over the copy while it was sent."""
    has, partner = agents
    for step in (1, 2):
        keep(has, step)
    fetch(partner, {0: 1}, has)
    with slots_of(has).data(1).open("r+b") as file:
        file.seek(NUM_BYTES - 1)
        file.write(bytes([contents(2, 0)[-1] ^ 1]))
    with pytest.raises(MemoryCheckpointError, match="arrived damaged, or was written over"):
        fetch(partner, {0: 2}, has)
    assert held(partner) == {1: contents(1, 0)}
    keep(has, 3)
    fetch(partner, {0: 3}, has)
    assert held(partner) == {number: contents(number, 0) for number in (1, 3)}


@pytest.mark.real
def test_of_several_ranks_those_that_can_be_brought_are(agents: Agents) -> None:
    has, partner = agents
    for rank in (0, 2):
        keep(has, 1, rank)
    with pytest.raises(MemoryCheckpointError, match="rank 1 after step 1"):
        fetch(partner, {0: 1, 1: 1, 2: 1}, has)
    assert partner.states.there(TRAINER) == {0: [1], 2: [1]}


@pytest.mark.real
def test_a_rank_that_goes_on_meanwhile_is_fetched_whole_or_not_at_all(agents: Agents) -> None:
    has, partner = agents
    keep(has, 1)
    stop = threading.Event()

    def go_on() -> None:
        step = 1
        while not stop.is_set():
            step += 1
            keep(has, step)

    writer = threading.Thread(target=go_on)
    writer.start()
    fetched, failed = 0, 0
    while fetched < 5:
        step = max(has.states.there(TRAINER).get(0, [0]))
        try:
            fetch(partner, {0: step}, has)
            fetched += 1
        except MemoryCheckpointError:
            failed += 1
        for number, data in held(partner).items():
            assert data == contents(number, 0)
    stop.set()
    writer.join()


@pytest.mark.real
def test_a_source_that_is_gone_is_named(agents: Agents) -> None:
    has, partner = agents
    keep(has, 1)
    address = has.facts.address
    has.close()
    with pytest.raises(MemoryCheckpointError, match=f"could not be fetched from {address}"):
        partner.states.fetch(TRAINER, {0: 1}, address)


@pytest.mark.real
def test_room_that_publications_need_is_left_to_them(agents: Agents) -> None:
    has, partner = agents
    keep(has, 1, leave_bytes=2**60)
    with pytest.raises(MemoryCheckpointError, match=r"no room in .* two copies of 3,000,000 bytes are needed"):
        fetch(partner, {0: 1}, has)
    assert not slots_of(partner).directory.exists()


@pytest.mark.real
def test_after_a_loss_copies_of_other_ranks_and_of_lost_steps_go(agents: Agents) -> None:
    has, partner = agents
    for rank in (0, 1):
        for step in (1, 2):
            keep(has, step, rank)
            fetch(partner, {rank: step}, has)
    partner.states.keep_only(TRAINER, [1], up_to=1)
    assert partner.states.there(TRAINER) == {1: [1]}
    assert not slots_of(partner, 0).directory.exists()
    fetch(partner, {0: 2}, has)
    assert held(partner) == {2: contents(2, 0)}


@pytest.mark.real
@pytest.mark.parametrize("name", ["", ".", "..", "../weights", "a/b"])
def test_a_trainers_name_is_no_path(agents: Agents, name: str) -> None:
    with pytest.raises(MemoryCheckpointError, match="is no name of a file"):
        agents[0].states.there(name)
    with pytest.raises(MemoryCheckpointError):
        agents[0].states.fetch(name, {0: 1}, agents[1].facts.address)


@pytest.mark.real
def test_agents_of_one_machine_see_each_others_copies(tmp_path: Path) -> None:
    token = new_token()
    first, second = (NodeAgent(tmp_path / "penstock-run", name, HOST, token) for name in ("a", "b"))
    keep(first, 1)
    fetch(second, {0: 1}, first)
    assert held(second) == {1: contents(1, 0)}
    assert second.stats()["node/states/received_bytes"] == 0
    second.close()
    first.close()


@pytest.mark.real
def test_trainers_have_folders_of_their_own(agents: Agents) -> None:
    keep(agents[0], 1)
    assert agents[0].states.there("another") == {}


def test_the_next_node_is_the_partner_and_the_lasts_is_the_first() -> None:
    assert partners(["a", "b", "c"], {0: "a", 1: "a", 2: "b", 3: "c"}) == {0: "b", 1: "b", 2: "c", 3: "a"}


def test_a_node_alone_has_no_partner() -> None:
    assert partners(["a"], {0: "a", 1: "a"}) == {}


@given(st.integers(2, 9), st.lists(st.integers(0, 8), max_size=20))
def test_whichever_node_is_lost_every_ranks_state_is_on_another(num_nodes: int, places: list[int]) -> None:
    nodes = [f"node-{number}" for number in range(num_nodes)]
    node_of_rank = {rank: nodes[place % num_nodes] for rank, place in enumerate(places)}
    found = partners(nodes, node_of_rank)
    assert found.keys() == node_of_rank.keys()
    assert all(found[rank] != node for rank, node in node_of_rank.items())
    assert found == partners(nodes, node_of_rank)
