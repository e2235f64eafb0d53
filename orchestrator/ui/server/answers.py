"""What the page asks for, as plain data, of any thread. `app.py` makes HTTP of it, `open_run.py` reads one run."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.orchestrator.ui.charts.themes import charts_of
from penstock.orchestrator.ui.runs.found import Runs, any_line_of, differing
from penstock.orchestrator.ui.runs.own_files import read_config
from penstock.orchestrator.ui.runs.rollouts import Wanted
from penstock.orchestrator.ui.server.open_run import OpenRun

MAX_RUNS = 32
"""In one comparison, and whose numbers stay in memory: those that were asked for last."""


class NoSuchRun(Exception):
    """Its message is for people."""


class Answers:
    """Lifecycle: any answer at any time. Whoever asks for one run waits for no other."""

    def __init__(self, place: Path) -> None:
        self.runs = Runs(place)
        self._listing, self._opening = threading.Lock(), threading.Lock()
        self._open: OrderedDict[Path, OpenRun] = OrderedDict()
        """The one that was asked for last comes last."""

    def table(self) -> list[dict[str, Any]]:
        """All runs, one line each."""
        with self._listing:
            return [asdict(line) for line in self.runs.lines()]

    def run(self, run: str) -> dict[str, Any]:
        """One run: its line, what it was told, what happened, which charts it has."""
        return self._opened(run).described()

    def compared(self, runs: Sequence[str]) -> dict[str, Any]:
        """Several runs: the charts that any of them has, and in what their configurations differ."""
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
        """By metric: steps and values between two steps, and where there are more than `points`, the range around
        each."""
        return self._opened(run).series(keys, points, first, last)

    def samples(self, run: str, wanted: Wanted) -> dict[str, Any]:
        """A page of a run's samples, and how far its files are known."""
        return self._opened(run).samples(wanted)

    def sample(self, run: str, step: int, place: int) -> dict[str, Any]:
        """One sample with its tokens. Raises `LookupError`."""
        return self._opened(run).sample(step, place)

    def timeline(self, run: str, first: int | None, last: int | None) -> dict[str, Any]:
        """Who was busy when."""
        return self._opened(run).timeline(first, last)

    def state(self, run: str) -> dict[str, Any]:
        """Who is there and who waits for whom."""
        return self._opened(run).state()

    def logs(self, run: str, member: str, text: str, only_trouble: bool) -> dict[str, Any]:
        """What actors printed. Raises `LookupError`."""
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
