"""The spans of a step by lane, few enough to be kept of every step. Pure.

Engines keep a span a group, as stragglers are to be seen; what other stages do in a row becomes one span.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.orchestrator.recording.spans import Span, Work

MOST_GROUPS = 64
"""Of an engine in a step; where there are more, those that touch become one."""
TOUCH_S = 0.005
"""Work with no longer gap between is one span."""
SEPARATE = "rollout"
"""The stage whose groups are told apart."""

Lanes = dict[str, list[Span]]


def lanes_of(spans: Iterable[Span], work: Sequence[Work], members: Mapping[str, Sequence[str]]) -> Lanes:
    """`members`: lanes that a lane of all of a role stands for."""
    lanes: Lanes = {}
    for span in spans:
        for lane in members.get(span.lane, (span.lane,)):
            lanes.setdefault(lane, []).append(Span(lane, span.name, span.start, span.end, span.details))
    for owner in dict.fromkeys(one.owner for one in work):
        for stage in dict.fromkeys(one.stage for one in work if one.owner == owner):
            own = [one for one in work if one.owner == owner and one.stage == stage]
            lanes.setdefault(owner, []).extend(_spans(owner, stage, own))
    return {lane: sorted(found, key=lambda span: span.start) for lane, found in sorted(lanes.items())}


def _spans(owner: str, stage: str, work: Sequence[Work]) -> list[Span]:
    if stage == SEPARATE and len(work) <= MOST_GROUPS:
        return [Span(owner, stage, one.start, one.end, {"group": one.group, "rows": round(one.rows)}) for one in work]
    found: list[list[Any]] = []
    for one in sorted(work, key=lambda one: one.start):
        if found and one.start <= found[-1][1] + TOUCH_S:
            found[-1][1] = max(found[-1][1], one.end)
            found[-1][2] += one.rows
        else:
            found.append([one.start, one.end, one.rows])
    return [Span(owner, stage, start, end, {"rows": round(rows)}) for start, end, rows in found]
