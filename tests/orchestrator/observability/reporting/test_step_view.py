"""A step's numbers, as a line and as curves."""

import pytest

from penstock.orchestrator.observability.reporting.progress import idle, plain_line, sparkline


def test_a_line_has_rates_and_who_waited() -> None:
    metrics = {"perf/samples_per_s": 248.06, "perf/tokens_per_s": 1015.2, "idle/rollout": 0.45, "idle/train": 0.3}
    expected = "step 1/2  samples/s 248.1  tokens/s 1,015  engines idle 45%  ranks idle 30%"
    assert plain_line(1, 2, metrics) == expected


def test_values_that_are_no_numbers_are_left_out() -> None:
    odd = {"reward/mean": float("nan"), "timing_s/step": None, "idle/train": None, "perf/tokens_per_s": float("inf")}
    assert plain_line(1, 2, odd) == "step 1/2"


@pytest.mark.parametrize(("metrics", "expected"), [({}, {}), ({"idle/train": 1}, {"ranks": 1})])
def test_a_side_that_a_run_lacks_does_not_wait(metrics: dict[str, float], expected: dict[str, float]) -> None:
    assert idle(metrics) == expected


def test_a_sparkline_spans_its_values_and_averages_long_ones() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, 1.0]) == "▁█"
    assert len(sparkline([float(value) for value in range(1000)], width=32)) == 32
    assert sparkline([3.0, 3.0]) == "▁▁"
