"""The timeline of a run: the controller's spans until they are written, and all of a run's as a Chrome trace.

`timeline.json` opens in chrome://tracing or ui.perfetto.dev, one track an actor. It is made of `spans.jsonl` at the
end.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.orchestrator.run_directory.spans import Span


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


def chrome_trace(steps: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Chrome's trace-event format, piece by piece: complete events in microseconds from the first step on, a thread
    name a lane. `steps`: lines of `spans.jsonl`, one at a time, since all of a long run's are too large for memory."""
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
    last = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "run"}}
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
