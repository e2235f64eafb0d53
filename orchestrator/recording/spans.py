"""What somebody did from when to when: the words of the timeline. Pure.

`Span`s come from the controller's own calls (`recording/timeline.py`); `Work` from the store, which gives out all
leases (`store/service/work_log.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CLOCKS_DIFFER_S = 0.5
"""Between two machines; below that it may be the time that the answer took."""


@dataclass(frozen=True)
class Span:
    """Times are seconds since the epoch on the driver's machine."""

    lane: str
    """An actor, or a part of the controller."""
    name: str
    start: float
    end: float
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Work:
    """One group, or the rows of it that one lease had."""

    stage: str
    owner: str
    group: int
    start: float
    """The lease was granted."""
    end: float
    """The last of its rows was written."""
    rows: float = 1.0


@dataclass(frozen=True)
class Worked:
    """What the store has seen since the last time."""

    work: tuple[Work, ...] = ()
    admitted: Mapping[int, float] = field(default_factory=dict)
    """When each group came in."""
    missed: int = 0
    """Entries that the store had no room for."""

    @classmethod
    def of(cls, told: Mapping[str, Any], now: float) -> "Worked":
        """`told`: `StoreClient.work()`. `now`: by the clock here, as it answered."""
        differs = now - float(told["now"])
        shift = differs if abs(differs) > CLOCKS_DIFFER_S else 0.0
        work = tuple(
            Work(str(stage), str(owner), int(group), start + shift, end + shift, float(rows))
            for stage, owner, group, start, end, rows in told["leases"]
        )
        admitted = {int(group): at + shift for group, at in told["admitted"]}
        return cls(work, admitted, int(told["missed"]))
