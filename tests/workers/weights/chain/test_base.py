"""Versions that go from node to node as their differences to the version before."""

from pathlib import Path

import pytest
import torch

from penstock.workers.weights.chain import subscription
from penstock.workers.weights.chain.plan import Broadcast, ChunkTimes
from penstock.workers.weights.chain.transfer import Differences
from tests.workers.weights.chain.relays import Cluster, plan_of, values_of

CHUNK_BYTES = 2**20
LARGE = 128_000
"""Bytes of the one tensor that is large enough for a difference."""


@pytest.fixture(autouse=True)
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a difference is sooner there."""
    monkeypatch.setattr(ChunkTimes, "seconds_per_byte", 1.0)


def a_step_on(version: int) -> dict[str, torch.Tensor]:
    """Version 1's values, of which every 97th word moves with each version."""
    values = values_of(1)
    for value in values.values():
        value.reshape(-1)[version::97] += version / 8
    return values


def stats_of(cluster: Cluster, name: str) -> dict[str, float]:
    return {node: relay.stats()[name] for node, relay in cluster.relays.items()}


@pytest.mark.real
@pytest.mark.parametrize(("nodes", "receivers"), [
    (["x"], ["a"]),
    (["x"], ["a", "b", "c"]),
    (["x"], ["x", "a"]),
])  # fmt: skip
def test_every_receiver_gets_what_changed_bit_for_bit(tmp_path: Path, nodes: list[str], receivers: list[str]) -> None:
    with Cluster(tmp_path, plan_of(nodes, CHUNK_BYTES), receivers, values=a_step_on) as cluster:
        for version in range(1, 5):
            cluster.begin(version)
            cluster.write(version)
            cluster.check(version)
        others = [node for node in receivers if node not in nodes]
        counts, whole, received = (stats_of(cluster, key) for key in ("differences", "bytes_whole", "bytes_in"))
        assert [counts[node] for node in others] == [3] * len(others)
        assert all(whole[node] - received[node] > 3 * 0.9 * LARGE for node in others)
        assert stats_of(cluster, "damaged") == dict.fromkeys(cluster.relays, 0)


def test_a_version_of_which_all_has_changed_goes_whole(tmp_path: Path) -> None:
    with Cluster(tmp_path, plan_of(["x"], CHUNK_BYTES), ["a", "b"]) as cluster:
        for version in range(1, 4):
            cluster.begin(version)
            cluster.write(version)
            cluster.check(version)
        assert stats_of(cluster, "differences") == {"x": 0, "a": 0, "b": 0}
        assert stats_of(cluster, "bytes_in") == stats_of(cluster, "bytes_whole")


def test_a_node_that_missed_a_version_gets_it_whole_and_passes_it_on(tmp_path: Path) -> None:
    """Its neighbour, which has the version before, gets it whole too where it asks that node, and right in any case."""
    with Cluster(tmp_path, plan_of(["x"], CHUNK_BYTES), ["a", "b"], values=a_step_on) as cluster:
        for version in (1, 2):
            cluster.begin(version)
            cluster.write(version)
            cluster.check(version)
        cluster.number += 1
        for node in ("x", "b"):
            cluster.relays[node].begin(Broadcast(cluster.number, 3, ["b"], cluster.addresses))
        cluster.write(3)
        cluster.check(3, ["b"])
        before = stats_of(cluster, "differences")["a"]
        cluster.begin(4)
        cluster.write(4)
        cluster.check(4)
        assert stats_of(cluster, "differences")["a"] == before
        cluster.begin(5)
        cluster.write(5)
        cluster.check(5)
        assert stats_of(cluster, "differences")["a"] == before + 1


def test_a_difference_that_comes_damaged_is_asked_for_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = subscription.ChunkServer.difference

    def damaged(self: subscription.ChunkServer, chunk: int, num_bytes: int) -> bytes | None:
        made = sent(self, chunk, num_bytes)
        return None if made is None else made[:-4] + bytes(4)

    with Cluster(tmp_path, plan_of(["x"], CHUNK_BYTES), ["a"], values=a_step_on) as cluster:
        cluster.begin(1)
        cluster.write(1)
        cluster.check(1)
        monkeypatch.setattr(subscription.ChunkServer, "difference", damaged)
        cluster.begin(2)
        cluster.write(2)
        cluster.check(2)
        assert stats_of(cluster, "damaged")["a"] == 1


def test_a_wrong_base_is_never_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were another version taken for the base, the digest of what is made of it would tell."""
    true = subscription.apply

    def of_another(made: bytes, base: memoryview, target: memoryview) -> None:
        true(made, memoryview(bytes(len(base))), target)

    monkeypatch.setattr(subscription, "apply", of_another)
    with Cluster(tmp_path, plan_of(["x"], CHUNK_BYTES), ["a"], values=a_step_on) as cluster:
        for version in (1, 2, 3):
            cluster.begin(version)
            cluster.write(version)
            cluster.check(version)
        assert stats_of(cluster, "damaged")["a"] == 2


class Zeros:
    """A base of nothing but zeros."""

    def bytes_of(self, chunk: int) -> memoryview:
        return memoryview(bytes(2**16))


def test_a_difference_that_saves_nothing_is_the_last_of_its_version() -> None:
    new, differences = memoryview(bytes(2**16 - 1) + b"1"), Differences(Zeros())  # type: ignore[arg-type]
    assert differences.of(0, new, 1e-15) is not None
    assert differences.of(1, new, 1e-15) is None
    assert differences.of(0, new, 1e-15) is not None
    differences.keep(2, b"from another node")
    assert differences.of(2, new, 1e-15) == b"from another node"
