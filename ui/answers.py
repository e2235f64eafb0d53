"""Answers to what the page asks for below /api/, as plain data, from any thread. `app.py` makes HTTP of them.

    OpenRun     what was read of one run's files so far, and the answers about it
    Answers     the runs of a place, and those that are open
    Live        runs that change, as events for each page
    QUESTIONS   which answer a name and the words of an address ask for. A new question is a line there

Metrics and samples of a run have a lock each, so a search for a text in a million samples holds up neither the charts
of the same run nor anything of another.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import pyarrow as pa
from starlette.datastructures import QueryParams

from penstock.orchestrator.observability.charts.cards import cards
from penstock.orchestrator.observability.charts.chart import plain, thinned
from penstock.orchestrator.observability.charts.known_curves import with_known
from penstock.orchestrator.observability.charts.themes import charts_of
from penstock.orchestrator.observability.differences import differences_of, differing
from penstock.orchestrator.observability.marks import marks_of
from penstock.orchestrator.observability.runs.columns import Columns
from penstock.orchestrator.observability.runs.found import FINISHED, MAX_CHARACTERS, SERVING, Runs, any_line_of, line_of
from penstock.orchestrator.observability.runs.own_files import (
    MOST_STATE_BYTES,
    MOST_TOKENIZER_BYTES,
    is_own,
    read_config,
    read_events,
    read_json,
    read_own,
    section,
)
from penstock.orchestrator.run_directory.json_lines import json_of
from penstock.orchestrator.run_directory.picture_folder import FOLDER, MOST_BYTES, NAME
from penstock.ui.activity import Traced, printed
from penstock.ui.rollouts import Rollouts, SampleFilter

MAX_EVENTS = 500
"""Most events that are shown, the newest."""
MAX_POINTS = 4000
"""Most points of a curve, whatever is asked for."""
LAST_STEPS = 3
"""Number of the last steps that the timeline shows where none are asked for."""
MARKED = ("fault", "ended", "recovered", "returned", "warning")
"""Events that the timeline marks."""
FAILURES = ("fault", "ended", "failed", "return_failed")
"""Events that tell of something that went wrong."""
MOST_FAILURES = 20
INDEX_S = 0.2
"""Seconds of one answer for taking up new files of samples."""
TOKENIZER = "tokenizer.json"
TOKENIZER_PLACES = ("model", "initial_model")
"""Directories of a run in which a tokenizer may be."""


class OpenRun:
    """Lifecycle: any answer, at any time, from any thread."""

    def __init__(self, path: Path, run: str, bring: Callable[[str], None] | None = None) -> None:
        """`bring`: brings a file that is not here, by its path below the place of all runs; None: all files are here.
        Raises `OSError`."""
        self._path, self._run, self._bring = path, run, bring
        self._reading_metrics, self._reading_samples = threading.Lock(), threading.Lock()
        self._reading_spans = threading.Lock()
        self._columns = Columns(path / "metrics.jsonl")
        self._rollouts = Rollouts(path / "samples")
        self._traced = Traced(path / "spans.jsonl")
        self._texts: TokenTexts | None = None

    def described(self) -> dict[str, Any]:
        """The run's line and cards, its configuration, its events, and its charts."""
        config = read_config(self._path)
        keys, num_steps, num_unreadable = self._read()
        line, events = line_of(self._path, self._run), read_events(self._path)
        with self._reading_metrics:
            shown = cards(self._columns, config, events, line.seconds or 0.0)
        return {
            "line": asdict(line),
            "cards": [asdict(card) for card in shown],
            "description": str(config.get("description") or "")[:MAX_CHARACTERS],
            "config": config,
            "changed": differences_of(config),
            "events": events[-MAX_EVENTS:],
            "marks": [mark.plain() for mark in marks_of(events)],
            "charts": [chart.plain() for chart in with_known(charts_of(keys, config), config)],
            "num_steps": num_steps,
            "num_unreadable": num_unreadable,
        }

    def metrics(self) -> list[str]:
        """Metrics that have a value at some step."""
        return self._read()[0]

    def series(self, keys: Sequence[str], points: int, first: float, last: float) -> dict[str, Any]:
        """Steps and values of each metric, by metric, and where there are more than `points`, the range around each."""
        with self._reading_metrics:
            self._columns.update()
            steps, known = self._columns.steps, set(self._columns.keys)
            columns = {key: self._columns[key] if key in known else None for key in keys}
        found: dict[str, Any] = {}
        for key, values in columns.items():
            if values is None:
                found[key] = {"steps": [], "mean": []}
                continue
            few = thinned(steps, values, max(1, min(points, MAX_POINTS)), first, last)
            found[key] = {"steps": plain(few.steps), "mean": plain(few.mean)}
            if few.low is not None and few.high is not None:
                found[key] |= {"low": plain(few.low), "high": plain(few.high)}
        return found

    def samples(self, wanted: SampleFilter) -> dict[str, Any]:
        """A page of the run's samples, and how far its files are known."""
        with self._reading_samples:
            rollouts = self._rollouts
            rollouts.update(INDEX_S)
            known, every = rollouts.num_files
            found = rollouts.find(wanted)
            pa.default_memory_pool().release_unused()  # of files that were looked through for a text
            return {
                **found,
                "known": known,
                "files": every,
                "unreadable": rollouts.num_unreadable,
                "reasons": list(rollouts.reasons),
            }

    def sample(self, step: int, place: int) -> dict[str, Any]:
        """A sample with its tokens. Raises `LookupError`."""
        with self._reading_samples:
            row = self._rollouts.sample(step, place)
            if self._texts is None:
                self._texts = TokenTexts(self._path, read_config(self._path))
            ids = row.get("response_ids")
            return {**row, "token_texts": self._texts.of(ids if isinstance(ids, list) else [])}

    def picture(self, name: str) -> bytes:
        """A picture that samples name. Raises `LookupError`, `OSError`."""
        if not NAME.fullmatch(name):
            raise LookupError(f"{name!r:.100} is no name of a picture.")
        file = f"{FOLDER}/{name}"
        try:
            if self._bring is not None and not is_own(self._path, file):
                self._bring((PurePosixPath(self._run) / file).as_posix())
            return read_own(self._path, file, MOST_BYTES)
        except FileNotFoundError:
            raise LookupError(f"{self._run}: there is no {file}.") from None

    def timeline(self, first: int | None, last: int | None) -> dict[str, Any]:
        """Times at which actors were busy in these steps, and members that were lost meanwhile. None: the last few
        steps."""
        with self._reading_spans:
            self._traced.update()
            if (bounds := self._traced.bounds) is None:
                return {"bounds": None, "steps": [], "events": []}
            last = bounds[1] if last is None else last
            first = last - LAST_STEPS + 1 if first is None else first
            steps = self._traced.lines(first, last)
        events = [event for event in self._events() if event.get("kind") in MARKED]
        return {"bounds": bounds, "steps": steps, "events": events}

    def state(self) -> dict[str, Any]:
        """Actors that are there, and which wait for which, as the run has told last; of a finished run none waits."""
        line, state = line_of(self._path, self._run), read_json(self._path, "state.json", MOST_STATE_BYTES)
        if line.state == FINISHED and isinstance(state, dict):
            state = state | {"waits": []}
        return {"line": asdict(line), "state": state}

    def serving(self) -> dict[str, Any]:
        """The tenants of a server, their clients, and what each waits for, as it has told last."""
        line = asdict(line_of(self._path, self._run))
        return {"line": line, "serving": read_json(self._path, SERVING, MOST_STATE_BYTES)}

    def logs(self, member: str, text: str, only_trouble: bool) -> dict[str, Any]:
        """Lines that actors printed, and what the run failed with. Raises `LookupError`."""
        failed = [event for event in self._events() if event.get("kind") in FAILURES]
        return {**printed(self._path / "logs", member, text, only_trouble), "failures": failed[-MOST_FAILURES:]}

    def _events(self) -> list[dict[str, Any]]:
        return read_events(self._path)[-MAX_EVENTS:]

    def _read(self) -> tuple[list[str], int, int]:
        """Read new lines. Returns the metrics, and the numbers of steps and of unreadable lines."""
        with self._reading_metrics:
            self._columns.update()
            return self._columns.keys, len(self._columns.steps), self._columns.num_unreadable


