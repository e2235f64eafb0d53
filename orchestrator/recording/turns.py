"""The events between which a process drives a run."""

from collections.abc import Mapping, Sequence
from typing import Any

STARTS = ("start", "resume", "taken_over")
"""Events with which a process takes a run up."""
ENDS = ("end", "failed", "interrupted")
"""Those with which it leaves it."""


def last_turn(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """How it was taken up or left last: a run that failed and was resumed has not failed. Empty: it never began."""
    return next((event for event in reversed(events) if event.get("kind") in (*STARTS, *ENDS)), {})
