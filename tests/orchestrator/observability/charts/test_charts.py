"""Every metric has a chart, once, and its few points hide nothing."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.orchestrator.observability.charts.chart import thinned
from penstock.orchestrator.observability.charts.themes import NO_CHART, charts_of

KNOWN = [
    "reward/mean", "reward/min", "reward/max", "reward/std", "reward/brevity", "accuracy/heldout", "accuracy/hard",
    "staleness/max", "staleness/0", "timing_s/step", "timing_s/train", "dropped/stale", "store/rows",
    "store/ready/train", "environment/turns", "environment/attempts_failed", "faults/lost_s", "mine", "mine/too",
    "rollout/groups/Rollout-0", "reward/p10", "reward/p50", "reward/p90", "response_length/mean", "response_length/p10",
    "response_length/p90", "staleness/mean", "staleness/p90", "ranks/slowest", "ranks/forward_s_slowest",
    "actor/padding_share", "rollout/speculation_acceptance",
]  # fmt: skip
OF_POLICIES = [
    "solver/response_length/mean", "solver/reward/mean", "solver/padding_share", "solver/rows",
    "proposer/response_length/mean", "proposer/entropy", "proposer/heldout_reward/heldout",
]  # fmt: skip
OLD = [key for key in KNOWN if "/p" not in key]


def test_the_band_of_the_reward_is_its_range_where_no_more_is_known() -> None:
    charts = {chart.name: chart for chart in charts_of(OLD, {"max_staleness": 2})}
    (curve,) = charts["reward"].curves
    assert (curve.key, curve.low, curve.high) == ("reward/mean", "reward/min", "reward/max")
    assert [curve.label for curve in charts["accuracy"].curves] == ["greedy", "hard"]
    assert [curve.label for curve in charts["rewards"].curves] == ["brevity"]
    assert [curve.label for curve in charts["store_ready"].curves] == ["train"]
    assert charts["staleness"].bound == 2
    assert "critic" not in charts


def test_accepted_drafts_are_shares_of_a_chart_where_tokens_are_drafted() -> None:
    charts = {chart.name: chart for chart in charts_of(KNOWN)}
    found = charts["speculation"]
    assert ([curve.key for curve in found.curves], found.theme) == (["rollout/speculation_acceptance"], "time")
    assert (found.percent, found.bottom, found.top) == (True, 0, 1)
    assert "speculation" not in {chart.name for chart in charts_of(["timing_s/step"])}


def test_the_curves_of_several_policies_stand_in_the_charts_of_one() -> None:
    charts = {chart.name: chart for chart in charts_of([*KNOWN, "heldout_reward/heldout", *OF_POLICIES])}
    labels = {name: [curve.label for curve in chart.curves] for name, chart in charts.items()}
    assert labels["reward"] == ["mean", "solver: mean"]
    assert charts["reward"].curves[0].low == "reward/p10"
    assert labels["entropy"] == ["proposer: entropy"]
    assert labels["padding"] == ["policy", "solver"]
    assert labels["heldout_reward"] == ["heldout", "proposer: heldout"]
    assert labels["other_solver"] == ["rows"]


def test_four_fifths_of_the_samples_are_the_band_where_they_are_known() -> None:
    quantiles = [
        f"{name}/{key}" for name in ("reward", "response_length", "staleness") for key in ("p10", "p50", "p90")
    ]
    charts = {chart.name: chart for chart in charts_of(dict.fromkeys([*KNOWN, *quantiles]))}
    for name, key in (("reward", "reward"), ("response_length", "response_length"), ("staleness", "staleness")):
        (curve,) = [curve for curve in charts[name].curves if curve.key == f"{key}/mean"]
        assert (curve.low, curve.high) == (f"{key}/p10", f"{key}/p90")
    (median,) = charts["reward_range"].curves
    assert (median.key, median.low, median.high) == ("reward/p50", "reward/min", "reward/max")


@example({"response_length/p10", "response_length/p90", "solver/response_length/mean"})
@given(st.sets(st.one_of(st.sampled_from([*KNOWN, *OF_POLICIES]), st.text("ab/", min_size=1, max_size=6))))
def test_every_metric_is_in_one_chart(keys: set[str]) -> None:
    charts = charts_of(sorted(keys))
    shown = [key for chart in charts for key in chart.keys]
    assert sorted(shown) == sorted(keys - set(NO_CHART))
    assert len({chart.name for chart in charts}) == len(charts)


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
