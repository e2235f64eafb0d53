"""Marks on the steps of a run's charts that tell what happened: in the page, in `report.html` and in the PNGs. Pure.

    bad    members or commands that were lost, until others served; checkpoints that failed
    warn   what the run says is wrong with it
    good   the goal of the evaluation was reached; the best checkpoint, of those that are kept for their score
    note   checkpoints, members that joined or left, resumptions, the way in which CPUs are shared

A kind of which there are many becomes a few marks that each stand for several. Events that say no step have no mark.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.orchestrator.observability.faults import faults_of

MOST = 16
"""Most marks of one kind: more of them hide the curves."""
Event = Mapping[str, Any]


@dataclass(frozen=True)
class Mark:
    step: float
    text: str
    level: str = "note"
    until: float | None = None
    """Last step of what lasted for several steps."""

    def plain(self) -> dict[str, Any]:
        """The mark as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class _Kind:
    """The way in which one kind of events is told."""

    several: str
    text: Callable[[Event], str]
    level: str = "note"


def _member(event: Event, verb: str) -> str:
    return f"{event.get('member', 'a member')} {verb}"


KINDS = {
    "checkpoint": _Kind("checkpoints", lambda event: "checkpoint"),
    "checkpoint_failed": _Kind("failed checkpoints", lambda event: f"checkpoint failed: {_short(event)}", "bad"),
    "joined": _Kind("members joined", lambda event: _member(event, "joined")),
    "left": _Kind("members left", lambda event: _member(event, "left")),
    "join_failed": _Kind(
        "members failed to join", lambda event: f"{_member(event, 'failed to join')}: {_short(event)}"
    ),
    "paced": _Kind("choices of pace", lambda event: str(event.get("text"))),
    "resume": _Kind("resumptions", lambda event: f"resumed from step {event.get('step')}"),
    "stopped_early": _Kind(
        "goals reached",
        lambda event: f"goal reached: accuracy {_percent(event.get('accuracy'))} of {_percent(event.get('goal'))}",
        "good",
    ),
    "warning": _Kind("warnings", lambda event: f"warning: {event.get('text')}", "warn"),
}
"""Kinds of marks by event, without those that `faults.py` tells: lost members, returns, commands that took over."""


def marks_of(events: Sequence[Event]) -> list[Mark]:
    """Marks of a run, by step."""
    faults = [Mark(fault.step, fault.text, "bad", fault.until_step) for fault in faults_of(events)]
    found = few(faults, "losses of members")
    for name, kind in KINDS.items():
        own = [event for event in events if event.get("kind") == name and _has_step(event)]
        found += few([Mark(event["step"], kind.text(event), kind.level) for event in own], kind.several)
    if best := best_of(events):
        found.append(Mark(best["step"], f"best checkpoint: {best['metric']} {best['score']:.4g}", "good"))
    return sorted(found, key=lambda mark: mark.step)


def best_of(events: Sequence[Event]) -> dict[str, Any] | None:
    """Step, metric and score of the best checkpoint by now; None where none is kept for its score."""
    last = next((event for event in reversed(events) if event.get("kind") == "checkpoint_scored"), {})
    step, score, metric = last.get("best"), last.get("best_score"), last.get("metric")
    if not (_is_number(step) and _is_number(score) and isinstance(metric, str)):
        return None
    return {"step": step, "metric": metric, "score": score}


def few(marks: Sequence[Mark], several: str) -> list[Mark]:
    """Reduce marks to at most `MOST`: neighbours become one mark, which says how many it stands for."""
    if len(marks) <= MOST:
        return list(marks)
    size = math.ceil(len(marks) / MOST)
    ordered = sorted(marks, key=lambda mark: mark.step)
    return [_joined(ordered[start : start + size], several) for start in range(0, len(ordered), size)]


def _joined(marks: Sequence[Mark], several: str) -> Mark:
    first, last = marks[0], marks[-1]
    if len(marks) == 1:
        return first
    text = f"{len(marks)} {several}, steps {first.step:g} to {last.step:g}; the first: {first.text}"
    return Mark(first.step, text, first.level)


def _has_step(event: Event) -> bool:
    return _is_number(event.get("step"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _short(event: Event) -> str:
    text = str(event.get("message") or "").partition("\n")[0]
    return text if len(text) <= 120 else text[:119] + "…"


def _percent(share: Any) -> str:
    return f"{share:.1%}" if isinstance(share, int | float) else "?"
