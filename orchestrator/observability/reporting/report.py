"""The page about a run, made from its directory alone: `report.html` in one file, and the plots as PNGs beside it.

It is made at the end of a run and by `penstock report RUN`. What the page says is gathered here; how it looks is in
`templates/`. What a run lacks (steps, samples, metrics) is left out of its page.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from penstock.orchestrator.observability.cards import cards, elapsed
from penstock.orchestrator.observability.differences import differences_of
from penstock.orchestrator.observability.faults import Fault, duration_s, faults_of
from penstock.orchestrator.observability.marks import marks_of
from penstock.orchestrator.observability.reporting.samples import read_samples
from penstock.orchestrator.observability.ui import bundle
from penstock.orchestrator.observability.ui.charts.chart import Chart, drawn
from penstock.orchestrator.observability.ui.charts.pngs import write_pngs
from penstock.orchestrator.observability.ui.charts.themes import charts_of
from penstock.orchestrator.observability.ui.runs.columns import Columns
from penstock.orchestrator.observability.ui.runs.found import ENDED
from penstock.orchestrator.run_directory.fetching import at_place, bring_all
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_lock import last_turn

TEMPLATES = Path(__file__).parent / "templates"
SCRIPT = ("colors.js", "dom.js", "chart.js", "board.js", "report.js")
MAX_EVENTS = 60
MIN_WIDTH = 3.0
GAP = 7.0
MOST_LANES = 12


def report_of(run: str) -> str:
    """Rebuild the report of the run in a directory or at a URL, where it is brought with all that is missing there.
    Returns the page's place. Raises `ConfigError` if there is no run, `CheckpointError` for a URL that does not take
    it."""
    with at_place(run, more=_last_samples) as directory:
        page = write_report(directory.path)
        if directory.url is None:
            return str(page)
        bring_all(directory)
        return f"{directory.url}/{page.name}"


def write_report(path: str | Path, *, pngs: bool = True) -> Path:
    """(Re)build report.html and plots/ of the run in `path`; returns the page. Raises `ConfigError` if there is no
    run."""
    directory = RunDirectory.open(path)
    config = directory.read_config()
    columns = Columns(directory.metrics_file)
    columns.update()
    charts = charts_of(columns.keys, config)
    directory.write_text("report.html", page(directory, config, charts, columns))
    if pngs:
        write_pngs(charts, columns, directory.plots, marks_of(directory.read_events()))
    return directory.report


def _last_samples(names: Sequence[str]) -> list[str]:
    """Name of the newest file of samples, as the page shows what was trained last."""
    steps = {int(found[1]): name for name in names if (found := re.fullmatch(r"samples/step_(\d+)\.parquet", name))}
    return [steps[max(steps)]] if steps else []


def page(directory: RunDirectory, config: Mapping[str, Any], charts: Sequence[Chart], columns: Columns) -> str:
    """The whole HTML document."""
    events = directory.read_events()
    faults = faults_of(events)
    samples_step, samples = read_samples(directory)
    shown = events if len(events) <= MAX_EVENTS else [*events[: MAX_EVENTS // 2], *events[-MAX_EVENTS // 2 :]]
    template = _environment().get_template("report.html.j2")
    return template.render(
        name=str(config.get("name") or directory.path.name),
        description=config.get("description") or "",
        state=_state(events),
        facts=_facts(config, events),
        cards=cards(columns, config, events, duration_s(events)),
        numbers={
            "charts": [chart.plain() for chart in charts],
            "curves": drawn(charts, columns),
            "marks": [mark.plain() for mark in marks_of(events)],
        },
        style=bundle.style("vendor/uPlot.min.css", "style.css"),
        library=bundle.library(),
        script=bundle.script(*SCRIPT),
        faults=faults,
        timeline=Timeline.of(faults, duration_s(events)),
        samples_step=samples_step,
        samples=samples,
        events=[_event(event) for event in shown],
        num_hidden_events=len(events) - len(shown),
        config_changed=_yaml(differences_of(config)),
        config_whole=_yaml(config),
    )


@dataclass(frozen=True)
class Label:
    """The label of a bar, beside it towards the middle of the drawing: the member's role, and how long it was away."""

    x: float
    anchor: str
    text: str

    @classmethod
    def beside(cls, left: float, width: float, middle: float, fault: Fault) -> "Label":
        text = fault.role if fault.seconds is None else f"{fault.role}, {fault.seconds:.1f} s"
        is_left = left + width / 2 < middle
        return cls(left + width + GAP if is_left else left - GAP, "start" if is_left else "end", text)


