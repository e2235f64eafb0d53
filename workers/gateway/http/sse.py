"""Server-sent events: how both protocols stream an answer. Pure."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

COMMENT = b": the turn is being sampled\n\n"
"""No event: clients read over it, and know that somebody is there."""
NUM_PIECES = 4
"""Into so many deltas a text is cut. It is there as a whole when the first one is sent."""


@dataclass(frozen=True)
class Event:
    data: Mapping[str, Any] | str
    name: str = ""
    """Empty: it has none, as in chat completions."""

    def encode(self) -> bytes:
        data = self.data if isinstance(self.data, str) else json.dumps(self.data)
        return (f"event: {self.name}\n" if self.name else "").encode() + f"data: {data}\n\n".encode()


def pieces(text: str) -> Iterator[str]:
    """A text in order; nothing of an empty one."""
    size = -(-len(text) // NUM_PIECES)
    for start in range(0, len(text), max(1, size)):
        yield text[start : start + size]
