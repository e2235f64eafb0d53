"""The plan of chunks is checked once, and its numbers mean the same bytes wherever it is read."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import WeightError
from penstock.workers.weights.chain.plan import ChunkPlan, choose_chunk_bytes, make_plan
from penstock.workers.weights.publication.layout import compute_layout
from penstock.workers.weights.publication.ranges import RANGE_BYTES

LAYOUT = compute_layout([("w", (6, 4), "float32"), ("b", (3,), "float32"), ("none", (0, 3), "float32")])
BY_RANK = [[("w", 0, 12), ("b", 0, 3)], [("w", 12, 12), ("none", 0, 0)]]


def test_pieces_are_cut_at_the_ends_of_ranks_and_of_chunks() -> None:
    plan = make_plan(LAYOUT, BY_RANK, ["x", "y"], chunk_bytes=32)
    assert [tuple(chunk) for chunk in plan.chunks] == [
        ("w", 0, 8, 0), ("w", 8, 4, 0), ("b", 0, 3, 0), ("w", 12, 8, 1), ("w", 20, 4, 1),
    ]  # fmt: skip
    assert plan.sources == ["x", "y"]
    assert plan.of_node("y") == [3, 4]
    header = len(LAYOUT.header)
    assert plan.spans_of_node("y") == [(0, header), *(plan.spans[number] for number in (3, 4))]


def test_all_ranks_of_a_node_are_one_source() -> None:
    plan = make_plan(LAYOUT, BY_RANK, ["x", "x"])
    assert plan.sources == ["x"]
    assert plan.of_node("x") == [0, 1, 2]


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
