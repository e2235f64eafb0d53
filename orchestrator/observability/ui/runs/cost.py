"""The cost of a run in what it has reserved while it lasted: GPU hours, or CPU hours where it has no GPU."""

from collections.abc import Mapping, Sequence
from typing import Any

PLACED = "placed"
"""The event that says what a run's actors have reserved."""


def cost_of(events: Sequence[Mapping[str, Any]], seconds: float | None) -> tuple[float, str] | None:
    """Hours and their unit. Members that joined or left later are not counted. None: the run has not started its
    actors, or comes from a version that did not say.

    >>> cost_of([{"kind": "placed", "cpus": 6.0, "gpus": 4.0}], 1800.0)
    (2.0, 'GPU h')
    """
    placed = next((event for event in reversed(events) if event.get("kind") == PLACED), None)
    if placed is None or seconds is None:
        return None
    for key, unit in (("gpus", "GPU h"), ("cpus", "CPU h")):
        count = placed.get(key)
        if isinstance(count, int | float) and count > 0:
            return count * seconds / 3600, unit
    return None
