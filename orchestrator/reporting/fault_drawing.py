"""Faults in pixels: marks in the charts, which go by steps, and a timeline of their own by wall time.

Called by `drawing.py` and `report.py`; `templates/chart.html.j2` and `faults.html.j2` make SVG of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.orchestrator.reporting.faults import Fault
from penstock.orchestrator.reporting.progress import elapsed

MIN_WIDTH = 3.0
MOST_LANES = 12


@dataclass(frozen=True)
class Mark:
    """A band in a chart, from the step that a member was lost at to the one that it was there again."""

    left: float
    width: float
    text: str


def marks_of(faults: Sequence[Fault], steps: Sequence[float], x: Callable[[float], float]) -> list[Mark]:
    """Those within the chart. `steps`: that it has; a step that was never finished is beyond the last."""
    first, last = min(steps), max(steps)
    marks = []
    for fault in faults:
        if fault.step < first:
            continue
        left, right = x(min(fault.step, last)), x(min(fault.until_step or fault.step, last))
        width = max(MIN_WIDTH, right - left)
        marks.append(Mark(left - MIN_WIDTH / 2, width, fault.text))
    return marks


@dataclass(frozen=True)
class Bar:
    left: float
    width: float
    lane: float
    """y of its upper edge."""
    is_open: bool
    """Nobody came in its place."""
    text: str


@dataclass(frozen=True)
class Timeline:
    """Who was away when. Members in lanes, those that were lost first on top."""

    WIDTH: ClassVar = 1060
    LEFT: ClassVar = 170
    RIGHT: ClassVar = 1045
    LANE: ClassVar = 22
    BAR: ClassVar = 12

    lanes: list[tuple[float, str]]
    """y of the middle, and the member."""
    bars: list[Bar]
    columns: list[tuple[float, str]]
    """x and wall time."""
    height: float

    @classmethod
    def of(cls, faults: Sequence[Fault], total_s: float) -> "Timeline | None":
        """None without faults. `total_s`: of the run so far."""
        if not faults:
            return None
        members = list(dict.fromkeys(fault.member for fault in faults))[:MOST_LANES]
        total_s = max(total_s, *(fault.at_s + (fault.seconds or 0.0) for fault in faults), 1.0)
        scale = (cls.RIGHT - cls.LEFT) / total_s
        bars = [
            Bar(
                cls.LEFT + fault.at_s * scale,
                max(MIN_WIDTH, (total_s - fault.at_s if fault.seconds is None else fault.seconds) * scale),
                members.index(fault.member) * cls.LANE + (cls.LANE - cls.BAR) / 2,
                fault.seconds is None,
                fault.text,
            )
            for fault in faults
            if fault.member in members
        ]
        lanes = [(number * cls.LANE + cls.LANE / 2, member) for number, member in enumerate(members)]
        columns = [(cls.LEFT + part / 5 * (cls.RIGHT - cls.LEFT), elapsed(part / 5 * total_s)) for part in range(6)]
        return cls(lanes, bars, columns, len(members) * cls.LANE)
