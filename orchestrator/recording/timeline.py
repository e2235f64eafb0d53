"""Who did what when, as a Chrome trace: `timeline.json` opens in chrome://tracing or ui.perfetto.dev.

One track each for trainer, engines and checkpoints. The controller adds spans as they end; `RunDirectory.close` writes
the file.
"""

import json
from typing import Any


class Timeline:
    """Spans on named tracks. Times are seconds since the epoch, so that those of other processes fit in."""

    def __init__(self, max_spans: int = 200_000) -> None:
        self._spans: list[tuple[str, str, float, float, dict[str, Any]]] = []
        self._max_spans = max_spans
        self.num_dropped = 0
        """Spans beyond `max_spans`, left out so that a long run's memory stays bounded."""

    def __len__(self) -> int:
        return len(self._spans)

    def span(self, track: str, name: str, start: float, end: float, **details: Any) -> None:
        if len(self._spans) >= self._max_spans:
            self.num_dropped += 1
            return
        self._spans.append((track, name, start, max(start, end), details))

    def to_json(self) -> str:
        """Chrome's trace-event format: complete events in microseconds from the first span on, a thread name a
        track."""
        origin = min((start for _, _, start, _, _ in self._spans), default=0.0)
        tracks = {track: number for number, track in enumerate(dict.fromkeys(span[0] for span in self._spans), start=1)}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": track}}
            for track, number in tracks.items()
        ]
        for track, name, start, end, details in self._spans:
            event = {"ph": "X", "name": name, "pid": 1, "tid": tracks[track]}
            event |= {"ts": round((start - origin) * 1e6), "dur": round((end - start) * 1e6)}
            events.append(event | ({"args": details} if details else {}))
        return json.dumps(
            {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"epoch_s": origin}}, default=str
        )
