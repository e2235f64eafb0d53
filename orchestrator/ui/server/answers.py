"""What the page asks for, as plain data. Pure but for the files that are read; `app.py` makes HTTP of it."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from penstock.orchestrator.configuration.differences import differences_of
from penstock.orchestrator.recording.json_lines import last_lines
from penstock.orchestrator.summary.cards import cards
from penstock.orchestrator.summary.marks import marks_of
from penstock.orchestrator.ui.charts.drawn import plain
from penstock.orchestrator.ui.charts.themes import charts_of
from penstock.orchestrator.ui.runs.columns import Columns
from penstock.orchestrator.ui.runs.found import TAIL_BYTES, Runs, differing, line_of, read_config
from penstock.orchestrator.ui.runs.rollouts import Rollouts, Wanted
from penstock.orchestrator.ui.runs.thinning import thinned
from penstock.orchestrator.ui.runs.token_texts import TokenTexts

MAX_EVENTS = 500
"""The newest, that are shown."""
MAX_POINTS = 4000
"""Of a curve, whatever is asked for."""
MAX_RUNS = 32
"""In one comparison."""


class NoSuchRun(Exception):
    """Its message is for people."""


class Answers:
    """Belongs to one thread at a time: `app.py` sees to it."""

    def __init__(self, place: Path) -> None:
        self.runs = Runs(place)
        self._columns: dict[Path, Columns] = {}
        self._rollouts: dict[Path, Rollouts] = {}
        self._texts: dict[Path, TokenTexts] = {}

    def table(self) -> list[dict[str, Any]]:
        """All runs, one line each."""
        return [asdict(line) for line in self.runs.lines()]

    def run(self, run: str) -> dict[str, Any]:
        """One run: its line and cards, what it was told, what happened, which charts it has."""
        path = self._path(run)
        config = read_config(path)
        columns = self._read(path)
        line = line_of(path, run)
        events = last_lines(path / "events.jsonl", TAIL_BYTES)
        return {
            "line": asdict(line),
            "cards": [asdict(card) for card in cards(columns, config, events, line.seconds or 0.0)],
            "description": config.get("description") or "",
            "config": config,
            "changed": differences_of(config),
            "events": events[-MAX_EVENTS:],
            "marks": [mark.plain() for mark in marks_of(events)],
            "charts": [chart.plain() for chart in charts_of(columns.keys, config)],
            "num_steps": len(columns.steps),
            "num_unreadable": columns.num_unreadable,
        }

    def compared(self, runs: Sequence[str]) -> dict[str, Any]:
        """Several runs: the charts that any of them has, and in what their configurations differ."""
        paths = {run: self._path(run) for run in runs[:MAX_RUNS]}
        configs = {run: read_config(path) for run, path in paths.items()}
        keys = dict.fromkeys(key for path in paths.values() for key in self._read(path).keys)
        bounds = {config.get("max_staleness") for config in configs.values()}
        shared = {"max_staleness": bounds.pop()} if len(bounds) == 1 else {}
        return {
            "runs": {run: asdict(line_of(path, run)) for run, path in paths.items()},
            "differing": differing(configs),
            "charts": [chart.plain() for chart in charts_of(list(keys), shared)],
        }

    def series(
        self, run: str, keys: Sequence[str], points: int, first: float = -np.inf, last: float = np.inf
    ) -> dict[str, Any]:
        """By metric: steps and values, and where there are more than `points`, the range around each."""
        columns = self._read(self._path(run))
        found = {}
        for key in keys:
            few = thinned(columns.steps, columns[key], max(1, min(points, MAX_POINTS)), first, last)
            found[key] = {"steps": plain(few.steps), "mean": plain(few.mean)}
            if few.low is not None and few.high is not None:
                found[key] |= {"low": plain(few.low), "high": plain(few.high)}
        return found

    def samples(self, run: str, wanted: Wanted) -> dict[str, Any]:
        """A page of a run's samples, and how far its files are known."""
        path = self._path(run)
        rollouts = self._rollouts.setdefault(path, Rollouts(path / "samples"))
        rollouts.update()
        known, every = rollouts.num_files
        found = rollouts.find(wanted)
        return {
            **found,
            "known": known,
            "files": every,
            "unreadable": rollouts.num_unreadable,
            "reasons": rollouts.reasons,
        }

    def sample(self, run: str, step: int, place: int) -> dict[str, Any]:
        """One sample with its tokens. Raises `LookupError`."""
        path = self._path(run)
        if path not in self._texts:
            self._texts[path] = TokenTexts(path, read_config(path))
        row = self._rollouts.setdefault(path, Rollouts(path / "samples")).sample(step, place)
        return {**row, "token_texts": self._texts[path].of(row.get("response_ids") or [])}

    def _path(self, run: str) -> Path:
        path = self.runs.path_of(run)
        if path is None:
            raise NoSuchRun(f"there is no run {run!r:.200} below {self.runs.place}.")
        return path

    def _read(self, path: Path) -> Columns:
        columns = self._columns.setdefault(path, Columns(path / "metrics.jsonl"))
        columns.update()
        return columns