class TokenTexts:
    """Texts of single tokens, by the tokenizer that a run left: read by `tokenizers`, without transformers."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._path, self._config = path, config
        self._tokenizer: Any = None
        self._is_sought = False

    def of(self, ids: Sequence[int]) -> list[str]:
        """Texts of tokens; the token's number where there is no tokenizer to read, or it is no token. What is no whole
        character by itself is shown as the replacement character."""
        if not self._is_sought:
            self._is_sought, self._tokenizer = True, self._found()
        if self._tokenizer is None:
            return [f"[{token}]" for token in ids]
        try:
            texts: list[str] = self._tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)
        except (TypeError, OverflowError):  # a token that is no number, or one below 0
            return [f"[{token}]" for token in ids]
        return texts

    def _found(self) -> Any:
        text = self._text()
        if text is None:
            return None
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_str(text)
        except Exception:  # noqa: BLE001 - whatever the package makes of a file of another version
            return None

    def _text(self) -> str | None:
        """The text of the first file that can be read. The run's own model is where its configuration says, and may be
        a link, as in a hub's cache."""
        policies = section(self._config, "trainer").get("policies") or ()
        for name in (*TOKENIZER_PLACES, *(f"model/{policy}" for policy in policies)):
            with contextlib.suppress(OSError, ValueError):
                return read_own(self._path, f"{name}/{TOKENIZER}", MOST_TOKENIZER_BYTES).decode()
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # RuntimeError: ~ of a user that is unknown
            if own := section(self._config, "model").get("path"):
                file = (Path(str(own)).expanduser() / TOKENIZER).resolve()
                return read_own(file.parent, file.name, MOST_TOKENIZER_BYTES).decode()
        return None


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
