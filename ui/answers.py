"""Answers to what the page asks for below /api/, as plain data, from any thread, and the questions by name: what an
address's words mean, and which answer is given; `Live`: runs that change. `app.py` makes HTTP of them,
`open_run.py` answers about one run.

A new question is a line in `QUESTIONS`.
"""

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
from starlette.datastructures import QueryParams

from penstock.orchestrator.observability.charts.themes import charts_of
from penstock.orchestrator.observability.differences import differing
from penstock.orchestrator.observability.runs.found import Runs, any_line_of
from penstock.orchestrator.observability.runs.own_files import read_config
from penstock.orchestrator.observability.runs.sample_index import SampleFilter
from penstock.orchestrator.run_directory.json_lines import json_of
from penstock.ui.open_run import OpenRun

MAX_RUNS = 32
"""Most runs in one comparison, and whose metrics stay in memory: those that were asked for last."""
DEFAULT_POINTS = 1000
FILTER_FIELDS: dict[str, Callable[[str], Any]] = {
    "first_step": int, "last_step": int, "group": int, "least_reward": float, "most_reward": float,
    "least_tokens": int, "most_tokens": int, "finish_reason": str, "text": str, "sort": str, "offset": int,
    "limit": int,
}  # fmt: skip
"""Fields of `SampleFilter` that an address may have, with their types."""
SHARE = 4
"""Least pause after a look, in multiples of its time: so many runs on a slow disk keep no core busy."""
BEHIND = 8
"""Most changes that wait for a slow page; then it is told to ask for everything again."""
ANEW = {"anew": True}
Table = list[dict[str, Any]]
_LOG = logging.getLogger("penstock")


class NoSuchRun(Exception):
    """The error for a run that is not there. Its message is for people."""


class Answers:
    """Lifecycle: any answer at any time. An answer about one run waits for no other run."""

    def __init__(self, place: Path, bring: Callable[[str], None] | None = None) -> None:
        """`bring`: as `OpenRun` takes it."""
        self.runs, self._bring = Runs(place), bring
        self._listing, self._opening = threading.Lock(), threading.Lock()
        self._open: OrderedDict[Path, OpenRun] = OrderedDict()
        """Runs that are open, by path; the one that was asked for last comes last."""

    def table(self) -> Table:
        """The lines of all runs."""
        with self._listing:
            return [asdict(line) for line in self.runs.lines()]

    def compared(self, runs: Sequence[str]) -> dict[str, Any]:
        """The comparison of several runs: charts that any of them has, and the differences of their configurations."""
        paths = {run: self._path(run) for run in runs[:MAX_RUNS]}
        configs = {run: read_config(path) for run, path in paths.items()}
        keys = dict.fromkeys(key for run in paths for key in self.opened(run).metrics())
        bounds = [config.get("max_staleness") for config in configs.values()]
        shared = {"max_staleness": bounds[0]} if bounds and all(bound == bounds[0] for bound in bounds) else {}
        return {
            "runs": {run: asdict(any_line_of(path, run)) for run, path in paths.items()},
            "differing": differing(configs),
            "charts": [chart.plain() for chart in charts_of(list(keys), shared)],
        }

    def opened(self, run: str) -> OpenRun:
        """The run, to answer about. Raises `NoSuchRun`."""
        path = self._path(run)
        with self._opening:
            found = self._open.setdefault(path, OpenRun(path, run, self._bring))
            self._open.move_to_end(path)
            while len(self._open) > MAX_RUNS:
                self._open.popitem(last=False)
            return found

    def _path(self, run: str) -> Path:
        path = self.runs.path_of(run)
        if path is None:
            raise NoSuchRun(f"There is no run {run!r:.200} below {self.runs.place}.")
        return path


