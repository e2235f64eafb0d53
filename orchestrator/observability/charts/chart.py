"""A chart: the metrics that it shows, and how; the numbers in it, as few as a screen can show; its PNG, for use in
scripts, which lies beside `report.html`.

`static/chart.js` draws it in the page, `write_pngs` into files. Points are put into as many buckets of equal width as
the chart has pixels; of each bucket the mean is drawn, and its least and largest values are a band around that. A spike
of one step stays visible.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.orchestrator.observability.marks import Mark
from penstock.orchestrator.observability.runs.columns import Columns, Values
from penstock.workers.runtime.local_files import replacing

THEMES = (
    "learning", "lengths", "staleness", "mismatch", "time", "store", "weights", "environment", "faults", "others",
)  # fmt: skip
MOST = 500
"""Most points of a curve."""
COLORS = ("#2f7de1", "#e08600", "#0a9f78", "#c65a9d", "#d24b2a", "#4fb0e6", "#8a7d00", "#7a6ce0")
"""Colours of curves: those of `static/colors.js`."""
DRAWN = THEMES[:5]
"""Themes that are drawn; the others are in the page only."""
INSIDE = (0.16, 0.15, 0.81, 0.75)
"""Left, bottom, width and height of the axes, as shares of the figure. A layout engine would draw each figure twice."""
STYLE: Any = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "font.size": 9,
}  # fmt: skip
MARKS = {"bad": "#c02626", "warn": "#9a5b00", "good": "#0f7a4d", "note": "#626b77"}
"""Colours of marks by level: those of `static/style.css`."""
KNOWN_COLOR = "#808a97"
"""Colour of the band of a known curve: that of `static/colors.js`."""
TICK = 0.05
"""Height of a mark of the level `note`, as a share of the axes."""


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
    theme: str = "others"
    """One of `THEMES`."""
    known: Mapping[str, Any] | None = None
    """A curve that the recipe is known to have, drawn behind: {label, steps, low, mean, high}."""

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


def write_pngs(charts: Sequence[Chart], columns: Columns, directory: Path, marks: Sequence[Mark] = ()) -> list[Path]:
    """Write a PNG for each chart to `directory`. Returns the files. Raises `OSError`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # pyplot would choose a window system, and keep every figure

    directory.mkdir(parents=True, exist_ok=True)
    files = []
    with rc_context(STYLE):
        for chart in charts:
            if chart.theme not in DRAWN:
                continue
            figure = Figure(figsize=(6, 3.2), dpi=130)
            axes = figure.add_axes(INSIDE)
            _draw(axes, chart, columns)
            _mark(axes, columns.steps, marks)
            files.append(directory / f"{chart.name}.png")
            with replacing(files[-1]) as part:
                figure.savefig(part, format="png")
    return files


def _draw(axes: Any, chart: Chart, columns: Columns) -> None:
    steps = columns.steps
    if chart.stacked:
        layers = [np.nan_to_num(columns[curve.key]) for curve in chart.curves]
        axes.stackplot(steps, layers, labels=[curve.label for curve in chart.curves], colors=COLORS, alpha=0.85)
    for index, curve in enumerate(() if chart.stacked else chart.curves):
        color, values = COLORS[index % len(COLORS)], columns[curve.key]
        known = np.isfinite(values)
        marker = "o" if chart.dots or known.sum() == 1 else None
        axes.plot(
            steps[known], values[known], color=color, label=curve.label, marker=marker, markersize=4, linewidth=1.6
        )
        if curve.low is not None and curve.high is not None:
            axes.fill_between(steps, columns[curve.low], columns[curve.high], color=color, alpha=0.15, linewidth=0)
    if chart.known is not None:
        band = (chart.known[part] for part in ("steps", "low", "high"))
        axes.fill_between(*band, color=KNOWN_COLOR, alpha=0.2, linewidth=0, label=chart.known["label"])
    if chart.bound is not None:
        axes.axhline(chart.bound, color="#c02626", linestyle="--", linewidth=1, label=f"bound {chart.bound:g}")
    if chart.log and all(_is_positive(columns[curve.key]) for curve in chart.curves):
        axes.set_yscale("log")
    if chart.bottom is not None or chart.top is not None:
        axes.set_ylim(bottom=chart.bottom, top=chart.top)
    if chart.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set(title=chart.title, xlabel="step", ylabel=chart.unit)
    if len(chart.curves) > 1 or chart.bound is not None or chart.known is not None:
        axes.legend(frameon=False, fontsize=8)


def _is_positive(values: Values) -> bool:
    return bool((values[np.isfinite(values)] > 0).all())


def _mark(axes: Any, steps: Values, marks: Sequence[Mark]) -> None:
    for mark in marks:
        if len(steps) and steps[0] <= mark.step <= steps[-1]:
            last, height = min(mark.until or mark.step, steps[-1]), TICK if mark.level == "note" else 1.0
            axes.axvspan(mark.step, last, 0, height, color=MARKS[mark.level], alpha=0.25, linewidth=1.5)
