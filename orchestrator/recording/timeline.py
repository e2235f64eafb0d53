"""Who did what when: the controller's spans until they are written, and all of a run's as a Chrome trace.

`timeline.json` opens in chrome://tracing or ui.perfetto.dev, one track an actor. `RunDirectory.close` makes it of
`spans.jsonl`.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.orchestrator.recording.spans import Span


class Timeline:
    """Spans that wait to be written. Times are seconds since the epoch, so that those of other processes fit in."""

    def __init__(self, max_spans: int = 20_000) -> None:
        self._spans: list[Span] = []
        self._max_spans = max_spans
        self.num_dropped = 0
        """Spans beyond `max_spans`, left out so that memory stays bounded where nobody takes them."""

    def __len__(self) -> int:
        return len(self._spans)

    def span(self, lane: str, name: str, start: float, end: float, **details: Any) -> None:
        """`lane`: an actor; `trainer` and `engines` stand for all of them."""
        self.add(Span(lane, name, start, max(start, end), details))

    def add(self, span: Span) -> None:
        if len(self._spans) >= self._max_spans:
            self.num_dropped += 1
        else:
            self._spans.append(span)

    def take(self) -> list[Span]:
        """Those since the last time."""
        taken, self._spans = self._spans, []
        return taken

    def rest(self) -> list[dict[str, Any]]:
        """What nobody has taken, as a line of `spans.jsonl`: after the last step, or of a run without steps."""
        spans = self.take()
        start = min((span.start for span in spans), default=0.0)
        lanes: dict[str, list[Any]] = {}
        for span in spans:
            times = (round((at - start) * 1000) for at in (span.start, span.end))
            lanes.setdefault(span.lane, []).append([span.name, *times, dict(span.details)])
        return [{"start": start, "lanes": lanes}] if spans else []


def chrome_trace(steps: Iterable[Mapping[str, Any]]) -> str:
    """`steps`: lines of `spans.jsonl`. Chrome's trace-event format: complete events in microseconds from the first
    step on, a thread name a lane."""
    tracks: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    origin: float | None = None
    for step in steps:
        origin = step["start"] if origin is None else origin
        for lane, spans in step["lanes"].items():
            number = tracks.setdefault(lane, len(tracks) + 1)
            for name, start, end, details in spans:
                begun = round((step["start"] - origin) * 1e6) + start * 1000
                event = {"ph": "X", "name": name, "pid": 1, "tid": number, "ts": begun, "dur": (end - start) * 1000}
                events.append(event | ({"args": details} if details else {}))
    names = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": lane}}
        for lane, number in tracks.items()
    ]
    return json.dumps(
        {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": {"epoch_s": origin or 0.0}}, default=str
    )
