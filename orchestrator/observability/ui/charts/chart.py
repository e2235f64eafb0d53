"""A chart: the metrics that it shows, and how, and the numbers in it, as few as a screen can show. Pure.

`static/chart.js` and `pngs.py` draw it. Points are put into as many buckets of equal width as the chart has pixels; of
each bucket the mean is drawn, and its least and largest values are a band around that. A spike of one step stays
visible.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from penstock.orchestrator.observability.ui.runs.columns import Columns, Values

MOST = 500
"""Most points of a curve."""


@dataclass(frozen=True)
class Curve:
    key: str
    """Name of the metric."""
    label: str
    low: str | None = None
    """Metric that a band around the curve reaches from; `high`: the one that it reaches to."""
    high: str | None = None


@dataclass(frozen=True)
class Chart:
    name: str
    """Name of the chart's PNG, and in addresses."""
    title: str
    theme: str
    curves: tuple[Curve, ...]
    unit: str = ""
    about: str = ""
    """Text on what the chart tells, and when to look closer."""
    stacked: bool = False
    log: bool = False
    percent: bool = False
    dots: bool = False
    """True if values are measured now and then, not at each step."""
    bound: float | None = None
    """Value of a dashed line that must not be passed."""
    bottom: float | None = None
    top: float | None = None

    @property
    def keys(self) -> list[str]:
        """All metrics in the chart."""
        every = [key for curve in self.curves for key in (curve.key, curve.low, curve.high) if key is not None]
        return list(dict.fromkeys(every))

    def plain(self) -> dict[str, Any]:
        """The chart as plain data."""
        return asdict(self)


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


@dataclass(frozen=True)
class Thinned:
    steps: Values
    """Steps `[M]`; for a bucket, the step of its last point."""
    mean: Values
    low: Values | None = None
    """Least values `[M]`; None: no points were put together."""
    high: Values | None = None


def thinned(steps: Values, values: Values, most: int, first: float = -np.inf, last: float = np.inf) -> Thinned:
    """Thin a curve. `steps`: `[N]` ascending. `values`: `[N]`; those that are not finite are left out. `most`: most
    points of the result. `first`, `last`: only steps between these."""
    kept = np.isfinite(values) & (steps >= first) & (steps <= last)
    steps, values = steps[kept], values[kept]
    if len(steps) <= most:
        return Thinned(steps, values)
    width = (steps[-1] - steps[0]) / most
    bucket = np.minimum(((steps - steps[0]) / width).astype(np.int64), most - 1)
    starts = np.flatnonzero(np.diff(bucket, prepend=-1))
    counts = np.diff(starts, append=len(steps))
    return Thinned(
        steps[starts + counts - 1],
        np.add.reduceat(values, starts) / counts,
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
    )
