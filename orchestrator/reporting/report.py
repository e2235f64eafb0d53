"""The page about a run, made from its directory alone: `report.html` in one file, and the plots as PNGs beside it.

Called at the end of a run and by `penstock report RUN`. Whatever a run lacks (steps, samples, numbers) is left out of
its page.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from penstock.orchestrator.configuration.differences import differences_of
from penstock.orchestrator.reporting import svg
from penstock.orchestrator.reporting.plots import Chart, charts, write_pngs
from penstock.orchestrator.reporting.samples import SampleRow, read_samples
from penstock.orchestrator.reporting.summary import Card, cards
from penstock.orchestrator.run_directory import ENDS, STARTS, RunDirectory

STYLE_FILE = Path(__file__).parent / "report.css"
MAX_EVENTS = 60


def write_report(path: str | Path, *, pngs: bool = True) -> Path:
    """(Re)build report.html and plots/ of the run in `path`; returns the page. Raises `ConfigError` if there is no
    run."""
    directory = RunDirectory.open(path)
    config = directory.read_config()
    found = charts(directory.read_metrics(), config.get("max_staleness"))
    directory.write_text("report.html", page(directory, found))
    if pngs:
        write_pngs(found, directory.plots)
    return directory.report


def page(directory: RunDirectory, found: Sequence[Chart]) -> str:
    """The whole HTML document."""
    config, events = directory.read_config(), directory.read_events()
    name = str(config.get("name") or directory.path.name)
    sections = [
        _header(name, config, events),
        '<section class="cards">' + "".join(map(_card, cards(directory))) + "</section>",
        '<section class="charts">' + "".join(map(_figure, found)) + "</section>" if found else _nothing_yet(),
        _samples(directory),
        _events(events),
        _config(config),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)} · Penstock</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<style>{STYLE_FILE.read_text(encoding='utf-8')}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _header(name: str, config: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> str:
    facts = {
        "recipe": Path(str(config["recipe"])).name if config.get("recipe") else None,
        "algorithm": (config.get("algorithm") or {}).get("name"),
        "engine": (config.get("rollout") or {}).get("engine"),
        "max_staleness": config.get("max_staleness"),
        "seed": config.get("seed"),
        "started": str(events[0].get("time", ""))[:19].replace("T", " ") + " UTC" if events else None,
    }
    items = "".join(f"<li><b>{key}</b> {escape(str(value))}</li>" for key, value in facts.items() if value is not None)
    lead = escape(str(config.get("description") or ""))
    return (
        "<header><p class=brand>Penstock run</p>"
        f"<h1>{escape(name)} {_state(events)}</h1><p class=lead>{lead}</p>"
        f"<ul class=facts>{items}</ul></header>"
    )


def _state(events: Sequence[Mapping[str, Any]]) -> str:
    """How the run ended, by its last turn: one that failed and was resumed has not failed."""
    turns = [str(event.get("kind")) for event in events if event.get("kind") in (*STARTS, *ENDS)]
    text = {"failed": "failed", "interrupted": "interrupted", "end": "finished"}.get(turns[-1] if turns else "")
    return f'<span class="state {text}">{text}</span>' if text else '<span class="state running">not finished</span>'


def _card(card: Card) -> str:
    tone = {True: " good", False: " bad", None: ""}[card.good]
    detail = f"<small>{escape(card.detail)}</small>" if card.detail else ""
    return (
        f'<div class="card{tone}"><span>{escape(card.label)}</span><strong>{escape(card.value)}</strong>{detail}</div>'
    )


def _figure(chart: Chart) -> str:
    unit = f" <em>{escape(chart.unit)}</em>" if chart.unit else ""
    caption = f"<b>{escape(chart.title)}</b>{unit}<div class=legend>{svg.legend(chart)}</div>"
    return f"<figure><figcaption>{caption}</figcaption>{svg.draw(chart)}</figure>"


def _nothing_yet() -> str:
    return "<p class=empty>No step was finished, so there is nothing to plot.</p>"


def _samples(directory: RunDirectory) -> str:
    step, rows = read_samples(directory)
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("prompt", "response", "answer", "reward", "advantage", "versions"))
    return (
        f"<section><h2>Samples trained at step {step}</h2>{_table('samples', map(_sample_row, rows), head)}</section>"
    )


def _table(kind: str, rows: Iterable[str], head: str = "") -> str:
    thead = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<div class=scroll><table class={kind}>{thead}<tbody>{''.join(rows)}</tbody></table></div>"


def _cell(text: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"


def _sample_row(row: SampleRow) -> str:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}"

    tone = "" if row.reward is None else " good" if row.reward > 0 else " bad"
    texts = "".join(_cell(text, "text") for text in (row.prompt, row.response, row.answer))
    numbers = _cell(number(row.reward), f"num{tone}") + _cell(number(row.advantage), "num") + _cell(row.versions, "num")
    return f"<tr{' class=first' if row.first_of_group else ''}>{texts}{numbers}</tr>"


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    if not events:
        return ""
    half = MAX_EVENTS // 2
    shown = events if len(events) <= MAX_EVENTS else [*events[:half], *events[-half:]]
    num_hidden = len(events) - len(shown)
    hidden = f"<p class=empty>{num_hidden} events in between are in events.jsonl.</p>" if num_hidden else ""
    return f"<section><h2>Events</h2>{_table('events', map(_event_row, shown))}{hidden}</section>"


def _event_row(event: Mapping[str, Any]) -> str:
    told = {key: value for key, value in event.items() if key not in ("time", "kind") and value is not None}
    details = ", ".join(f"{key}={_short(value)}" for key, value in told.items())
    kind = f"<td><b>{escape(str(event.get('kind', '')))}</b></td>"
    return f"<tr>{_cell(str(event.get('time', ''))[11:19], 'num')}{kind}{_cell(details)}</tr>"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= 400 else text[:399] + "…"


def _config(config: Mapping[str, Any]) -> str:
    changed = yaml.safe_dump(differences_of(config), sort_keys=False, allow_unicode=True, width=100)
    whole = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=100)
    return (
        f"<section><h2>Configuration</h2><p class=empty>What differs from the defaults.</p><pre>{escape(changed)}</pre>"
        f"<details><summary>Every key</summary><pre>{escape(whole)}</pre></details></section>"
    )
