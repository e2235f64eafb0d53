"""The agent owns the run's directory of its node, however it ends."""

import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace

from penstock.conf.errors import ResourceError, SandboxUnavailable, StoreError
from penstock.network.connection import Address, new_token
from penstock.store.data.block_index import Payload, assemble
from penstock.store.data.codec import ColumnNote, SegmentRef
from penstock.store.data.remote_rows import NodeOrders, RemoteReader, RowsNode, RowsNodes, SpillOrder
from penstock.store.data.roots import OWNER_NAME
from penstock.store.data.segment_files import Arena
from penstock.workers.node.node_agent import NODE, ROWS, STACKS, STATES, WEIGHTS, NodeAgent
from penstock.workers.sandbox.execution import Limits

HOST = "127.0.0.1"
AGENT = """
import sys, time
from penstock.workers.node.node_agent import NodeAgent
agent = NodeAgent(sys.argv[1], "here", "127.0.0.1", bytes(32))
print("there", flush=True)
time.sleep(600)
"""


@pytest.mark.real
def test_it_makes_the_root_and_removes_it(tmp_path: Path) -> None:
    agent = NodeAgent(tmp_path / "penstock-run", "here", HOST, new_token())
    try:
        assert sorted(path.name for path in agent.root.iterdir()) == [
            NODE, OWNER_NAME, ROWS, STACKS, STATES, WEIGHTS,
        ]  # fmt: skip
        assert agent.root.stat().st_mode & 0o777 == 0o700
        assert (agent.facts.address.host, agent.facts.cores) == (HOST, len(os.sched_getaffinity(0)))
    finally:
        agent.close()
    agent.close()
    assert not agent.root.exists()


@pytest.mark.real
def test_a_fence_that_does_not_hold_on_its_node_is_told_with_the_nodes_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> Path:
        raise SandboxUnavailable("there is no bwrap")

    agent = NodeAgent(tmp_path / "penstock-run", "here", HOST, new_token())
    try:
        assert agent.try_fences([Limits()]).startswith("tried from inside, and no hole found; ")
        monkeypatch.setattr("penstock.workers.sandbox.fence.find_bwrap", none)
        with pytest.raises(SandboxUnavailable, match=f"^{re.escape(platform.node())}: there is no bwrap"):
            agent.try_fences([Limits()])
    finally:
        agent.close()


@pytest.mark.real
def test_the_root_goes_when_the_agent_is_killed(tmp_path: Path) -> None:
    root = tmp_path / "penstock-killed"
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(root)], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    assert agent.stdout.readline() == "there\n"
    (root / WEIGHTS / "large").write_bytes(bytes(1000))
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    agent.stdout.close()
    deadline = time.monotonic() + 300
    while root.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not root.exists()


@pytest.mark.real
def test_an_agent_that_hangs_is_ended_by_the_next_one_of_its_node_alone(tmp_path: Path) -> None:
    root = tmp_path / "penstock-hangs"
    with subprocess.Popen([sys.executable, "-c", AGENT, str(root)], stdout=subprocess.PIPE, text=True) as hangs:
        assert hangs.stdout is not None
        assert hangs.stdout.readline() == "there\n"
        hangs.send_signal(signal.SIGSTOP)
        (root / WEIGHTS / "large").write_bytes(bytes(1000))
        beside = NodeAgent(root, "another node of this machine", HOST, new_token())
        assert not beside.facts.owns_root
        assert hangs.poll() is None
        beside.close()
        agent = NodeAgent(root, (root / NODE).read_text(), HOST, new_token())
        assert hangs.wait() == -signal.SIGKILL
        assert agent.facts.owns_root
        assert not (root / WEIGHTS / "large").exists()
        time.sleep(0.5)  # the guard of the one before, too, has seen its end
        assert (root / WEIGHTS).is_dir()
        agent.close()


