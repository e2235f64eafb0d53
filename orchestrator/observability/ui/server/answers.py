"""Answers to what the page asks for below /api/, as plain data, from any thread, and the questions by name: what an
address's words mean, and which answer is given. `app.py` makes HTTP of them, `open_run.py` reads one run.

A new question is a function here and a line in `QUESTIONS`.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from starlette.datastructures import QueryParams

from penstock.orchestrator.observability.differences import differing
from penstock.orchestrator.observability.ui.charts.themes import charts_of
from penstock.orchestrator.observability.ui.runs.found import Runs, any_line_of
from penstock.orchestrator.observability.ui.runs.own_files import read_config
from penstock.orchestrator.observability.ui.runs.sample_index import Wanted
from penstock.orchestrator.observability.ui.server.open_run import OpenRun

MAX_RUNS = 32
"""Most runs in one comparison, and whose metrics stay in memory: those that were asked for last."""
DEFAULT_POINTS = 1000
WANTED: dict[str, Callable[[str], Any]] = {
    "first_step": int, "last_step": int, "group": int, "least_reward": float, "most_reward": float,
    "least_tokens": int, "most_tokens": int, "finish_reason": str, "text": str, "sort": str, "offset": int,
    "limit": int,
}  # fmt: skip
"""Fields of `Wanted` that an address may have, with their types."""


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


def runs(answers: Answers, asked: QueryParams) -> Any:
    """Answer with the lines of all runs."""
    return answers.table()


def run(answers: Answers, asked: QueryParams) -> Any:
    """Answer about one run: run=…"""
    return answers.run(_run_of(asked))


def compare(answers: Answers, asked: QueryParams) -> Any:
    """Compare runs: run=…&run=…"""
    return answers.compared(asked.getlist("run"))


def series(answers: Answers, asked: QueryParams) -> Any:
    """Answer with the numbers of charts: run=…&key=…&key=…, points=…, first=…, last=…"""
    first, last = float(asked.get("first", "-inf")), float(asked.get("last", "inf"))
    points = int(asked.get("points", DEFAULT_POINTS))
    return answers.series(_run_of(asked), asked.getlist("key"), points, first, last)


def samples(answers: Answers, asked: QueryParams) -> Any:
    """Answer with a run's samples by a filter: run=…, fields of `Wanted`."""
    return answers.samples(_run_of(asked), wanted_of(asked))


def sample(answers: Answers, asked: QueryParams) -> Any:
    """Answer with a sample and its tokens: run=…&step=…&place=…"""
    return answers.sample(_run_of(asked), int(asked.get("step", "")), int(asked.get("place", "")))


def timeline(answers: Answers, asked: QueryParams) -> Any:
    """Answer with the timeline of some steps: run=…&first=…&last=…"""
    first, last = (int(asked[name]) if asked.get(name) else None for name in ("first", "last"))
    return answers.timeline(_run_of(asked), first, last)


def state(answers: Answers, asked: QueryParams) -> Any:
    """Answer with the state of a run: run=…"""
    return answers.state(_run_of(asked))


def logs(answers: Answers, asked: QueryParams) -> Any:
    """Answer with what actors printed: run=…&member=…&text=…&trouble=1"""
    return answers.logs(_run_of(asked), asked.get("member", ""), asked.get("text", ""), asked.get("trouble") == "1")


QUESTIONS: dict[str, Callable[[Answers, QueryParams], Any]] = {
    "runs": runs,
    "run": run,
    "compare": compare,
    "series": series,
    "samples": samples,
    "sample": sample,
    "timeline": timeline,
    "state": state,
    "logs": logs,
}
"""Questions by name. Each raises `NoSuchRun` or `LookupError` for what is not there, `ValueError` for words that mean
nothing."""


def wanted_of(asked: QueryParams) -> Wanted:
    """The filter of samples in an address. Raises `ValueError`."""
    found: dict[str, Any] = {}
    for name, kind in WANTED.items():
        if (value := asked.get(name, "")) != "":
            found[name] = kind(value)
    return Wanted(**found, down=asked.get("down", "1") != "0")


def _run_of(asked: QueryParams) -> str:
    return asked.get("run", "")
