"""A chart as inline SVG for the report: no script, no file beside it, colours from the page's style sheet.

Called by `report.py`. Lines take the classes `c0`…, so that light and dark pages share one drawing; hovering a point
shows it.
"""

import math
from html import escape
from itertools import pairwise

from penstock.orchestrator.reporting.plots import Chart, Points

WIDTH, HEIGHT = 520, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 30
MAX_HOVER_POINTS = 240


class Scale:
    """Data to pixels along one axis."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False) -> None:
        self.log = log
        self.low, self.high = (math.log10(low), math.log10(high)) if log else (low, high)
        if self.high <= self.low:
            self.high = self.low + 1.0
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        position = math.log10(value) if self.log else value
        return self.start + (position - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        if self.log:
            first, last = math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9)
            stride = max(1, (last - first + 1) // count)
            return [10.0**power for power in range(first, last + 1, stride)]
        step = nice_step((self.high - self.low) / count)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def nice_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))


def draw(chart: Chart) -> str:
    """The `<svg>` of one chart."""
    layers = _stack(chart) if chart.stacked else [series.points for series in chart.series]
    x, y = _scales(chart, layers)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}" class="chart">',
        *_axes(chart, x, y),
    ]
    color = 0
    for index, series in enumerate(chart.series):
        if chart.stacked:
            below = layers[index - 1] if index else [(step, 0.0) for step, _ in layers[0]]
            parts.append(_area(layers[index], below, x, y, index))
        else:
            parts += _line(layers[index], x, y, color, series.faint, series.dots)
            color += not series.faint
    if chart.bound is not None:
        parts.append(
            f'<line class="bound" x1="{LEFT}" x2="{WIDTH - RIGHT}" '
            f'y1="{y(chart.bound):.1f}" y2="{y(chart.bound):.1f}"/>'
        )
    parts += _hover(chart, layers, x, y)
    return "".join([*parts, "</svg>"])


def legend(chart: Chart) -> str:
    """The labels with their colours, as HTML."""
    items, color = [], 0
    for series in chart.series:
        kind = " faint" if series.faint else ""
        items.append(f'<span class="key"><i class="k{color % 7}{kind}"></i>{escape(series.label)}</span>')
        color += not series.faint
    if chart.bound is not None:
        items.append(f'<span class="key"><i class="kbound"></i>bound {chart.bound:g}</span>')
    return "".join(items) if len(items) > 1 else ""


def _stack(chart: Chart) -> list[Points]:
    """Each series on top of those before it."""
    layers: list[Points] = []
    for series in chart.series:
        below = layers[-1] if layers else [(step, 0.0) for step, _ in series.points]
        layers.append([(step, value + base) for (step, value), (_, base) in zip(series.points, below, strict=True)])
    return layers


def _scales(chart: Chart, layers: list[Points]) -> tuple[Scale, Scale]:
    steps = [step for points in layers for step, _ in points]
    values = [value for points in layers for _, value in points]
    log = chart.log and min(values) > 0
    low, high = min(values), max(values)
    if log:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high) + 1e-9)
    else:
        margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        low = chart.bottom if chart.bottom is not None else low - margin
        high = chart.top if chart.top is not None else max(high, chart.bound or 0) + margin
    x = Scale(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    return x, Scale(low, high, HEIGHT - BOTTOM, TOP, log)


def label(value: float, percent: bool = False) -> str:
    if percent:
        return f"{value:.0%}"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.10g}" if abs(value) >= 1000 else f"{round(value, 6):g}"


def _axes(chart: Chart, x: Scale, y: Scale) -> list[str]:
    parts = []
    for tick in y.ticks():
        at = y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 7}" y="{at + 3.5:.1f}" text-anchor="end">'
            f"{label(tick, chart.percent)}</text>"
        )
    for tick in x.ticks(6):
        if tick == int(tick):
            parts.append(
                f'<text class="tick" x="{x(tick):.1f}" y="{HEIGHT - 10}" text-anchor="middle">{int(tick):,}</text>'
            )
    return parts


def _path(points: Points, x: Scale, y: Scale) -> str:
    return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in points)


def _line(points: Points, x: Scale, y: Scale, color: int, faint: bool, dots: bool) -> list[str]:
    parts = [f'<polyline class="line c{color % 7}{" faint" if faint else ""}" points="{_path(points, x, y)}"/>']
    if dots or len(points) == 1:
        parts += [
            f'<circle class="dot k{color % 7}" cx="{x(step):.1f}" cy="{y(value):.1f}" r="3.2"/>'
            for step, value in points
        ]
    return parts


def _area(top: Points, below: Points, x: Scale, y: Scale, color: int) -> str:
    if len(top) == 1:
        (step, high), (_, low) = top[0], below[0]
        size = f'width="24" height="{y(low) - y(high):.1f}"'
        return f'<rect class="k{color % 7}" x="{x(step):.1f}" y="{y(high):.1f}" {size}/>'
    return f'<polygon class="area k{color % 7}" points="{_path(top, x, y)} {_path(below[::-1], x, y)}"/>'


def _hover(chart: Chart, layers: list[Points], x: Scale, y: Scale) -> list[str]:
    """Invisible strips, one a step, that show the step's values as a tooltip."""
    steps = sorted({step for points in layers for step, _ in points})
    if not 1 < len(steps) <= MAX_HOVER_POINTS:
        return []
    values: dict[float, list[str]] = {step: [] for step in steps}
    for series in chart.series:
        for step, value in series.points:
            shown = f"{value:.1%}" if chart.percent else f"{value:.4g}"
            values[step].append(f"{series.label} {shown}")
    edges = [x(steps[0]), *((x(a) + x(b)) / 2 for a, b in pairwise(steps)), x(steps[-1])]
    return [
        f'<rect class="hover" x="{left:.1f}" y="{TOP}" width="{max(0.5, right - left):.1f}" '
        f'height="{HEIGHT - BOTTOM - TOP}">'
        f"<title>step {step:g}&#10;{escape(chr(10).join(values[step]))}</title></rect>"
        for step, left, right in zip(steps, edges[:-1], edges[1:], strict=True)
    ]
