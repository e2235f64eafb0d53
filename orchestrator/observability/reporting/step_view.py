"""A step's metrics as people read them: a line of a log, and what the live display shows. Pure."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

BLOCKS = "▁▂▃▄▅▆▇█"
SIDES = {"rollout": "engines", "train": "ranks"}
"""Names of the sides that wait, by the names of `idle/`."""
LABEL = 11
"""Width of the label before a line, in characters."""
WAITS_LONG = 0.5
"""Share of a step from which a wait is coloured."""


def sparkline(values: list[float], width: int = 32, low: float | None = None, high: float | None = None) -> str:
    """The last values as a row of blocks; longer histories are averaged down to `width`."""
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low = min(values) if low is None else low
    high = max(values) if high is None else high
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(7, max(0, int((value - low) / span * 7.999)))] for value in values)


def plain_line(step: int, max_steps: int, metrics: Mapping[str, Any]) -> str:
    """The line of one step for a log file: only what is there."""
    shown = (
        ("reward", "reward/mean", "{:.3f}"),
        ("accuracy", "accuracy/heldout", "{:.1%}"),
        ("loss", "actor/loss", "{:.4f}") if "reward/mean" not in metrics else ("kl", "actor/kl", "{:.4f}"),
        ("length", "response_length/mean", "{:.1f}"),
        ("staleness", "staleness/max", "{:.0f}"),
        ("mismatch", "mismatch/logprob_abs_mean", "{:.1e}"),
        ("samples/s", "perf/samples_per_s", "{:.1f}"),
        ("tokens/s", "perf/tokens_per_s", "{:,.0f}"),
        ("s", "timing_s/step", "{:.2f}"),
    )
    parts = [f"step {step}/{max_steps}"]
    parts += [f"{label} {form.format(metrics[name])}" for label, name, form in shown if is_number(metrics.get(name))]
    parts += [f"{who} idle {share:.0%}" for who, share in idle(metrics).items()]
    parts += [f"dropped({name.partition('/')[2]}) {metrics[name]:.0f}" for name in dropped(metrics)]
    return "  ".join(parts)


def dropped(metrics: Mapping[str, Any]) -> list[str]:
    """Names of the reasons for which anything was dropped."""
    return [name for name in metrics if name.startswith("dropped/") and metrics[name]]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def step_view(metrics: Mapping[str, Any], history: Mapping[str, list[float]], bound: int, width: int) -> RenderableType:
    """The view of a step. `history`: values of the metrics that are drawn as curves. `bound`: that of the staleness."""
    parts: list[RenderableType] = [_table(metrics, bound), *_curves(history, width), _waits(metrics), _phases(metrics)]
    if dropped(metrics):
        reasons = ", ".join(f"{name.partition('/')[2]} {metrics[name]:.0f}" for name in dropped(metrics))
        parts.append(Text(f" {'dropped':<{LABEL}}{reasons}", style="yellow"))
    return Group(*parts)


def _table(metrics: Mapping[str, Any], bound: int) -> Table:
    table = Table.grid(padding=(0, 2, 0, 1), pad_edge=True)
    for style in ("dim", "", "dim", "", "dim", ""):
        table.add_column(style=style, no_wrap=True)

    def show(name: str, form: str = "{:.3f}") -> str:
        return form.format(metrics[name]) if is_number(metrics.get(name)) else "–"

    cells = [
        ("reward", show("reward/mean")),
        ("held-out", show("accuracy/heldout", "{:.1%}")),
        ("samples/s", show("perf/samples_per_s", "{:.1f}")),
        ("length", show("response_length/mean", "{:.1f}")),
        ("clipped", show("response_length/clip_ratio", "{:.1%}")),
        ("tokens/s", show("perf/tokens_per_s", "{:,.0f}")),
        ("staleness", f"{show('staleness/max', '{:.0f}')} ≤ {bound}"),
        ("mismatch", show("mismatch/logprob_abs_mean", "{:.1e}")),
        ("step", show("timing_s/step", "{:.2f} s")),
    ]
    for first in range(0, len(cells), 3):
        table.add_row(*(text for pair in cells[first : first + 3] for text in pair))
    return table


def _curves(history: Mapping[str, list[float]], width: int) -> list[RenderableType]:
    labels = {"reward/mean": "reward", "accuracy/heldout": "held-out", "actor/loss": "loss"}
    found: list[RenderableType] = []
    for name, label in labels.items():
        if len(history[name]) > 1 and not (name == "actor/loss" and history["reward/mean"]):
            line = sparkline(history[name], width=min(60, width - 34))
            ends = f"{history[name][0]:.3f} → {history[name][-1]:.3f}"
            found.append(Text.assemble((f" {label:<{LABEL}}", "dim"), (line, "green"), (f"  {ends}", "")))
    return found


def idle(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The share of the step that each side waited."""
    return {who: metrics[f"idle/{side}"] for side, who in SIDES.items() if is_number(metrics.get(f"idle/{side}"))}


def _waits(metrics: Mapping[str, Any]) -> Text:
    """The line about which side waited for the other."""
    parts: list[tuple[str, str]] = []
    for who, share in idle(metrics).items():
        parts += [(" · ", "dim")] if parts else []
        parts.append((f"{who} idle {share:.0%}", "yellow" if share > WAITS_LONG else ""))
    return Text.assemble((f" {'waits':<{LABEL}}", "dim"), *(parts or [("–", "")]))


def _phases(metrics: Mapping[str, Any]) -> Text:
    """The line of the last step's phases, longest first: `rollout 0.80 s · train 0.41 s`."""
    seconds = {
        name.partition("/")[2]: metrics[name]
        for name in metrics
        if name.startswith("timing_s/") and name != "timing_s/step" and is_number(metrics[name])
    }
    phases = [f"{name} {seconds[name]:.2f} s" for name in sorted(seconds, key=lambda name: -seconds[name])]
    text = Text.assemble((f" {'time':<{LABEL}}", "dim"), " · ".join(phases) or "–", no_wrap=True)
    text.overflow = "ellipsis"
    return text
