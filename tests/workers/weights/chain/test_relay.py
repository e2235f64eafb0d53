"""Versions that go from ranks' nodes to engines' nodes by real connections, in one process."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from penstock.conf.errors import DeadlineExceeded, NotStarted, WeightError
from penstock.network.connection import Connection, connect
from penstock.network.listener import Listener
from penstock.workers.protocols import Publication
from penstock.workers.weights.chain import plan as plans
from penstock.workers.weights.chain import subscription
from penstock.workers.weights.chain.plan import Broadcast, Timeouts
from penstock.workers.weights.chain.relay import HELLO, Relay, Reporter
from penstock.workers.weights.publication.publication import PublicationWriter
from penstock.workers.weights.publication.publication_files import MappedWeights, publication_directories
from tests.publications import newest_publication, write_publication
from tests.tmpfs import run_in_tmpfs
from tests.workers.weights.chain.relays import CHUNK_BYTES, SERVICE, TOKEN, Cluster, plan_of, values_of


@pytest.mark.real
@pytest.mark.parametrize(("nodes", "receivers"), [
    (["x"], ["a"]),
    (["x", "x"], ["a", "b", "c"]),
    (["x", "y"], ["a", "b", "c"]),
    (["x", "y"], ["x", "a"]),
    (["x", "y"], ["x", "y"]),
])  # fmt: skip
def test_every_receiver_gets_every_version_bit_for_bit(tmp_path: Path, nodes: list[str], receivers: list[str]) -> None:
    with Cluster(tmp_path, plan_of(nodes), receivers) as cluster:
        for version in range(1, 5):
            cluster.begin(version)
            cluster.write(version)
            cluster.check(version)
        assert sum(relay.stats()["reparented"] for relay in cluster.relays.values()) == 0


@pytest.mark.real
@pytest.mark.parametrize("nodes", [["x"], ["x", "y"]])
def test_large_data_comes_over_several_lanes_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[str]
) -> None:
    monkeypatch.setattr(plans, "LANE_BYTES", 1)
    made = plan_of(nodes)
    payload = sum(end - start for start, end in made.spans)
    with Cluster(tmp_path, made, ["a", "b", "c"], lanes=4) as cluster:
        for version in range(1, 4):
            cluster.begin(version)
            pulling = [thread.name for thread in threading.enumerate() if thread.name.startswith("pull-")]
            cluster.write(version)
            cluster.check(version)
            lanes = range(4 // len(nodes))
            assert {f"pull-{source}-{number}" for source in nodes for number in lanes} == set(pulling)
        assert all(cluster.relays[node].stats()["bytes_in"] == 3 * payload for node in "abc")


def test_a_relay_that_is_killed_is_passed_by_on_every_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "LANE_BYTES", 1)
    with Cluster(tmp_path, plan_of(["x", "y"]), ["a", "b", "c"], lanes=4) as cluster:
        cluster.begin(1)
        cluster.write(1, ranks=[0])
        cluster.kill("b")
        cluster.write(1, ranks=[1])
        cluster.check(1, ["a", "c"])


def test_a_node_receives_and_sends_the_payload_once(tmp_path: Path) -> None:
    plan = plan_of(["x", "y"])
    payload = sum(end - start for start, end in plan.spans)
    with Cluster(tmp_path, plan, ["a", "b"]) as cluster:
        cluster.begin(1)
        cluster.write(1)
        cluster.check(1)
        assert all(cluster.relays[node].stats()["bytes_in"] == payload for node in "ab")
        assert sum(relay.stats()["bytes_out"] for relay in cluster.relays.values()) == 2 * payload


def test_chunks_go_on_while_another_rank_has_not_begun(tmp_path: Path) -> None:
    with Cluster(tmp_path, plan_of(["x", "y"]), ["a", "b"]) as cluster:
        cluster.begin(1)
        cluster.write(1, ranks=[0])
        deadline = time.monotonic() + 300
        while min(cluster.relays[node].stats()["chunks"] for node in "ab") < len(cluster.plan.chunks_from_node("x")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert newest_publication(tmp_path / "a") is None
        cluster.write(1, ranks=[1])
        cluster.check(1)


def test_two_files_take_turns_where_a_node_receives_and_where_ranks_write(tmp_path: Path) -> None:
    with Cluster(tmp_path, plan_of(["x"]), ["a"]) as cluster:
        inodes: dict[str, set[int]] = {"x": set(), "a": set()}
        for version in range(1, 6):
            cluster.begin(version)
            cluster.write(version)
            cluster.check(version)
            for node, seen in inodes.items():
                seen.add((publication_directories(tmp_path / node)[-1] / "model.safetensors").stat().st_ino)
        assert {node: len(seen) for node, seen in inodes.items()} == {"x": 2, "a": 2}


def test_a_node_reserves_what_its_ranks_write(tmp_path: Path) -> None:
    plan = plan_of(["x", "y"])
    with Cluster(tmp_path, plan, ["a"]) as cluster:
        cluster.begin(1)
        cluster.write(1)
        cluster.check(1)
        blocks = {
            node: 512 * (publication_directories(tmp_path / node)[-1] / "model.safetensors").stat().st_blocks
            for node in "xya"
        }
        assert blocks["x"] < 0.8 * blocks["a"]
        assert blocks["y"] < 0.8 * blocks["a"]


def test_a_relay_that_is_killed_is_passed_by(tmp_path: Path) -> None:
    with Cluster(tmp_path, plan_of(["x", "y"]), ["a", "b", "c"]) as cluster:
        cluster.begin(1)
        cluster.write(1, ranks=[0])
        cluster.kill("b")
        cluster.write(1, ranks=[1])
        cluster.check(1, ["a", "c"])


def test_a_relay_that_stands_still_is_passed_by(tmp_path: Path) -> None:
    timeouts = Timeouts(floor_s=0.1, first_s=0.2)
    with Cluster(tmp_path, plan_of(["x"]), ["a", "b", "c"], timeouts) as cluster:
        listening = Silent(cluster)
        cluster.addresses["b"] = listening.address
        del cluster.relays["b"]
        cluster.begin(1)
        cluster.write(1)
        cluster.check(1, ["a", "c"])
        assert cluster.relays["c"].stats()["reparented"] >= 1 or cluster.relays["a"].stats()["reparented"] >= 1
        listening.close()


class Silent:
    """Lets everybody in and never says a word."""

    def __init__(self, cluster: Cluster) -> None:
        self._over = threading.Event()
        self._listener = Listener("127.0.0.1", TOKEN, {SERVICE: lambda connected: self._over.wait() and None})
        self.address = self._listener.address

    def close(self) -> None:
        self._over.set()
        self._listener.close()


def test_a_newer_version_ends_an_older_one_that_is_under_way(tmp_path: Path) -> None:
    with Cluster(tmp_path, plan_of(["x", "y"]), ["a"]) as cluster:
        cluster.begin(1)
        cluster.write(1, ranks=[0])
        with ThreadPoolExecutor() as threads:
            waits = threads.submit(cluster.relays["a"].wait, 1, 20)
            time.sleep(0.1)
            cluster.begin(2)
            with pytest.raises(WeightError, match="given up for a newer one"):
                waits.result(5)
        cluster.write(2)
        cluster.check(2)


def test_a_late_node_gets_the_newest_version(tmp_path: Path) -> None:
    with Cluster(tmp_path, plan_of(["x", "y"]), ["a", "b"]) as cluster:
        for version in (1, 2):
            cluster.begin(version)
            cluster.write(version)
            cluster.check(version)
        cluster.start("c")
        receivers = ["a", "b", "c"]
        cluster.relays["c"].begin(Broadcast(cluster.number, 2, receivers, cluster.addresses))
        cluster.check(2, ["c"])


def test_a_rank_that_dies_while_it_writes_fails_the_version_on_all_nodes(tmp_path: Path) -> None:
    with Cluster(tmp_path, plan_of(["x", "y"]), ["a", "b"]) as cluster:
        cluster.begin(1)
        cluster.write(1, ranks=[0])
        with Reporter(tmp_path / "y", cluster.plan, 1, 1):
            pass
        for node in "ab":
            with pytest.raises(WeightError, match="rank 1 has left before it had written its part"):
                cluster.relays[node].wait(1, 20)


def test_a_version_sent_again_after_it_failed_arrives(tmp_path: Path) -> None:
    with Cluster(tmp_path, plan_of(["x", "y"]), ["a", "b"]) as cluster:
        cluster.begin(1)
        with Reporter(tmp_path / "y", cluster.plan, 1, 1):
            pass
        with pytest.raises(WeightError):
            cluster.relays["a"].wait(1, 20)
        cluster.begin(1)
        cluster.write(1)
        cluster.check(1)


def test_what_did_not_come_in_time_is_named(tmp_path: Path) -> None:
    with Cluster(tmp_path, plan_of(["x", "y"]), ["a"]) as cluster:
        cluster.begin(1)
        cluster.write(1, ranks=[0])
        num_chunks = len(cluster.plan.chunks_from_node("y"))
        with pytest.raises(DeadlineExceeded, match=f"{num_chunks} chunks from y, last asked of y"):
            cluster.relays["a"].wait(1, 0.5)


def test_a_flipped_byte_is_counted_and_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flips = [3, 5]
    sent = [0]
    whole = Connection.send_file

    def flip(self: Connection, file: object, offset: int, num_bytes: int) -> None:
        sent[0] += 1
        if sent[0] not in flips:
            whole(self, file, offset, num_bytes)  # type: ignore[arg-type]
            return
        data = bytearray(os.pread(file.fileno(), num_bytes, offset))  # type: ignore[attr-defined]
        data[num_bytes // 2] ^= 1
        self.send_bytes(data)

    monkeypatch.setattr(Connection, "send_file", flip)
    monkeypatch.setattr("penstock.workers.weights.chain.subscription.SMALL_BYTES", 0)
    with Cluster(tmp_path, plan_of(["x"]), ["a", "b"]) as cluster:
        cluster.begin(1)
        cluster.write(1)
        cluster.check(1)
        assert sum(relay.stats()["damaged"] for relay in cluster.relays.values()) == len(flips)


def test_chunks_that_came_before_the_connection_broke_in_a_parcel_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link breaks within the last chunk of the first parcel, and of the first parcel of the next version."""
    broken: set[int] = set()
    send_bytes, send_file = Connection.send_bytes, Connection.send_file

    def is_due(num_bytes: int) -> bool:
        """Parcels are of several chunks, or of one where the relay keeps pace with the rank."""
        is_first = cluster.number not in broken and num_bytes >= CHUNK_BYTES
        broken.update([cluster.number] if is_first else [])
        return is_first

    def hang_up(connection: Connection) -> NoReturn:
        connection.hang_up()
        raise ConnectionResetError

    def some_bytes(self: Connection, data: Any) -> None:
        view = memoryview(data).cast("B")
        breaks = is_due(len(view))
        send_bytes(self, view[:-1] if breaks else view)
        if breaks:
            hang_up(self)

    def some_of_file(self: Connection, file: Any, start: int, num_bytes: int) -> None:
        breaks = is_due(num_bytes)
        send_file(self, file, start, num_bytes - breaks)
        if breaks:
            hang_up(self)

    monkeypatch.setattr(Connection, "send_bytes", some_bytes)
    monkeypatch.setattr(Connection, "send_file", some_of_file)
    with Cluster(tmp_path, plan_of(["x"]), ["a"]) as cluster:
        for version in (1, 2):
            cluster.begin(version)
            cluster.write(version)
            cluster.check(version)
        assert broken == {1, 2}


