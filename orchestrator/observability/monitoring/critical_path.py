"""The critical path of a step: the chain of what each next thing waited for, one thing at a time. Pure.

    ranks wait for the batch ◀─ the last write of its rows ◀─ what that one had waited for ◀─ … ◀─ its admission
    then: update, save, publish, load, evaluate

The path is walked backwards from the moment that the batch was complete, as in the analysis of critical paths of
parallel programs: what is not on the path could have been faster without the step being shorter.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.orchestrator.run_directory.timeline import Span, Work

WAIT = "wait for batch"
CONTROLLER = "Controller"
PROMPTS = "Prompts"
LEAST_S = 0.001
"""Least seconds of a segment; shorter ones are left out."""
TOLD = 3
"""Most things that the sentence names."""
TOLD_SHARE = 0.03
"""Least share of the step that each of them takes."""


@dataclass(frozen=True)
class Segment:
    """A segment of the path: in this time the step waited for this lane."""

    lane: str
    what: str
    start: float
    end: float
    group: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.start


def critical_path(
    start: float,
    end: float,
    rank: Sequence[Span],
    others: Sequence[Span],
    work: Sequence[Work],
    admitted: Mapping[int, float],
    groups: Collection[int],
) -> list[Segment]:
    """The path from `start` to `end`, without gaps but for what is shorter than `LEAST_S`. `rank`: spans of the
    trainer's slowest rank, its wait among them. `others`: spans that the controller waits for in between. `groups`:
    those of the step's batch; the `work` on others is not looked at."""
    path: list[Segment] = []
    at = start
    for span in sorted(rank, key=lambda span: span.start):
        if span.end <= at or span.start >= end:
            continue
        first, last = max(at, span.start), min(span.end, end)
        path += _between(at, first, others)
        if span.name == WAIT:
            path += _chain(first, last, [one for one in work if one.group in groups], admitted)
        else:
            path.append(Segment(span.lane, span.name, first, last))
        at = last
    path += _between(at, end, others)
    return [segment for segment in path if segment.seconds >= LEAST_S]


def sentence(step: int, seconds: float, path: Iterable[Segment]) -> str:
    """A sentence about where the step's time went, the longest first.

    >>> path = [Segment("Rollout-1", "rollout", 0.0, 1.9, 7), Segment("Trainer-policy-0", "update", 1.9, 2.9)]
    >>> sentence(4, 3.1, path)
    "step 4 took 3.1 s: 1.9 s waiting for Rollout-1's last group (7), 1.0 s update"
    """
    totals: dict[str, float] = {}
    for segment in path:
        words = words_of(segment)
        totals[words] = totals.get(words, 0.0) + segment.seconds
    longest = sorted(totals.items(), key=lambda item: -item[1])[:TOLD]
    parts = [f"{_s(took)} {words}" for words, took in longest if took >= TOLD_SHARE * seconds]
    return f"step {step} took {_s(seconds)}" + (f": {', '.join(parts)}" if parts else "")


def words_of(segment: Segment) -> str:
    if segment.group is None or segment.what.startswith("wait"):
        return segment.what
    if segment.what == "rollout":
        return f"waiting for {segment.lane}'s last group ({segment.group})"
    return f"{segment.what} by {segment.lane}"


def _between(start: float, end: float, others: Sequence[Span]) -> list[Segment]:
    """Segments for which the controller waited while the ranks had nothing to do."""
    found, at = [], start
    for span in sorted(others, key=lambda span: span.start):
        first, last = max(at, span.start), min(span.end, end)
        if last > first:
            found += [Segment(CONTROLLER, "between phases", at, first), Segment(span.lane, span.name, first, last)]
            at = last
    return [*found, Segment(CONTROLLER, "between phases", at, end)]


def _chain(start: float, end: float, work: Sequence[Work], admitted: Mapping[int, float]) -> list[Segment]:
    """Segments for which the batch waited, from its last write back."""
    found: list[Segment] = []
    at, current = end, _latest(work, end)
    if current is None:
        return [Segment(CONTROLLER, WAIT, start, end)]
    while current is not None and at > start:
        if current.end < at:
            what = "wait for the batch to be formed" if not found else f"wait for {found[-1].lane} to take the group"
            found.append(Segment(found[-1].lane if found else CONTROLLER, what, max(start, current.end), at))
        at = min(at, current.end)
        found.append(Segment(current.owner, current.stage, max(start, current.start), at, current.group))
        at, group = current.start, current.group
        current = _latest([one for one in work if one.group == group and one.start < at], at)
    if at > start and found:
        came = min(at, max(start, admitted.get(found[-1].group or 0, start)))
        found.append(Segment(found[-1].lane, f"wait for {found[-1].lane} to take the group", came, at))
        found.append(Segment(PROMPTS, "wait for prompts to be admitted", start, came))
    return [segment for segment in reversed(found) if segment.end > segment.start]


def _latest(work: Iterable[Work], end: float) -> Work | None:
    """The work that ended last, of that which began before `end`; what went on longer was not waited for."""
    before = [one for one in work if one.start < end]
    return max(before, key=lambda one: (min(one.end, end), -one.start), default=None)


def _s(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