class Live:
    """Lifecycle: `run` until it is cancelled; `events` for each page."""

    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._pages: set[asyncio.Queue[dict[str, Any]]] = set()
        self._new: set[asyncio.Queue[dict[str, Any]]] = set()
        """Queues of `_pages` that have not been told anything: what they have asked for may be older than a look."""
        self._lines: dict[str, dict[str, Any]] = {}

    async def run(self, look: Callable[[], Awaitable[Table]]) -> None:
        while True:
            started = time.monotonic()
            if self._pages:
                try:
                    self._tell({line["id"]: line for line in await look()})
                except OSError as error:
                    _LOG.warning("the runs cannot be looked at: %s", error)
            await asyncio.sleep(max(self._look_s, SHARE * (time.monotonic() - started)))

    async def events(self, ending: anyio.Event | None = None) -> AsyncIterator[dict[str, str]]:
        """Events `{"runs": {id: its line, or null}}` of runs that changed; `ANEW` first, after the first look.
        `ending`: set when the server ends."""
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._pages.add(queue)
        self._new.add(queue)
        ended = asyncio.create_task((ending or anyio.Event()).wait())
        try:
            while not ended.done():
                change = asyncio.create_task(queue.get())
                try:
                    await asyncio.wait({change, ended}, return_when=asyncio.FIRST_COMPLETED)
                    if change.done():
                        yield _event(change.result())
                finally:
                    change.cancel()
        finally:
            ended.cancel()
            self._pages.discard(queue)
            self._new.discard(queue)

    def _tell(self, lines: dict[str, dict[str, Any]]) -> None:
        before, self._lines = self._lines, lines
        names = [name for name in before | lines if before.get(name) != lines.get(name)]
        for queue in self._pages:
            if queue in self._new:
                self._new.discard(queue)
                queue.put_nowait(ANEW)
            elif names and queue.qsize() < BEHIND:
                queue.put_nowait({"runs": {name: lines.get(name) for name in names}})
            elif names and queue.qsize() == BEHIND:
                queue.put_nowait(ANEW)


def filter_of(asked: QueryParams) -> SampleFilter:
    """The filter of samples in an address. Raises `ValueError`."""
    found = {name: kind(value) for name, kind in FILTER_FIELDS.items() if (value := asked.get(name, "")) != ""}
    return SampleFilter(**found, down=asked.get("down", "1") != "0")


def _event(value: dict[str, Any]) -> dict[str, str]:
    return {"data": json_of(value).encode(errors="replace").decode()}


def _run(answers: Answers, asked: QueryParams) -> OpenRun:
    return answers.opened(asked.get("run", ""))


def _series(answers: Answers, asked: QueryParams) -> Any:
    first, last = float(asked.get("first", "-inf")), float(asked.get("last", "inf"))
    points = int(asked.get("points", DEFAULT_POINTS))
    return _run(answers, asked).series(asked.getlist("key"), points, first, last)


def _timeline(answers: Answers, asked: QueryParams) -> Any:
    first, last = (int(asked[name]) if asked.get(name) else None for name in ("first", "last"))
    return _run(answers, asked).timeline(first, last)


def _logs(answers: Answers, asked: QueryParams) -> Any:
    return _run(answers, asked).logs(asked.get("member", ""), asked.get("text", ""), asked.get("trouble") == "1")


QUESTIONS: dict[str, Callable[[Answers, QueryParams], Any]] = {
    "runs": lambda answers, asked: answers.table(),
    "compare": lambda answers, asked: answers.compared(asked.getlist("run")),
    "run": lambda answers, asked: _run(answers, asked).described(),
    "series": _series,
    "samples": lambda answers, asked: _run(answers, asked).samples(filter_of(asked)),
    "sample": lambda answers, asked: _run(answers, asked).sample(
        int(asked.get("step", "")), int(asked.get("place", ""))
    ),
    "timeline": _timeline,
    "state": lambda answers, asked: _run(answers, asked).state(),
    "serving": lambda answers, asked: _run(answers, asked).serving(),
    "logs": _logs,
}
"""Questions by name, with the words of their addresses:

    runs                                                       the lines of all runs
    compare    run=…&run=…                                     the comparison of several runs
    run        run=…                                           one run: its line, configuration, events, charts
    series     run=…&key=…&key=…, points=…, first=…, last=…    the numbers of charts, between two steps
    samples    run=…, fields of `SampleFilter`                       samples by a filter; how far files are known
    sample     run=…&step=…&place=…                            a sample and its tokens
    timeline   run=…&first=…&last=…                            when actors were busy
    state      run=…                                           which actors are there, which wait for which
    serving    run=…                                           tenants of a server, and what each waits for
    logs       run=…&member=…&text=…&trouble=1                 what actors printed

Each raises `NoSuchRun` or `LookupError` for what is not there, `ValueError` for words that mean nothing."""
