"""The benchmark of pictures, small: what it counts is an eighth of the copies, wherever the reader is."""

import pytest

from benchmarks import store_pictures

pytestmark = pytest.mark.real


def test_a_picture_costs_an_eighth_of_copies_where_the_benchmark_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_pictures, "SIZE", 100_000)  # eight are less than what takes a preallocated file
    rounds = store_pictures.measure_pictures(20, 20)
    for target in store_pictures.picture_targets(rounds)[:2]:  # a process's memory is not counted so finely
        assert 1 / 8 <= target.value < 1.1 / 8
