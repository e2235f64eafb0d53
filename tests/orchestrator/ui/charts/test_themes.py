"""Every metric has a chart, once; what there is none of has none."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.orchestrator.ui.charts.themes import NO_CHART, charts_of

KNOWN = [
    "reward/mean", "reward/min", "reward/max", "reward/std", "reward/brevity", "accuracy/heldout", "accuracy/hard",
    "staleness/max", "staleness/0", "timing_s/step", "timing_s/train", "dropped/stale", "store/rows",
    "store/ready/train", "environment/turns", "environment/attempts_failed", "faults/lost_s", "mine", "mine/too",
    "rollout/groups/Rollout-0",
]  # fmt: skip


def test_the_band_of_the_reward_is_its_range() -> None:
    charts = {chart.name: chart for chart in charts_of(KNOWN, {"max_staleness": 2})}
    (curve,) = charts["reward"].curves
    assert (curve.key, curve.low, curve.high) == ("reward/mean", "reward/min", "reward/max")
    assert [curve.label for curve in charts["accuracy"].curves] == ["greedy", "hard"]
    assert [curve.label for curve in charts["rewards"].curves] == ["brevity"]
    assert [curve.label for curve in charts["store_ready"].curves] == ["train"]
    assert charts["staleness"].bound == 2
    assert "critic" not in charts


@given(st.sets(st.one_of(st.sampled_from(KNOWN), st.text("ab/", min_size=1, max_size=6))))
def test_every_metric_is_in_one_chart(keys: set[str]) -> None:
    charts = charts_of(sorted(keys))
    shown = [key for chart in charts for key in chart.keys]
    assert sorted(shown) == sorted(keys - set(NO_CHART))
    assert len({chart.name for chart in charts}) == len(charts)