@pytest.mark.real
def test_the_next_agent_sweeps_what_an_earlier_run_left(tmp_path: Path) -> None:
    """Everything was killed at once, the guard among it."""
    stale = tmp_path / "penstock-stale"
    claim = "import sys; from penstock.store.data.roots import claim_root; claim_root(sys.argv[1])"
    subprocess.run([sys.executable, "-c", claim, str(stale)], check=True)
    agent = NodeAgent(tmp_path / "penstock-new", "here", HOST, new_token())
    agent.close()
    assert not stale.exists()


@pytest.mark.real
def test_two_nodes_of_one_machine_share_the_root(tmp_path: Path) -> None:
    first = NodeAgent(tmp_path / "penstock-run", "here", HOST, new_token())
    second = NodeAgent(tmp_path / "penstock-run", "there", HOST, new_token())
    assert (first.facts.owns_root, second.facts.owns_root) == (True, False)
    assert first.facts.memory == second.facts.memory
    second.close()
    assert first.root.exists()
    first.close()
    assert not first.root.exists()


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="/dev/shm is mounted"):
        NodeAgent(tmp_path / "file" / "penstock-run", "here", HOST, new_token())


@pytest.mark.real
def test_no_free_port_is_named(tmp_path: Path) -> None:
    agent = NodeAgent(tmp_path / "penstock-a", "here", HOST, new_token())
    port = agent.facts.address.port
    with pytest.raises(ResourceError, match=r"cluster\.ports"):
        NodeAgent(tmp_path / "penstock-b", "here", HOST, new_token(), range(port, port + 1))
    assert not (tmp_path / "penstock-b").exists()
    agent.close()


@pytest.mark.real
def test_it_serves_the_rows_of_its_node_and_nothing_outside_of_them(tmp_path: Path) -> None:
    token, disk = new_token(), tmp_path / "disk"
    agent = NodeAgent(tmp_path / "penstock-run", "here", HOST, token, spill_dir=str(disk))
    batch = pa.record_batch({"x": pa.array(range(1000), pa.int64())})
    try:
        placed = Arena([str(agent.root / ROWS)], "writer", "here").place(batch)
        (agent.root / "secret").write_bytes(bytes(9000))
        pulls = RemoteReader({"here": agent.facts.address}, token)
        there = Payload(np.arange(5), np.arange(5), [placed], [(["x"], np.array([[0, 10, 1, 5]]))])
        assert assemble(pulls.fetch_blocking(there), ["x"]).values("x").tolist() == list(range(10, 15))
        for lie in (replace(placed, segment="../secret"), replace(placed, nbytes=10**6, columns=outside(placed))):
            there.sources = [lie]
            with pytest.raises(StoreError):
                pulls.fetch_blocking(there)
        orders = NodeOrders(RowsNodes({"ray": RowsNode("here", agent.facts.rows, agent.facts.address)}, token))
        orders.give("here", SpillOrder(placed.segment))
        spilled = Path(agent.facts.rows[1]) / placed.segment
        while not spilled.exists():
            time.sleep(0.01)
        there.sources = [placed]
        assert assemble(pulls.fetch_blocking(there), ["x"]).values("x").tolist() == list(range(10, 15))
        pulls.close()
        orders.close()
    finally:
        agent.close()
    assert list(disk.iterdir()) == []


def test_a_node_that_counts_as_lost_is_told_nothing_more() -> None:
    """Though nobody answers there, what waits to be told is over at once."""
    with socket.create_server((HOST, 0)) as silent:
        address = Address(HOST, silent.getsockname()[1])
        orders = NodeOrders(RowsNodes({"ray": RowsNode("here", ("", ""), address)}, new_token()))
        silent.close()
        orders.give("here", SpillOrder("writer-0"))
        time.sleep(0.1)
        assert orders.lost == 0
        orders.node_lost("here")
        orders.give("here", SpillOrder("writer-1"))
        give_up = time.monotonic() + 300
        while orders.lost < 2 and time.monotonic() < give_up:
            time.sleep(0.01)
        assert orders.lost == 2
        orders.close()


def outside(placed: SegmentRef) -> tuple[ColumnNote, ...]:
    return tuple((name, kind, tuple((10**6, length) for _, length in spans)) for name, kind, spans in placed.columns)
