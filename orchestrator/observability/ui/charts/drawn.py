"""The numbers of a run's charts, as few as a screen can show, for a page that holds them itself. Pure."""

from collections.abc import Sequence
from typing import Any

from penstock.orchestrator.observability.ui.charts.chart import Chart, Curve
from penstock.orchestrator.observability.ui.runs.columns import Columns, Values
from penstock.orchestrator.observability.ui.runs.thinning import thinned

MOST = 500
"""Most points of a curve."""


def drawn(charts: Sequence[Chart], columns: Columns) -> dict[str, list[dict[str, Any]]]:
    """Curves of each chart, by its name: {label, steps, mean, low, high}, as `static/chart.js` takes them."""
    return {chart.name: [_curve(curve, columns) for curve in chart.curves] for chart in charts}


def _curve(curve: Curve, columns: Columns) -> dict[str, Any]:
    own = thinned(columns.steps, columns[curve.key], MOST)
    low, high = own.low, own.high
    if curve.low is not None and curve.high is not None:
        below, above = (thinned(columns.steps, columns[key], MOST) for key in (curve.low, curve.high))
        if len(below.steps) == len(above.steps) == len(own.steps):
            low = below.mean if below.low is None else below.low
            high = above.mean if above.high is None else above.high
    return {
        "label": curve.label, "steps": plain(own.steps), "mean": plain(own.mean),
        "low": None if low is None else plain(low), "high": None if high is None else plain(high),
    }  # fmt: skip


def plain(values: Values) -> list[float]:
    """Values with seven digits: that is more than a screen shows, and half of the bytes."""
    return [float(f"{value:.7g}") for value in values.tolist()]
