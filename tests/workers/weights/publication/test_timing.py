"""Arithmetic of the time that a publication takes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.weights.publication.costs import BUSES, PublicationTimes

SEVEN_B = 15_231_233_024
"""Bytes of Qwen2.5-7B in bfloat16."""
FOUR, FIVE = BUSES


def test_a_rank_of_one_thread_writes_as_fast_as_it_copies_whatever_its_bus() -> None:
    way = PublicationTimes(SEVEN_B, num_ranks=8, gpus_per_engine=1)
    assert way.written_s(FOUR) == way.written_s(FIVE) == pytest.approx(15.231e9 / 8 / 7.6e9, rel=1e-4)
    assert way.taken_s == pytest.approx(15.231e9 / 8 * 3 / 1e12, rel=1e-4)
    assert way.checked_s == pytest.approx(0.2975, abs=1e-4)
    assert way.on_one_node_s(FOUR) == pytest.approx(0.548, abs=1e-3)
    assert way.between_nodes_s(FOUR) == pytest.approx(0.595 + 0.2975, abs=1e-3)
    assert way.paused_s(FOUR) == pytest.approx(15.231 / 25, abs=1e-3)
    assert replace(way, link=5e9).between_nodes_s(FOUR) == pytest.approx(15.231 / 5 + 0.2975, abs=1e-3)
    assert replace(way, link=1e11).between_nodes_s(FOUR) == way.between_nodes_s(FOUR)


def test_a_rank_of_many_threads_writes_as_fast_as_its_bus() -> None:
    way = PublicationTimes(SEVEN_B, num_ranks=1, gpus_per_engine=1, threads_per_rank=16)
    assert way.written_s(FOUR) == pytest.approx(0.609, abs=1e-3)
    assert way.written_s(FIVE) == pytest.approx(0.305, abs=1e-3)


@given(
    st.integers(1, 10**12), st.integers(1, 64), st.sampled_from([1, 2, 4, 8]), st.integers(1, 32), st.integers(1, 8),
    st.sampled_from(list(BUSES)),
)  # fmt: skip
def test_more_of_anything_but_bytes_takes_no_longer(
    size: int, ranks: int, gpus: int, threads: int, lanes: int, bus: str
) -> None:
    few = PublicationTimes(size, ranks, gpus, threads, lanes)
    for many in (
        PublicationTimes(size, ranks + 1, gpus, threads, lanes),
        PublicationTimes(size, ranks, 2 * gpus, threads, lanes),
        PublicationTimes(size, ranks, gpus, threads + 1, lanes),
        PublicationTimes(size, ranks, gpus, threads, lanes + 1),
    ):
        assert many.between_nodes_s(bus) <= few.between_nodes_s(bus)
        assert many.paused_s(bus) <= few.paused_s(bus)
    assert few.on_one_node_s(bus) <= few.between_nodes_s(bus)
