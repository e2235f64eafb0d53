"""The display of a run while it lasts: live in a terminal, one line a step elsewhere.

The controller calls `phase` when it begins something that takes time, `step` once a step, `note` for what is worth a
line, `warn` for what is wrong with the run. Bar, spinner, clocks and the estimate are rich's. The functions that put a
step's metrics into a line or a table are pure.
"""

import math
import threading
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from penstock.conf.run import RunConfig
from penstock.orchestrator.observability.charts.cards import elapsed
from penstock.orchestrator.observability.charts.themes import policies_in
from penstock.orchestrator.run_directory.failed_writes import FailedWrites

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
        *((policy, f"{policy}/reward/mean", "{:.3f}") for policy in policies_in(metrics)),
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
    for name in history:
        label = labels.get(name, name.removesuffix("/reward/mean"))
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


NUM_NOTES = 5
WIDTH = 100


class ProgressDisplay:
    """Lifecycle: made at the start, `close`d at the end; in between any order of calls, from any thread.

        progress = ProgressDisplay(config, "arithmetic-20260101-120000")
        progress.phase("starting vLLM (about 20 s)")
        progress.step(1, {"reward/mean": 0.4, "timing_s/step": 1.2})
        progress.note("checkpoint written")
        progress.close()

    A run inside a run (a warm start) closes its own before the outer one goes on.
    """

    def __init__(
        self,
        config: RunConfig,
        title: str,
        *,
        console: Console | None = None,
        failed_writes: FailedWrites | None = None,
    ) -> None:
        """`failed_writes`: counts lines that the output does not take."""
        self.title = title
        self.max_steps = config.trainer.max_steps
        self.max_staleness = config.max_staleness
        self.metrics: dict[str, Any] = {}
        self.history: dict[str, list[float]] = {"reward/mean": [], "accuracy/heldout": [], "actor/loss": []}
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self._newest: tuple[str, str, str] | None = None
        """Level, text and advice of the newest warning."""
        self.current_step = 0
        self._lock = threading.RLock()
        self._console = console or Console()
        self._failed_writes = failed_writes or FailedWrites(lambda *_: None)
        self._closed = False
        self._steps = Bars(
            BarColumn(None, style="grey37", complete_style="cyan", finished_style="green"),
            TextColumn("step {task.completed}/{task.total}"),
            Clock(),
            speed_estimate_period=math.inf,  # the pace of all steps: one may take minutes
            expand=True,
        )
        self._all_steps = self._steps.add_task("", total=self.max_steps)
        self._phases = Bars(SpinnerColumn(style="cyan"), TextColumn("{task.description}", markup=False), Clock())
        self._phase = self._phases.add_task("starting", total=None)
        live = config.tracking.progress and self._console.is_terminal
        self._live = self._start_live() if live else None

    def _start_live(self) -> Live:
        live = Live(console=self._console, get_renderable=self.render, refresh_per_second=4, vertical_overflow="crop")
        live.start()
        return live

    def phase(self, text: str) -> None:
        """Show what goes on from now on, with its elapsed time."""
        changed = text != self._phases.tasks[0].description
        self._phases.reset(self._phase, description=text)
        if changed and self.current_step == 0:
            self._print_timed(text)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a step that is done. `metrics`: as in metrics.jsonl. Step 0 is an evaluation before training."""
        with self._lock:
            self.current_step = max(step, self.current_step)
            self._steps.update(self._all_steps, completed=self.current_step)
            self.metrics |= {**metrics, "step": self.current_step}  # an evaluation's line is of an earlier step
            for policy in policies_in(metrics):
                self.history.setdefault(f"{policy}/reward/mean", [])
            for name, values in self.history.items():
                if is_number(metrics.get(name)):
                    values.append(float(metrics[name]))
        left = self._steps.tasks[0].time_remaining
        eta = f"  ETA {elapsed(left)}" if left else ""
        self._print(plain_line(step, self.max_steps, metrics) + eta)

    def note(self, text: str) -> None:
        """Show a line that stays."""
        with self._lock:
            self.notes.append(text)
        self._print_timed(text)

    def warn(self, level: str, text: str, advice: str) -> None:
        """Show what is wrong with the run, and what to do. The newest warning stays on the screen."""
        with self._lock:
            self.warnings.append(f"{level}: {text}. {advice}")
            self._newest = (level, text, advice)
        self._print_timed(self.warnings[-1])

    def _print_timed(self, text: str) -> None:
        self._print(f"{elapsed(self._steps.tasks[0].elapsed)}  {text}")

    def _print(self, line: str) -> None:
        """Print a line to a log file. Rich's own display would write its last state only, and, after a failed write,
        repeat all that is not written with each line."""
        if self._console.quiet or (self._live is not None and not self._closed):
            return
        with self._failed_writes.tolerating("output"):
            try:
                print(line, file=self._console.file, flush=True)
            except BrokenPipeError:  # such as `| head`, which reads no more
                self._console.on_broken_pipe()

    def close(self) -> None:
        """Leave the last state on the screen. May be called twice."""
        if not self._closed:
            self._closed = True
            if self._live is not None:
                with self._failed_writes.tolerating("output"):  # a terminal that is closed
                    self._live.refresh()
                    self._live.stop()

    def render(self) -> RenderableType:
        """The whole display, made in the refresh thread."""
        with self._lock:
            width = min(WIDTH, self._console.width)
            parts: list[RenderableType] = [Text(self.title, style="bold"), Constrain(self._steps, width)]
            if self.metrics:
                parts.append(Constrain(step_view(self.metrics, self.history, self.max_staleness, width), width))
            if self._newest is not None:
                parts.append(Constrain(_warning(*self._newest), width))
            parts += [_line(f"  · {note}", "dim") for note in self.notes[-NUM_NOTES:]]
            if not self._closed:
                parts.append(self._phases)
            return Group(*parts)


class Clock(ProgressColumn):
    """Column of the time that a task has taken, and will take where that can be told."""

    def render(self, task: Task) -> Text:
        more = "" if task.finished or task.time_remaining is None else f"  ETA {elapsed(task.time_remaining)}"
        return Text(elapsed(task.elapsed) + more, style="dim", no_wrap=True)


def _line(text: str, style: str) -> Text:
    return Text(text, style=style, overflow="ellipsis", no_wrap=True)


def _warning(level: str, text: str, advice: str) -> Table:
    table = Table.grid(padding=(0, 0, 0, 1), pad_edge=True)
    table.add_column(width=LABEL)
    table.add_column()
    table.add_row(Text(level, "yellow"), Text(text, "yellow"))
    table.add_row("", Text(advice, "dim"))
    return table
