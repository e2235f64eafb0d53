"""Answers to what the page asks for, as plain data, from any thread. `app.py` makes HTTP of them, `open_run.py` reads
one run."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.orchestrator.observability.ui.charts.themes import charts_of
from penstock.orchestrator.observability.ui.runs.found import Runs, any_line_of, differing
from penstock.orchestrator.observability.ui.runs.own_files import read_config
from penstock.orchestrator.observability.ui.runs.rollouts import Wanted
from penstock.orchestrator.observability.ui.server.open_run import OpenRun

MAX_RUNS = 32
"""Most runs in one comparison, and whose metrics stay in memory: those that were asked for last."""


class NoSuchRun(Exception):
    """The error for a run that is not there. Its message is for people."""


class Answers:
    """Lifecycle: any answer at any time. An answer about one run waits for no other run."""

    def __init__(self, place: Path) -> None:
        self.runs = Runs(place)
        self._listing, self._opening = threading.Lock(), threading.Lock()
        self._open: OrderedDict[Path, OpenRun] = OrderedDict()
        """Runs that are open, by path; the one that was asked for last comes last."""

    def table(self) -> list[dict[str, Any]]:
        """The lines of all runs."""
        with self._listing:
            return [asdict(line) for line in self.runs.lines()]

    def run(self, run: str) -> dict[str, Any]:
        """The facts of one run: its line, its configuration, its events, and its charts."""
        return self._opened(run).described()

    def compared(self, runs: Sequence[str]) -> dict[str, Any]:
        """The comparison of several runs: charts that any of them has, and the differences of their configurations."""
        paths = {run: self._path(run) for run in runs[:MAX_RUNS]}
        configs = {run: read_config(path) for run, path in paths.items()}
        keys = dict.fromkeys(key for run in paths for key in self._opened(run).metrics())
        bounds = [config.get("max_staleness") for config in configs.values()]
        shared = {"max_staleness": bounds[0]} if bounds and all(bound == bounds[0] for bound in bounds) else {}
        return {
            "runs": {run: asdict(any_line_of(path, run)) for run, path in paths.items()},
            "differing": differing(configs),
            "charts": [chart.plain() for chart in charts_of(list(keys), shared)],
        }

    def series(
        self, run: str, keys: Sequence[str], points: int, first: float = float("-inf"), last: float = float("inf")
    ) -> dict[str, Any]:
        """Steps and values of each metric between two steps, by metric, and where there are more than `points`, the
        range around each."""
        return self._opened(run).series(keys, points, first, last)

    def samples(self, run: str, wanted: Wanted) -> dict[str, Any]:
        """A page of a run's samples, and how far its files are known."""
        return self._opened(run).samples(wanted)

    def sample(self, run: str, step: int, place: int) -> dict[str, Any]:
        """A sample with its tokens. Raises `LookupError`."""
        return self._opened(run).sample(step, place)

    def timeline(self, run: str, first: int | None, last: int | None) -> dict[str, Any]:
        """The timeline of a run: when actors were busy."""
        return self._opened(run).timeline(first, last)

    def state(self, run: str) -> dict[str, Any]:
        """The state of a run: which actors are there, and which wait for which."""
        return self._opened(run).state()

    def logs(self, run: str, member: str, text: str, only_trouble: bool) -> dict[str, Any]:
        """The lines that actors printed. Raises `LookupError`."""
        return self._opened(run).logs(member, text, only_trouble)

    def _path(self, run: str) -> Path:
        path = self.runs.path_of(run)
        if path is None:
            raise NoSuchRun(f"There is no run {run!r:.200} below {self.runs.place}.")
        return path

    def _opened(self, run: str) -> OpenRun:
        path = self._path(run)
        with self._opening:
            found = self._open.setdefault(path, OpenRun(path, run))
            self._open.move_to_end(path)
            while len(self._open) > MAX_RUNS:
                self._open.popitem(last=False)
            return found