FILL = """
import sys
from pathlib import Path
from penstock.conf.errors import WeightError
from penstock.network.connection import Address
from penstock.workers.weights.chain.plan import make_plan
from penstock.workers.weights.chain.relay import Relay
from penstock.workers.weights.chain.plan import Broadcast
from penstock.workers.weights.publication.layout import compute_layout

layout = compute_layout([("w", (3, 2**20), "float32")])
plan = make_plan(layout, [[("w", 0, 3 * 2**20)]], ["x"])
for node in ("x", "a"):
    relay = Relay(Path(sys.argv[1]) / node, node, bytes(32), 1)
    relay.plan(plan)
    try:
        relay.begin(Broadcast(1, 1, ["a"], {"x": Address("127.0.0.1", 1)}))
    except WeightError as error:
        print(error)
    relay.close()
"""


@pytest.mark.real
def test_no_room_on_one_node_is_told_when_the_version_begins(tmp_path: Path) -> None:
    told = run_in_tmpfs(FILL, tmp_path, "test_reused_files.py")
    assert told.count("no room for a publication") == 2
    assert f"{tmp_path}/a" in told


def test_a_version_begins_neither_before_its_chunks_are_known_nor_after_a_newer(tmp_path: Path) -> None:
    with Cluster(tmp_path, plan_of(["x"]), ["a"]) as cluster:
        relay = Relay(tmp_path / "b", "b", TOKEN, SERVICE)
        with pytest.raises(NotStarted, match="`plan` first"):
            relay.begin(Broadcast(1, 1, ["a"], cluster.addresses))
        relay.close()
        cluster.begin(1)
        with pytest.raises(WeightError, match="comes after"):
            cluster.relays["a"].begin(Broadcast(1, 1, ["a"], cluster.addresses))


