"""The timeline of a run: what an actor did from when to when, and all of a run as a Chrome trace. Pure.

    the controller's calls ─▶ Span ─▶ Timeline, until they are written ─▶ spans.jsonl ─▶ timeline.json at the end
    the store's leases     ─▶ Work (`store/service/work_log.py`)

`timeline.json` opens in chrome://tracing or ui.perfetto.dev, one track an actor.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

CLOCKS_DIFFER_S = 0.5
"""Least difference that counts as one between the clocks of two machines; below, it may be the answer's delay."""


@dataclass(frozen=True)
class Span:
    """A span of time in a lane. Times are seconds since the epoch on the driver's machine."""

    lane: str
    """Name of an actor, or of a part of the controller."""
    name: str
    start: float
    end: float
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Work:
    """The work on one group, or on the rows of it that one lease had."""

    stage: str
    owner: str
    group: int
    start: float
    """Time at which the lease was granted."""
    end: float
    """Time at which the last of its rows was written."""
    rows: float = 1.0


@dataclass(frozen=True)
class WorkReport:
    """The work that the store has recorded since the last report."""

    work: tuple[Work, ...] = ()
    admitted: Mapping[int, float] = field(default_factory=dict)
    """Time at which each group was admitted, by group."""
    missed: int = 0
    """Number of entries that the store had no room for."""

    @classmethod
    def of(cls, told: Mapping[str, Any], now: float) -> "WorkReport":
        """The work as the store reports it. `told`: `StoreClient.work()`. `now`: this machine's time at the answer."""
        differs = now - float(told["now"])
        shift = differs if abs(differs) > CLOCKS_DIFFER_S else 0.0
        work = tuple(
            Work(str(stage), str(owner), int(group), start + shift, end + shift, float(rows))
            for stage, owner, group, start, end, rows in told["leases"]
        )
        admitted = {int(group): at + shift for group, at in told["admitted"]}
        return cls(work, admitted, int(told["missed"]))


class Timeline:
    """Spans that wait to be written. Times are seconds since the epoch, so that those of other processes fit in."""

    def __init__(self, max_spans: int = 20_000) -> None:
        self._spans: list[Span] = []
        self._max_spans = max_spans
        self.num_dropped = 0
        """Number of spans beyond `max_spans`, left out so that memory stays bounded where they are never taken."""

    def __len__(self) -> int:
        return len(self._spans)

    def span(self, lane: str, name: str, start: float, end: float, **details: Any) -> None:
        """Add a span. `lane`: an actor; `trainer` and `engines` stand for all of them."""
        self.add(Span(lane, name, start, max(start, end), details))

    def add(self, span: Span) -> None:
        if len(self._spans) >= self._max_spans:
            self.num_dropped += 1
        else:
            self._spans.append(span)

    def take(self) -> list[Span]:
        """Take the spans since the last time."""
        taken, self._spans = self._spans, []
        return taken

    def rest(self) -> list[dict[str, Any]]:
        """Take what is left after the last step, or of a run without steps, as a line of `spans.jsonl`."""
        spans = self.take()
        start = min((span.start for span in spans), default=0.0)
        lanes: dict[str, list[Any]] = {}
        for span in spans:
            times = (round((at - start) * 1000) for at in (span.start, span.end))
            lanes.setdefault(span.lane, []).append([span.name, *times, dict(span.details)])
        return [{"start": start, "lanes": lanes}] if spans else []


def chrome_trace(steps: Iterable[Mapping[str, Any]], run: str = "run") -> Iterator[str]:
    """Chrome's trace-event format, piece by piece: complete events in microseconds from the first step on, a thread
    name a lane. `steps`: lines of `spans.jsonl`, one at a time, since all of a long run's are too large for memory.
    `run`: the title of all lanes."""
    tracks: dict[str, int] = {}
    origin: float | None = None
    yield '{"traceEvents": ['
    for step in steps:
        origin = step["start"] if origin is None else origin
        known = len(tracks)
        events = _events(step, origin, tracks)
        names = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": lane}}
            for lane, number in list(tracks.items())[known:]
        ]
        yield "".join(f"{json.dumps(event, default=str)},\n" for event in [*names, *events])
    last = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": run}}
    yield f'{json.dumps(last)}], "displayTimeUnit": "ms", "otherData": {{"epoch_s": {json.dumps(origin or 0.0)}}}}}'


def _events(step: Mapping[str, Any], origin: float, tracks: dict[str, int]) -> list[dict[str, Any]]:
    """Events of a step. `tracks`: numbers by lane; those that are new are added."""
    found: list[dict[str, Any]] = []
    for lane, spans in step["lanes"].items():
        number = tracks.setdefault(lane, len(tracks) + 1)
        for name, start, end, details in spans:
            begun = round((step["start"] - origin) * 1e6) + start * 1000
            event = {"ph": "X", "name": name, "pid": 1, "tid": number, "ts": begun, "dur": (end - start) * 1000}
            found.append(event | ({"args": details} if details else {}))
    return found
