"""Draws the charts as PNGs, for use in scripts. They lie beside `report.html`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.orchestrator.observability.marks import Mark
from penstock.orchestrator.observability.ui.charts.chart import Chart
from penstock.orchestrator.observability.ui.charts.themes import THEMES
from penstock.orchestrator.observability.ui.runs.columns import Columns, Values
from penstock.workers.whole_files import replacing

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
TICK = 0.05
"""Height of a mark of the level `note`, as a share of the axes."""


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
    if chart.bound is not None:
        axes.axhline(chart.bound, color="#c02626", linestyle="--", linewidth=1, label=f"bound {chart.bound:g}")
    if chart.log and all(_is_positive(columns[curve.key]) for curve in chart.curves):
        axes.set_yscale("log")
    if chart.bottom is not None or chart.top is not None:
        axes.set_ylim(bottom=chart.bottom, top=chart.top)
    if chart.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set(title=chart.title, xlabel="step", ylabel=chart.unit)
    if len(chart.curves) > 1 or chart.bound is not None:
        axes.legend(frameon=False, fontsize=8)


def _is_positive(values: Values) -> bool:
    return bool((values[np.isfinite(values)] > 0).all())


def _mark(axes: Any, steps: Values, marks: Sequence[Mark]) -> None:
    for mark in marks:
        if len(steps) and steps[0] <= mark.step <= steps[-1]:
            last, height = min(mark.until or mark.step, steps[-1]), TICK if mark.level == "note" else 1.0
            axes.axvspan(mark.step, last, 0, height, color=MARKS[mark.level], alpha=0.25, linewidth=1.5)