@dataclass(frozen=True)
class Bar:
    left: float
    width: float
    lane: float
    """y of the lane's upper edge."""
    is_open: bool
    """True if no other member took the place."""
    text: str
    label: Label


@dataclass(frozen=True)
class Timeline:
    """Faults in pixels: the times at which members were away, by wall time. `templates/faults.html.j2` draws it.
    Members in lanes, those that were lost first on top."""

    WIDTH: ClassVar = 1060
    LEFT: ClassVar = 170
    RIGHT: ClassVar = 1045
    LANE: ClassVar = 22
    BAR: ClassVar = 12

    lanes: list[tuple[float, str]]
    """y of the middle, and the member."""
    bars: list[Bar]
    columns: list[tuple[float, str]]
    """x and wall time."""
    height: float

    @classmethod
    def of(cls, faults: Sequence[Fault], total_s: float) -> "Timeline | None":
        """The timeline; None without faults. `total_s`: seconds of the run so far."""
        if not faults:
            return None
        members = list(dict.fromkeys(fault.member for fault in faults))[:MOST_LANES]
        total_s = max(total_s, *(fault.at_s + (fault.seconds or 0.0) for fault in faults), 1.0)
        scale = (cls.RIGHT - cls.LEFT) / total_s
        bars = []
        for fault in faults:
            if fault.member in members:
                left = cls.LEFT + fault.at_s * scale
                width = max(MIN_WIDTH, (total_s - fault.at_s if fault.seconds is None else fault.seconds) * scale)
                lane = members.index(fault.member) * cls.LANE + (cls.LANE - cls.BAR) / 2
                label = Label.beside(left, width, (cls.LEFT + cls.RIGHT) / 2, fault)
                bars.append(Bar(left, width, lane, fault.seconds is None, fault.text, label))
        lanes = [(number * cls.LANE + cls.LANE / 2, member) for number, member in enumerate(members)]
        columns = [(cls.LEFT + part / 5 * (cls.RIGHT - cls.LEFT), elapsed(part / 5 * total_s)) for part in range(6)]
        return cls(lanes, bars, columns, len(members) * cls.LANE)


@cache
def _environment() -> Environment:
    """The template environment, made once: it keeps the templates that it has compiled."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = lambda value: "" if value is None else f"{value:.3g}"
    environment.filters["elapsed"] = elapsed
    environment.filters["px"] = lambda value: f"{value:.1f}"
    environment.filters["path"] = lambda points: " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return environment


def _facts(config: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Facts for below the title; None: unknown."""
    return {
        "recipe": Path(str(config["recipe"])).name if config.get("recipe") else None,
        "algorithm": (config.get("algorithm") or {}).get("name"),
        "engine": (config.get("rollout") or {}).get("engine"),
        "max_staleness": config.get("max_staleness"),
        "seed": config.get("seed"),
        "started": str(events[0].get("time", ""))[:19].replace("T", " ") + " UTC" if events else None,
    }


def _state(events: Sequence[Mapping[str, Any]]) -> str:
    """The end of the run in words, by its last turn."""
    return ENDED.get(str(last_turn(events).get("kind")), "not finished")


def _event(event: Mapping[str, Any]) -> dict[str, str]:
    told = {key: value for key, value in event.items() if key not in ("time", "kind") and value is not None}
    return {
        "time": str(event.get("time", ""))[11:19],
        "kind": str(event.get("kind", "")),
        "details": ", ".join(f"{key}={_short(value)}" for key, value in told.items()),
    }


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= 400 else text[:399] + "…"


def _yaml(value: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, width=100))
