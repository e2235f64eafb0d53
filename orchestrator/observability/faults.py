"""Losses of a run, with their time and cost, by its events: for the marks, the timeline and the table of the report.

fault ─▶ recovered                     another took its place
fault ─▶ returning ─▶ returned         the run went back to its last checkpoint
fault ─▶ given_up, or nothing          the run ended, or was ended meanwhile
taken_over                             the command itself had died, and another goes on with its actors
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

WHOLE_RUN, COMMAND = "the run", "the command"
MIN_WIDTH = 3.0
GAP = 7.0
MOST_LANES = 12


@dataclass
class Fault:
    """A loss, until another serves in the member's place."""

    member: str
    role: str
    at_s: float
    """Seconds since the run began."""
    step: int
    """The step that the run was at."""
    cause: str
    num_tries: int = 1
    """Number of losses of the member until it served again: one, and each restart that failed."""
    seconds: float | None = None
    """Seconds until another served; None: none did."""
    until_step: int | None = None
    outcome: str = "nobody took its place"
    cost: str = ""

    @property
    def text(self) -> str:
        """The loss as the text of a tooltip."""
        after = f", {self.outcome} after {self.seconds:.1f} s" if self.seconds is not None else f": {self.outcome}"
        return f"{self.member} lost at step {self.step}{after}"


def faults_of(events: Sequence[Mapping[str, Any]]) -> list[Fault]:
    """Losses of a run, in their order."""
    found: list[Fault] = []
    absent: dict[str, Fault] = {}
    for event in events:
        kind, member = event.get("kind"), str(event.get("member", ""))
        if kind == "fault" and member in absent:
            absent[member].num_tries += 1
        elif kind == "fault" or (kind == "returning" and not absent):
            fault = _fault(event, events)
            found.append(fault)
            absent[fault.member] = fault
        elif kind == "taken_over":
            found.append(_taken_over(event, events))
        elif kind == "recovered" and member in absent:
            _replaced(absent.pop(member), event)
        elif kind == "returned":
            for fault in absent.values():
                _returned(fault, event, _seconds(event, events))
            absent.clear()
    return found


def duration_s(events: Sequence[Mapping[str, Any]]) -> float:
    """Seconds from the first event to the last."""
    return _seconds(events[-1], events) if events else 0.0


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
class FaultTimeline:
    """Faults in pixels: the times at which members were away, by wall time; `reporting/templates/` draws them.
    Members in lanes, those that were lost first on top."""

    WIDTH: ClassVar = 1060
    LEFT: ClassVar = 170
    RIGHT: ClassVar = 1045
    LANE: ClassVar = 22
    BAR: ClassVar = 12

    lanes: list[tuple[float, str]]
    """y of the middle, and the member."""
    bars: list[Bar]
    columns: list[tuple[float, float]]
    """x and seconds of wall time."""
    height: float

    @classmethod
    def of(cls, faults: Sequence[Fault], total_s: float) -> "FaultTimeline | None":
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
        columns = [(cls.LEFT + part / 5 * (cls.RIGHT - cls.LEFT), part / 5 * total_s) for part in range(6)]
        return cls(lanes, bars, columns, len(members) * cls.LANE)


def _fault(event: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Fault:
    message = str(event.get("message") or "").partition("\n")[0]
    return Fault(
        member=str(event.get("member") or WHOLE_RUN),
        role=str(event.get("role") or WHOLE_RUN),
        at_s=_seconds(event, events),
        step=int(event.get("step", event.get("from_step", 0))),
        cause=f"{event.get('error', '')}: {message}",
    )


def _taken_over(event: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Fault:
    seconds = float(event.get("silent_s", 0.0))
    return Fault(
        COMMAND, COMMAND, at_s=max(0.0, _seconds(event, events) - seconds), step=int(event.get("step", 0)),
        cause="its process is gone", seconds=seconds, outcome="another took over",
    )  # fmt: skip


def _replaced(fault: Fault, event: Mapping[str, Any]) -> None:
    fault.seconds = float(event.get("seconds", 0.0))
    fault.until_step = int(event.get("step", fault.step))
    fault.outcome = "replaced"
    costs = [f"{tokens:,} tokens made again"] if (tokens := int(event.get("tokens_again", 0))) else []
    if fault.num_tries > 1:
        costs.append(f"failed restarts: {fault.num_tries - 1}")
    fault.cost = ", ".join(costs)


def _returned(fault: Fault, event: Mapping[str, Any], at_s: float) -> None:
    fault.seconds = max(0.0, at_s - fault.at_s)
    fault.until_step = fault.step
    fault.outcome = f"returned to step {event.get('step', 0)}"
    if steps := event.get("steps_again"):
        fault.cost = f"{steps} steps and {event.get('tokens_again', 0):,} tokens trained again"


def _seconds(event: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> float:
    """Seconds from the first event to this one. 0 where a time stamp cannot be read."""
    try:
        first, this = (datetime.fromisoformat(str(one.get("time"))) for one in (events[0], event))
    except ValueError:
        return 0.0
    return max(0.0, (this - first).total_seconds())
