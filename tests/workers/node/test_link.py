"""A link is measured by a bounded amount, over the connections that carry everything else."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.conf.errors import ResourceError
from penstock.network.connection import Address, new_token
from penstock.workers.node import node_agent
from penstock.workers.node.node_agent import NodeAgent

HOST = "127.0.0.1"


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[list[NodeAgent]]:
    token = new_token()
    both = [NodeAgent(tmp_path / f"penstock-{name}", name, HOST, token) for name in ("a", "b")]
    yield both
    for agent in both:
        agent.close()


@pytest.mark.real
def test_what_is_sent_is_bounded_and_all_of_it_arrives(
    agents: list[NodeAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    real = node_agent.send_until_enough
    monkeypatch.setattr(node_agent, "send_until_enough", lambda lane: sent.append(count := real(lane)) or count)
    assert agents[0].measure_link(agents[1].facts.address) > 1e6
    assert len(sent) == node_agent.LANES
    assert all(0 < count <= node_agent.MOST_LINK_BYTES and not count % node_agent.FRAME_BYTES for count in sent)


@pytest.mark.real
def test_a_node_that_cannot_be_reached_is_named(agents: list[NodeAgent]) -> None:
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        nobody = Address(HOST, unused.getsockname()[1])
        with pytest.raises(ResourceError, match=rf"the link to {nobody} could not be measured"):
            agents[0].measure_link(nobody)


@pytest.mark.real
def test_another_run_is_not_answered(agents: list[NodeAgent], tmp_path: Path) -> None:
    other = NodeAgent(tmp_path / "penstock-c", "c", HOST, new_token())
    try:
        with pytest.raises(ResourceError):
            other.measure_link(agents[0].facts.address)
    finally:
        other.close()


def test_who_sends_what_was_not_agreed_is_left_alone() -> None:
    here, there = socket.socketpair()
    thread = threading.Thread(target=node_agent.serve_link, args=(there,))
    thread.start()
    with node_agent.Connection(here) as connection:
        connection.send(node_agent.BYTES, num_bytes=node_agent.FRAME_BYTES + 1)
        assert connection.receive().kind == node_agent.END
    thread.join(60)
    assert not thread.is_alive()
