"""What benchmarks make of their rounds, and the memory that they leave."""

import statistics

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness import interval, memory_folder, spread
from penstock.store.data import roots


def test_a_spread_is_the_median_with_the_lowest_and_the_highest():
    assert spread([3.0, 1.0, 1200.25]) == "3 (1-1,200)"
    assert spread([0.125], 2) == "0.12 (0.12-0.12)"


def test_the_interval_of_pairs_that_are_alike_is_their_value():
    assert interval([(3.0, 2.0)] * 5, lambda pairs: pairs[0][0] - pairs[0][1]) == (1.0, 1.0)


def test_the_interval_of_three_pairs_is_as_wide_as_they_are():
    """The lowest is the median of 7 of 27 draws, far more than the 2.5% that are left out on each side."""
    assert interval([1.0, 2.0, 4.0], statistics.median) == (1.0, 4.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_an_interval_lies_among_the_rounds_and_is_repeated(values):
    low, high = interval(values, statistics.median)
    assert min(values) <= low <= high <= max(values)
    assert (low, high) == interval(values, statistics.median)


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=9))
def test_a_smaller_share_has_a_narrower_interval(values):
    wide, narrow = interval(values, statistics.median), interval(values, statistics.median, share=0.5)
    assert wide[0] <= narrow[0] <= narrow[1] <= wide[1]


def test_a_benchmark_removes_what_a_killed_one_has_left_in_memory(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.harness.SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr("benchmarks.harness.sweep_stale", lambda: roots.sweep_stale(tmp_path))
    with memory_folder() as alive:
        left = roots.claim_root(tmp_path / "penstock-bench-left")
        (left / "rows").write_bytes(bytes(8))
        dead, began, *machine = (left / roots.OWNER_NAME).read_text().split()
        (left / roots.OWNER_NAME).write_text(" ".join([dead, f"{began}0", *machine]))  # its PID is another's by now
        with memory_folder() as mine:
            assert {*tmp_path.iterdir()} == {alive, mine}
    assert not [*tmp_path.iterdir()]
