"""The spans of a step by lane, few enough to be kept for every step. Pure.

Groups of an engine that took different times stay apart, so that stragglers are seen; what other stages do in a row
becomes one span.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.orchestrator.run_directory.timeline import Span, Work

FINE = 150
"""Number of parts of a step: groups of an engine that begin in one part and end in one part are one span."""
TOUCH_S = 0.005
"""Longest gap in seconds between work that is one span."""
WAIT_SHARE = 0.02
"""Share of the step beyond which a gap is told as a wait."""
SEPARATE = "rollout"
"""The stage whose groups are kept apart."""

Lanes = dict[str, list[Span]]


def lanes_of(spans: Iterable[Span], work: Sequence[Work], members: Mapping[str, Sequence[str]]) -> Lanes:
    """Spans by lane. `members`: the lanes that a lane for all members of a role stands for."""
    lanes: Lanes = {}
    for span in spans:
        for lane in members.get(span.lane, (span.lane,)):
            lanes.setdefault(lane, []).append(Span(lane, span.name, span.start, span.end, span.details))
    length = max((one.end for one in work), default=0.0) - min((one.start for one in work), default=0.0)
    for (owner, stage), own in _by_owner(work).items():
        spans_of = _alike(owner, stage, own, length / FINE) if stage == SEPARATE else _joined(owner, stage, own)
        lanes.setdefault(owner, []).extend(spans_of)
    return {lane: sorted(found, key=lambda span: span.start) for lane, found in sorted(lanes.items())}


def with_waits(lanes: Lanes, start: float, end: float, awaited: Mapping[str, str]) -> Lanes:
    """The lanes with what members waited for while they did nothing. `awaited`: that, by lane."""
    found: Lanes = {}
    for lane in sorted(lanes.keys() | awaited.keys()):
        spans, at = lanes.get(lane, []), start
        waits = []
        for span in [*spans, Span(lane, "", end, end)]:
            if lane in awaited and min(span.start, end) - at > WAIT_SHARE * (end - start):
                waits.append(Span(lane, f"wait for {awaited[lane]}", at, min(span.start, end)))
            at = max(at, span.end)
        found[lane] = sorted([*spans, *waits], key=lambda span: span.start)
    return found


def _by_owner(work: Iterable[Work]) -> dict[tuple[str, str], list[Work]]:
    """Work by owner and stage."""
    found: dict[tuple[str, str], list[Work]] = {}
    for one in work:
        found.setdefault((one.owner, one.stage), []).append(one)
    return found


def _alike(owner: str, stage: str, work: Sequence[Work], part_s: float) -> list[Span]:
    """Spans of groups that took nearly the same time. `group`: the last one of those that a span stands for."""
    parts: dict[tuple[int, int], list[Work]] = {}
    for one in work:
        place = (round(one.start / part_s), round(one.end / part_s)) if part_s else (0, 0)
        parts.setdefault(place, []).append(one)
    found = []
    for same in parts.values():
        last = max(same, key=lambda one: one.end)
        details = {"group": last.group, "groups": len(same), "rows": round(sum(one.rows for one in same))}
        found.append(Span(owner, stage, min(one.start for one in same), last.end, details))
    return found


def _joined(owner: str, stage: str, work: Sequence[Work]) -> list[Span]:
    found: list[list[Any]] = []
    for one in sorted(work, key=lambda one: one.start):
        if found and one.start <= found[-1][1] + TOUCH_S:
            found[-1][1] = max(found[-1][1], one.end)
            found[-1][2] += one.rows
        else:
            found.append([one.start, one.end, one.rows])
    return [Span(owner, stage, start, end, {"rows": round(rows)}) for start, end, rows in found]
