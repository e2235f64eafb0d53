"""The page about a run, made from its directory alone: `report.html` in one file, and the plots as PNGs beside it.

It is made at the end of a run and by `penstock report RUN`. What the page says is gathered here; how it looks is in
`templates/`. What a run lacks (steps, samples, metrics) is left out of its page.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from penstock.orchestrator.observability.differences import differences_of
from penstock.orchestrator.observability.reporting.fault_drawing import Timeline
from penstock.orchestrator.observability.reporting.samples import read_samples
from penstock.orchestrator.observability.summary.cards import cards
from penstock.orchestrator.observability.summary.elapsed import elapsed
from penstock.orchestrator.observability.summary.faults import duration_s, faults_of
from penstock.orchestrator.observability.summary.marks import marks_of
from penstock.orchestrator.observability.ui import bundle
from penstock.orchestrator.observability.ui.charts.chart import Chart
from penstock.orchestrator.observability.ui.charts.drawn import drawn
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
