"""The types of the timeline: what an actor did from when to when. Pure.

`Span`s come from the controller's own calls (`run_directory/timeline.py`); `Work` from the store, which gives out all
leases (`store/service/work_log.py`).
"""

from collections.abc import Mapping
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
class Worked:
    """The work that the store has seen since the last time."""

    work: tuple[Work, ...] = ()
    admitted: Mapping[int, float] = field(default_factory=dict)
    """Time at which each group was admitted, by group."""
    missed: int = 0
    """Number of entries that the store had no room for."""

    @classmethod
    def of(cls, told: Mapping[str, Any], now: float) -> "Worked":
        """The work as the store tells it. `told`: `StoreClient.work()`. `now`: this machine's time at the answer."""
        differs = now - float(told["now"])
        shift = differs if abs(differs) > CLOCKS_DIFFER_S else 0.0
        work = tuple(
            Work(str(stage), str(owner), int(group), start + shift, end + shift, float(rows))
            for stage, owner, group, start, end, rows in told["leases"]
        )
        admitted = {int(group): at + shift for group, at in told["admitted"]}
        return cls(work, admitted, int(told["missed"]))
