"""Losses of a run, with their time and cost, by its events: for the marks, the timeline and the table of the report.

fault ─▶ recovered                     another took its place
fault ─▶ returning ─▶ returned         the run went back to its last checkpoint
fault ─▶ given_up, or nothing          the run ended, or was ended meanwhile
taken_over                             the command itself had died, and another goes on with its actors
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

WHOLE_RUN, COMMAND = "the run", "the command"


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
