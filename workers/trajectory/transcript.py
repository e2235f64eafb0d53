"""The messages of a trajectory, as JSON for people: the run's samples and its report show it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.workers.encodable import encodable

MAX_CHARACTERS = 4_000
"""Largest length of one message: a tool may have returned a megabyte."""


def as_json(messages: Sequence[Mapping[str, Any]]) -> str:
    """Write [{role, content, …}, …] with long contents cut."""
    shown = [{name: _cut(value) for name, value in message.items()} for message in messages]
    return json.dumps(encodable(shown), default=str)


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        return f"{value[:MAX_CHARACTERS]}… ({len(value) - MAX_CHARACTERS:,} more characters)"
    return value
