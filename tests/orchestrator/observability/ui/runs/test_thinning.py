"""Few points that hide nothing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.orchestrator.observability.ui.charts.chart import thinned


def test_few_points_stay_as_they_are() -> None:
    found = thinned(np.array([1.0, 2.0, 3.0]), np.array([5.0, np.nan, 7.0]), most=10)
    assert found.steps.tolist() == [1, 3]
    assert found.mean.tolist() == [5, 7]
    assert found.low is None


def test_a_spike_of_one_step_among_many_stays_in_sight() -> None:
    steps, values = np.arange(10_000.0), np.zeros(10_000)
    values[4567] = 9.0
    found = thinned(steps, values, most=100)
    assert found.high is not None
    assert len(found.steps) == 100
    assert found.high.max() == 9.0
    assert found.mean.max() == 0.09
    zoomed = thinned(steps, values, 100, first=4560, last=4580)
    assert zoomed.low is None
    assert zoomed.mean.max() == 9.0


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(-1e6, 1e6)), min_size=1, max_size=300), st.integers(1, 50))
def test_the_band_holds_all_values_and_the_last_step_is_the_last(points: list[tuple[int, float]], most: int) -> None:
    by_step = dict(points)
    steps = np.array(sorted(by_step), dtype=float)
    values = np.array([by_step[int(step)] for step in steps])
    found = thinned(steps, values, most)
    assert 1 <= len(found.steps) <= max(most, 1)
    assert (np.diff(found.steps) > 0).all()
    assert found.steps[-1] == steps[-1]
    low, high = (found.mean, found.mean) if found.low is None or found.high is None else (found.low, found.high)
    assert (low.min(), high.max()) == (values.min(), values.max())
    assert (low <= found.mean + 1e-6).all()
    assert (found.mean <= high + 1e-6).all()