def test_another_plan_of_chunks_is_refused(tmp_path: Path) -> None:
    with Cluster(tmp_path, plan_of(["x"]), ["a"]) as cluster:
        cluster.relays["a"].plan(plan_of(["x"], chunk_bytes=8 * 1024))
        cluster.begin(1)
        cluster.write(1)
        with pytest.raises(WeightError, match="has another plan of chunks"):
            cluster.relays["a"].wait(1, 20)


def test_rubbish_from_a_process_of_the_run_ends_its_own_connection_alone(tmp_path: Path) -> None:
    with Cluster(tmp_path, plan_of(["x"]), ["a"]) as cluster:
        cluster.begin(1)
        with connect(cluster.addresses["x"], SERVICE, TOKEN, 5) as connection:
            connection.send(subscription.KIND, b"rubbish")
            with pytest.raises(ConnectionError):
                connection.receive()
        cluster.write(1)
        cluster.check(1)


def test_a_piece_that_is_not_in_the_plan_is_refused(tmp_path: Path) -> None:
    with Cluster(tmp_path, plan_of(["x"]), ["a"]) as cluster:
        cluster.begin(1)
        with Reporter(tmp_path / "x", cluster.plan, 1, 0) as reporter:
            writer = PublicationWriter(tmp_path / "x", 1, cluster.plan.layout, outlet=reporter.outlet)
            with pytest.raises(WeightError, match="'norm' from 3 are not in the plan"):
                writer.write_elements("norm", 3, values_of(1)["norm"][3:])


