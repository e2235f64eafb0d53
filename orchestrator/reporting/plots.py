"""Which curves a run has, and the PNGs of them. `report.py` draws the same charts into the page (`drawing.py`).

`charts` decides from the metrics alone what there is to show; a run of three steps, or one that was interrupted, has
fewer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.orchestrator.reporting.faults import Fault
from penstock.workers.whole_files import replacing

COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#8b5cf6", "#ef4444", "#64748b", "#06b6d4")
"""Told apart on light and dark ground."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    label: str
    points: Points
    """(step, value), finite, by step."""
    faint: bool = False
    """The raw values behind a smoothed line."""
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    name: str
    """File name of the PNG."""
    title: str
    unit: str
    series: list[Series] = field(default_factory=list)
    stacked: bool = False
    log: bool = False
    bound: float | None = None
    """A dashed line: what must not be passed."""
    bottom: float | None = None
    top: float | None = None
    percent: bool = False


OF_THE_REWARD = ("mean", "std", "min", "max", "num_workers")
"""What is told of the reward itself, and of its workers; others of `reward/` are of several by name."""


def charts(metrics: Sequence[Mapping[str, Any]], max_staleness: int | None = None) -> list[Chart]:
    """The charts for which there is at least one finite value."""

    def lines(names: Mapping[str, str], dots: bool = False) -> list[Series]:
        return _lines(metrics, names, dots)

    stale = lines({"staleness/max": "max", "staleness/mean": "mean"})
    mismatch = lines({"mismatch/logprob_abs_max": "max", "mismatch/logprob_abs_mean": "mean"})
    accuracy = lines({"accuracy/heldout": "greedy"} | _named(metrics, "accuracy/", "accuracy/heldout"), dots=True)
    lengths = lines({"response_length/mean": "mean", "response_length/max": "max"})
    turns = lines({"turns/mean": "mean", "turns/max": "max"})
    held_out_rewards = lines(_named(metrics, "heldout_reward/"), dots=True)
    rewards = {name: label for name, label in _named(metrics, "reward/").items() if label not in OF_THE_REWARD}
    critic = lines({"critic/explained_variance": "explained variance", "critic/value_clip_fraction": "clipped values"})
    found = [
        _reward(metrics),
        Chart("accuracy", "Held-out accuracy", "", accuracy, bottom=0, top=1, percent=True),
        Chart("heldout_reward", "Held-out reward, of greedy attempts", "", held_out_rewards),
        Chart("rewards", "Rewards, each by itself", "", lines(rewards)),
        Chart("staleness", "Staleness of trained tokens", "versions", stale, bottom=0, bound=max_staleness),
        _time_by_phase(metrics),
        Chart("mismatch", "Trainer against engine", "|Δ log p|", mismatch, log=True),
        Chart("response_length", "Response length", "tokens", lengths, bottom=0),
        Chart("turns", "Turns of an attempt", "", turns, bottom=0),
        Chart("loss", "Loss", "", lines({"actor/loss": "loss", "actor/pg_loss": "policy gradient"})),
        Chart(
            "entropy", "Entropy and KL", "nats", lines({"actor/entropy": "entropy", "actor/kl": "KL to the reference"})
        ),
        Chart("value_loss", "Critic: loss", "", lines({"critic/value_loss": "value loss"}), bottom=0),
        Chart("critic", "Critic: what it explains of the returns", "", critic, top=1, percent=True),
        Chart("throughput", "Throughput", "samples/s", lines({"perf/samples_per_s": "samples/s"}), bottom=0),
        Chart("idle", "Idle share of the step", "", lines(_named(metrics, "idle/")), bottom=0, top=1, percent=True),
    ]
    return [chart for chart in found if any(series.points for series in chart.series)]


def points_of(metrics: Sequence[Mapping[str, Any]], name: str) -> Points:
    """(step, value) where the value is a finite number. The last entry of a step counts."""
    points = {}
    for entry in metrics:
        value, step = entry.get(name), entry.get("step")
        if isinstance(value, int | float) and isinstance(step, int | float) and math.isfinite(value):
            points[float(step)] = float(value)
    return sorted(points.items())


