"""Server-sent events, by which both protocols stream an answer. Pure."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

COMMENT = b": the turn is being sampled\n\n"
"""Comment that is no event: clients skip it, and know that the connection lives."""
NUM_PIECES = 4
"""Number of deltas that a text is cut into. The whole text is there when the first one is sent."""


@dataclass(frozen=True)
class Event:
    data: Mapping[str, Any] | str
    name: str = ""
    """Name of the event; empty: it has none, as in chat completions."""

    def encode(self) -> bytes:
        data = self.data if isinstance(self.data, str) else json.dumps(self.data)
        return (f"event: {self.name}\n" if self.name else "").encode() + f"data: {data}\n\n".encode()


def pieces(text: str) -> Iterator[str]:
    """Pieces of a text in order; none for an empty one."""
    size = -(-len(text) // NUM_PIECES)
    for start in range(0, len(text), max(1, size)):
        yield text[start : start + size]
