"""Numbers are kept until they are drained; what the table does not declare is refused."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.metering.meters import MAX_OBSERVATIONS, Meters
from penstock.metering.table import (
    REWARD_ERRORS,
    REWARD_LATENCY,
    REWARD_SAMPLES,
    ROLLOUT_RUNNING,
    STORE_STALENESS,
)

TIMEOUTS = REWARD_ERRORS, (("reason", "timeout"),)


def test_a_count_is_drained_once_and_a_value_again_and_again() -> None:
    meters = Meters()
    meters.add(REWARD_ERRORS, reason="timeout")
    meters.add(REWARD_ERRORS, 2, reason="timeout")
    meters.put(ROLLOUT_RUNNING, 7)
    first, second = meters.drain(), meters.drain()
    assert first.counts == {TIMEOUTS: 3}
    assert second.counts == {}
    assert first.values == second.values == {(ROLLOUT_RUNNING, ()): 7}


def test_a_series_may_begin_at_nothing() -> None:
    meters = Meters()
    meters.add(REWARD_ERRORS, 0, reason="timeout")
    assert meters.drain().counts == {TIMEOUTS: 0}


@given(st.lists(st.integers(0, 3), max_size=200), st.integers(1, 3))
def test_all_is_kept_up_to_a_bound_and_a_sample_of_more(values: list[int], times: int) -> None:
    meters = Meters()
    for value in values:
        meters.observe(STORE_STALENESS, value, times=times)
    (kept,) = meters.drain().observed.values() or ([],)
    assert len(kept) == min(MAX_OBSERVATIONS, len(values) * times)
    assert set(kept) <= set(values)
    if len(values) * times <= MAX_OBSERVATIONS:
        assert sorted(kept) == sorted(values * times)


def test_a_sample_has_the_mean_of_all() -> None:
    meters = Meters()
    for value in range(10_000):
        meters.observe(REWARD_LATENCY, float(value))
    (kept,) = meters.drain().observed.values()
    assert abs(sum(kept) / len(kept) - 5_000) < 3 * 2_887 / MAX_OBSERVATIONS**0.5, "three standard errors"


def test_nothing_is_lost_between_threads() -> None:
    meters, drained = Meters(), []

    def count() -> None:
        for _ in range(2_000):
            meters.add(REWARD_SAMPLES)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained.append(meters.drain())
    drained.append(meters.drain())
    assert sum(sum(one.counts.values()) for one in drained) == 8_000


@pytest.mark.parametrize(
    "use",
    [
        lambda meters: meters.add(ROLLOUT_RUNNING),
        lambda meters: meters.put(REWARD_SAMPLES, 1.0),
        lambda meters: meters.observe(REWARD_SAMPLES, 1.0),
        lambda meters: meters.add(REWARD_ERRORS),
        lambda meters: meters.add(REWARD_SAMPLES, reason="timeout"),
    ],
)
def test_a_use_that_is_not_declared_is_refused(use) -> None:
    with pytest.raises(ValueError, match=r"Declare it so in metering/table\.py"):
        use(Meters())