def smoothed(points: Points, weight: float = 0.8) -> Points:
    """Exponential moving average, started at the first value and corrected for that."""
    result, total, norm = [], 0.0, 0.0
    for step, value in points:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        result.append((step, total / norm))
    return result


def _reward(metrics: Sequence[Mapping[str, Any]]) -> Chart:
    points = points_of(metrics, "reward/mean")
    series = [Series("mean", points)]
    if len(points) > 10:
        series = [Series("each step", points, faint=True), Series("smoothed", smoothed(points))]
    return Chart("reward", "Reward", "", series if points else [])


def _time_by_phase(metrics: Sequence[Mapping[str, Any]]) -> Chart:
    names = {name: label for name, label in _named(metrics, "timing_s/").items() if label not in ("step", "checkpoint")}
    filled = [{**dict.fromkeys(names, 0.0), **entry} for entry in metrics if points_of([entry], "timing_s/step")]
    return Chart("time_by_phase", "Time by phase", "s", _lines(filled, names), stacked=True, bottom=0)


def _named(metrics: Sequence[Mapping[str, Any]], prefix: str, other_than: str = "") -> dict[str, str]:
    every = (name for entry in metrics for name in entry if name.startswith(prefix))
    names = dict.fromkeys(name for name in every if name != other_than)
    return {name: name.removeprefix(prefix) for name in names}


def _lines(metrics: Sequence[Mapping[str, Any]], names: Mapping[str, str], dots: bool = False) -> list[Series]:
    series = [Series(label, points_of(metrics, name), dots=dots) for name, label in names.items()]
    return [one for one in series if one.points]


INSIDE = (0.16, 0.15, 0.81, 0.75)
"""Left, bottom, width and height of the axes, as shares of the figure. A layout engine would draw each figure twice."""


def write_pngs(found: Sequence[Chart], directory: Path, faults: Sequence[Fault] = ()) -> list[Path]:
    """One PNG a chart in `directory`, with the steps at which members were lost."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # pyplot would choose a window system, and keep every figure

    directory.mkdir(parents=True, exist_ok=True)
    style: Any = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "font.size": 9,
    }
    files = []
    with rc_context(style):
        for chart in found:
            figure = Figure(figsize=(6, 3.2), dpi=130)
            axes = figure.add_axes(INSIDE)
            _draw(axes, chart)
            _mark(axes, chart, faults)
            files.append(directory / f"{chart.name}.png")
            with replacing(files[-1]) as part:
                figure.savefig(part, format="png")
    return files


def _draw(axes: Any, chart: Chart) -> None:
    if chart.stacked:
        steps = [step for step, _ in chart.series[0].points]
        values = [[value for _, value in series.points] for series in chart.series]
        axes.stackplot(steps, values, labels=[series.label for series in chart.series], colors=COLORS, alpha=0.85)
    else:
        solid = 0
        for series in chart.series:
            color = COLORS[solid % len(COLORS)]
            marker = "o" if series.dots or len(series.points) == 1 else None
            alpha, label = (0.3, None) if series.faint else (1.0, series.label)
            axes.plot(
                *zip(*series.points, strict=True),
                color=color,
                alpha=alpha,
                label=label,
                marker=marker,
                markersize=4,
                linewidth=1.6,
            )
            solid += not series.faint
    if chart.bound is not None:
        axes.axhline(chart.bound, color="#ef4444", linestyle="--", linewidth=1, label=f"bound {chart.bound:g}")
    if chart.log and all(value > 0 for series in chart.series for _, value in series.points):
        axes.set_yscale("log")
    if chart.bottom is not None or chart.top is not None:
        axes.set_ylim(bottom=chart.bottom, top=chart.top)
    if chart.percent:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set(title=chart.title, xlabel="step", ylabel=chart.unit)
    if len(chart.series) > 1 or chart.bound is not None:
        axes.legend(frameon=False, fontsize=8)


def _mark(axes: Any, chart: Chart, faults: Sequence[Fault]) -> None:
    steps = [step for series in chart.series for step, _ in series.points]
    for fault in faults:
        if min(steps) <= fault.step <= max(steps):
            until = min(fault.until_step or fault.step, max(steps))
            axes.axvspan(fault.step, until, color="#ef4444", alpha=0.25, linewidth=1.5)
