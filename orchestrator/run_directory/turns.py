"""The events between which a process drives a run."""

from collections.abc import Mapping, Sequence
from typing import Any

STARTS = ("start", "resume", "taken_over")
"""Events with which a process takes a run up."""
ENDS = ("end", "failed", "interrupted")
"""Events with which a process leaves a run."""


def last_turn(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The last event of those: a run that failed and was resumed has not failed. Empty: the run never began."""
    return next((event for event in reversed(events) if event.get("kind") in (*STARTS, *ENDS)), {})
