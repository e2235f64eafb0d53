"""Faults in pixels: when members were away, by wall time. `templates/faults.html.j2` draws it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.orchestrator.observability.summary.elapsed import elapsed
from penstock.orchestrator.observability.summary.faults import Fault

MIN_WIDTH = 3.0
GAP = 7.0
MOST_LANES = 12


@dataclass(frozen=True)
class Label:
    """The label of a bar, beside it towards the middle of the drawing: the member's role, and how long it was away."""

    x: float
    anchor: str
    text: str

    @classmethod
    def beside(cls, left: float, width: float, middle: float, fault: Fault) -> "Label":
        text = fault.role if fault.seconds is None else f"{fault.role}, {fault.seconds:.1f} s"
        is_left = left + width / 2 < middle
        return cls(left + width + GAP if is_left else left - GAP, "start" if is_left else "end", text)


@dataclass(frozen=True)
class Bar:
    left: float
    width: float
    lane: float
    """y of the lane's upper edge."""
    is_open: bool
    """True if no other member took the place."""
    text: str
    label: Label


@dataclass(frozen=True)
class Timeline:
    """The times at which members were away. Members in lanes, those that were lost first on top."""

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
        """The timeline; None without faults. `total_s`: seconds of the run so far."""
        if not faults:
            return None
        members = list(dict.fromkeys(fault.member for fault in faults))[:MOST_LANES]
        total_s = max(total_s, *(fault.at_s + (fault.seconds or 0.0) for fault in faults), 1.0)
        scale = (cls.RIGHT - cls.LEFT) / total_s
        bars = []
        for fault in faults:
            if fault.member in members:
                left = cls.LEFT + fault.at_s * scale
                width = max(MIN_WIDTH, (total_s - fault.at_s if fault.seconds is None else fault.seconds) * scale)
                lane = members.index(fault.member) * cls.LANE + (cls.LANE - cls.BAR) / 2
                label = Label.beside(left, width, (cls.LEFT + cls.RIGHT) / 2, fault)
                bars.append(Bar(left, width, lane, fault.seconds is None, fault.text, label))
        lanes = [(number * cls.LANE + cls.LANE / 2, member) for number, member in enumerate(members)]
        columns = [(cls.LEFT + part / 5 * (cls.RIGHT - cls.LEFT), elapsed(part / 5 * total_s)) for part in range(6)]
        return cls(lanes, bars, columns, len(members) * cls.LANE)