def test_a_rank_without_a_relay_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="relay takes no reports"):
        Reporter(tmp_path, plan_of(["x"]), 1, 0)
    assert HELLO.size == 28


def test_the_last_threads_end_with_the_relays(tmp_path: Path) -> None:
    before = threading.active_count()
    with Cluster(tmp_path, plan_of(["x", "y"]), ["a", "b", "c"]) as cluster:
        cluster.begin(1)
        cluster.write(1, ranks=[0])
    deadline = time.monotonic() + 300
    while threading.active_count() > before:
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


def test_a_version_that_is_kept_stays_beside_the_two_that_take_turns(tmp_path: Path) -> None:
    relay = Relay(tmp_path, "a", TOKEN, SERVICE)

    def publish(version: int) -> Publication:
        made = write_publication(tmp_path, version, [("w", torch.full((1000,), float(version)))])
        relay.reclaim()
        return made

    try:
        first = publish(1)
        assert relay.keep(1)
        for version in range(2, 6):
            publish(version)
            assert relay.keep(1)
        assert [path.name for path in publication_directories(tmp_path)] == ["v00000001", "v00000004", "v00000005"]
        mapped = MappedWeights(first)
        mapped.verify()
        assert torch.all(mapped.tensor("w") == 1)
        assert not relay.keep(3)  # it is gone
        assert not relay.keep(None)
        del mapped
        publish(6)
        assert [path.name for path in publication_directories(tmp_path)] == ["v00000005", "v00000006"]
    finally:
        relay.close()
