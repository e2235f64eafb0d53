"""A chart in pixels: scales, ticks, curves, and what hovering shows. `templates/chart.html.j2` makes SVG of it.

Called by `report.py`. Lines and areas have the number of a colour, so that light and dark pages share one drawing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from penstock.orchestrator.reporting.fault_drawing import Mark, marks_of
from penstock.orchestrator.reporting.faults import Fault
from penstock.orchestrator.reporting.plots import COLORS, Chart, Points

MAX_HOVER_POINTS = 240
BAR_WIDTH = 24


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


@dataclass(frozen=True)
class Curve:
    """A line with the places of its dots or, in a stacked chart, the outline of an area. Points in pixels."""

    label: str
    color: int
    faint: bool
    points: Points
    dots: Points


@dataclass(frozen=True)
class Strip:
    """An invisible strip around one step that shows the step's values as a tooltip."""

    left: float
    width: float
    text: str


@dataclass(frozen=True)
class Drawing:
    """Where everything of a chart lies."""

    WIDTH: ClassVar = 520
    HEIGHT: ClassVar = 250
    LEFT: ClassVar = 52
    RIGHT: ClassVar = 508
    TOP: ClassVar = 10
    BOTTOM: ClassVar = 220

    chart: Chart
    curves: list[Curve]
    rows: list[tuple[float, str]]
    """Grid lines: y and label."""
    columns: list[tuple[float, str]]
    """Labels below: x and step."""
    bound: float | None
    """y of the dashed line."""
    strips: list[Strip]
    marks: list[Mark]
    """Members that were lost."""

    @classmethod
    def of(cls, chart: Chart, faults: Sequence[Fault] = ()) -> "Drawing":
        layers = _stack(chart) if chart.stacked else [series.points for series in chart.series]
        x, y = _scales(chart, layers)
        return cls(
            chart,
            _areas(chart, layers, x, y) if chart.stacked else _lines(chart, x, y),
            [(y(tick), label(tick, chart.percent)) for tick in y.ticks()],
            [(x(tick), f"{int(tick):,}") for tick in x.ticks(6) if tick == int(tick)],
            None if chart.bound is None else y(chart.bound),
            _strips(chart, layers, x),
            marks_of(faults, [step for points in layers for step, _ in points], x),
        )

    @property
    def has_legend(self) -> bool:
        return len(self.curves) > 1 or self.bound is not None


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
    x = Scale(min(steps), max(steps), Drawing.LEFT, Drawing.RIGHT)
    return x, Scale(low, high, Drawing.BOTTOM, Drawing.TOP, log)


def label(value: float, percent: bool = False) -> str:
    if percent:
        return f"{value:.0%}"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.10g}" if abs(value) >= 1000 else f"{round(value, 6):g}"


def _lines(chart: Chart, x: Scale, y: Scale) -> list[Curve]:
    """A faint line shares the colour of the one after it."""
    curves: list[Curve] = []
    color = 0
    for series in chart.series:
        points = [(x(step), y(value)) for step, value in series.points]
        dots = points if series.dots or len(points) == 1 else []
        curves.append(Curve(series.label, color % len(COLORS), series.faint, points, dots))
        color += not series.faint
    return curves


def _areas(chart: Chart, layers: list[Points], x: Scale, y: Scale) -> list[Curve]:
    """Each from the layer below to its own; one of a single step is a bar."""
    curves = []
    below = [(step, 0.0) for step, _ in layers[0]]
    for color, (series, layer) in enumerate(zip(chart.series, layers, strict=True)):
        outline = [(x(step), y(value)) for step, value in layer + below[::-1]]
        if len(layer) == 1:
            (left, top), (_, bottom) = outline
            outline = [(left, top), (left + BAR_WIDTH, top), (left + BAR_WIDTH, bottom), (left, bottom)]
        curves.append(Curve(series.label, color % len(COLORS), False, outline, []))
        below = layer
    return curves


def _strips(chart: Chart, layers: list[Points], x: Scale) -> list[Strip]:
    steps = sorted({step for points in layers for step, _ in points})
    if not 1 < len(steps) <= MAX_HOVER_POINTS:
        return []
    texts = {step: [f"step {step:g}"] for step in steps}
    for series in chart.series:
        for step, value in series.points:
            texts[step].append(f"{series.label} {value:.1%}" if chart.percent else f"{series.label} {value:.4g}")
    edges = [x(steps[0]), *((x(a) + x(b)) / 2 for a, b in pairwise(steps)), x(steps[-1])]
    return [
        Strip(left, max(0.5, right - left), "\n".join(texts[step]))
        for step, left, right in zip(steps, edges[:-1], edges[1:], strict=True)
    ]
