"""The plan of chunks is checked once, and its numbers mean the same bytes wherever it is read. Every receiving node is
in each chain once, and nobody asks one that might ask it."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import WeightError
from penstock.workers.weights.chain.plan import (
    LANE_BYTES,
    NEARBY,
    Broadcast,
    ChunkPlan,
    chain,
    choose_chunk_bytes,
    lanes_of,
    make_plan,
    upstreams,
)
from penstock.workers.weights.publication.layout import RANGE_BYTES, compute_layout

LAYOUT = compute_layout([("w", (6, 4), "float32"), ("b", (3,), "float32"), ("none", (0, 3), "float32")])
BY_RANK = [[("w", 0, 12), ("b", 0, 3)], [("w", 12, 12), ("none", 0, 0)]]
NODES = st.lists(st.sampled_from([f"n{number}" for number in range(12)]), unique=True, min_size=1, max_size=12)


def test_pieces_are_cut_at_the_ends_of_ranks_and_of_chunks() -> None:
    plan = make_plan(LAYOUT, BY_RANK, ["x", "y"], chunk_bytes=32)
    assert [tuple(chunk) for chunk in plan.chunks] == [
        ("w", 0, 8, 0), ("w", 8, 4, 0), ("b", 0, 3, 0), ("w", 12, 8, 1), ("w", 20, 4, 1),
    ]  # fmt: skip
    assert plan.sources == ["x", "y"]
    assert plan.chunks_from_node("y") == [3, 4]
    header = len(LAYOUT.header)
    assert plan.spans_from_node("y") == [(0, header), *(plan.spans[number] for number in (3, 4))]


@given(st.lists(st.integers(1, LANE_BYTES), min_size=1, max_size=12), st.integers(0, 9))
def test_each_chunk_of_a_chain_is_in_one_lane_and_lanes_are_as_long(sizes: list[int], most: int) -> None:
    layout = compute_layout((f"{number:02}", (size // 2,), "bfloat16") for number, size in enumerate(sizes))
    pieces = [[(place.name, 0, place.num_elements) for place in layout.tensors], []]
    plan = make_plan(layout, pieces, ["x", "y"])
    lanes = lanes_of(plan, "x", most)
    total = layout.num_bytes - len(layout.header)
    assert len(lanes) == max(1, min(most, total // LANE_BYTES))
    assert sorted(chunk for lane in lanes.values() for chunk in lane) == plan.chunks_from_node("x")
    assert {lane.source for lane in lanes} == {"x"}
    assert all(lane == sorted(lane) for lane in lanes.values())
    lengths = [sum(plan.spans[chunk][1] - plan.spans[chunk][0] for chunk in lane) for lane in lanes.values()]
    assert max(lengths) - min(lengths) <= 3 * RANGE_BYTES


def test_four_chunks_over_two_lanes_take_turns() -> None:
    layout = compute_layout([("w", (2 * LANE_BYTES,), "bfloat16")])
    plan = make_plan(layout, [[("w", 0, 2 * LANE_BYTES)]], ["x"])
    first, second = lanes_of(plan, "x", 2).values()
    assert (first[:3], second[:3]) == ([0, 2, 4], [1, 3, 5])


def test_all_ranks_of_a_node_are_one_source() -> None:
    plan = make_plan(LAYOUT, BY_RANK, ["x", "x"])
    assert plan.sources == ["x"]
    assert plan.chunks_from_node("x") == [0, 1, 2]


def test_what_nobody_will_write_is_refused_before_the_first_version() -> None:
    with pytest.raises(WeightError, match="'w' has 24 elements, 12 were written"):
        make_plan(LAYOUT, BY_RANK[:1], ["x"])


def test_what_two_ranks_would_write_is_refused() -> None:
    with pytest.raises(WeightError, match="exactly one rank"):
        make_plan(LAYOUT, [*BY_RANK, BY_RANK[0]], ["x", "y", "z"])


def test_it_is_plain_data_and_means_the_same_at_the_other_end() -> None:
    plan = make_plan(LAYOUT, BY_RANK, ["x", "y"], chunk_bytes=32)
    for coding in (msgspec.json, msgspec.msgpack):
        there = coding.decode(coding.encode(plan), type=ChunkPlan)
        assert (there, there.spans, there.digest) == (plan, plan.spans, plan.digest)


@given(st.integers(1, 2**40), st.integers(1, 8), st.integers(1, 500))
def test_chunks_are_small_enough_for_a_chain_to_fill_soon(num_bytes: int, num_sources: int, num_receivers: int) -> None:
    chosen = choose_chunk_bytes(num_bytes, num_sources, num_receivers)
    assert 2**20 <= chosen <= RANGE_BYTES
    num_chunks = num_bytes / num_sources / chosen
    assert chosen == 2**20 or (num_receivers - 1) <= num_chunks / 16 or num_receivers == 1


def test_a_short_chain_of_a_large_model_takes_the_largest_chunks() -> None:
    assert choose_chunk_bytes(10**9, 2, 2) == RANGE_BYTES
    assert choose_chunk_bytes(10**9, 1, 128) == 2**20


def test_the_order_turns_with_the_version_and_from_chain_to_chain() -> None:
    def orders(version: int) -> list[list[str]]:
        return [chain(Broadcast(1, version, ["a", "b", "c"], {}), ["x", "y"], source) for source in ("x", "y")]

    assert orders(12) == [["a", "b", "c"], ["b", "c", "a"]]
    assert orders(13) == [["b", "c", "a"], ["c", "a", "b"]]


def test_a_trainers_node_with_engines_gets_the_others_chunks_and_not_its_own() -> None:
    broadcast = Broadcast(1, 0, ["x", "a"], {})
    assert chain(broadcast, ["x", "y"], "x") == ["a"]
    assert sorted(chain(broadcast, ["x", "y"], "y")) == ["a", "x"]
    assert chain(Broadcast(1, 0, ["x"], {}), ["x"], "x") == []


@given(NODES, NODES, st.integers(0, 1000))
def test_whoever_is_asked_is_nearer_to_the_trainer(receivers: list[str], sources: list[str], version: int) -> None:
    for source in sources:
        order = chain(Broadcast(1, version, receivers, {}), sources, source)
        assert Counter(order) == Counter(set(receivers) - {source})
        for place, node in enumerate(order):
            asked = upstreams(order, source, node)
            assert asked == [*[order[place - 1 - back] for back in range(min(place, NEARBY))], source]


@given(st.integers(1, 12), st.integers(1, 4))
def test_over_the_versions_every_node_is_the_first_as_often_as_any_other(num_nodes: int, num_sources: int) -> None:
    receivers = [f"n{number:02}" for number in range(num_nodes)]
    sources = [f"x{number}" for number in range(num_sources)]
    firsts = Counter(
        chain(Broadcast(1, version, receivers, {}), sources, source)[0]
        for version in range(num_nodes)
        for source in sources
    )
    assert set(firsts.values()) == {num_sources}
