"""Numbers are what they have come to; what the table does not declare is refused."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.metering.meters import Meters
from penstock.metering.table import REWARD_ERRORS, REWARD_SAMPLES, ROLLOUT_RUNNING, STORE_STALENESS
from tests.metering.measured import measured


def test_a_total_grows_and_a_value_is_the_last() -> None:
    meters = Meters()
    meters.add(REWARD_ERRORS, 0, reason="crash")
    meters.add(REWARD_ERRORS, reason="timeout")
    meters.add(REWARD_ERRORS, 2, reason="timeout")
    meters.put(ROLLOUT_RUNNING, 9)
    meters.put(ROLLOUT_RUNNING, 7)
    expected = {"reward_errors_total crash": 0, "reward_errors_total timeout": 3, "rollout_running_sequences": 7}
    assert measured(meters) == measured(meters) == expected


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1))
def test_a_summary_has_two_series_however_many_values_there_are(values: list[tuple[int, int]]) -> None:
    meters = Meters()
    for value, times in values:
        meters.observe(STORE_STALENESS, value, times=times)
    assert measured(meters) == {
        "store_staleness_versions_sum": sum(value * times for value, times in values),
        "store_staleness_versions_count": sum(times for _, times in values),
    }


def test_nothing_is_lost_between_threads() -> None:
    meters = Meters()

    def count() -> None:
        for _ in range(2_000):
            meters.add(REWARD_SAMPLES)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert measured(meters) == {"reward_samples_total": 8_000}


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
