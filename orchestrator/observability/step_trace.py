"""Writes the timeline of a run, a line of `spans.jsonl` a step: busy times of actors, and what the step waited for.

    the controller's spans ┐
    the store's work log   ├─▶ lanes, critical path ─▶ spans.jsonl ─▶ the page; at the end timeline.json
    the ranks' reports     ┘

Lines are written during the next step: no step waits for it. They are few enough to be kept for every step: groups of
an engine that took different times stay apart, so that stragglers are seen; what other stages do in a row becomes one
span.

The critical path of a step is the chain of what each next thing waited for, one thing at a time; it is pure:

    ranks wait for the batch ◀─ the last write of its rows ◀─ what that one had waited for ◀─ … ◀─ its admission
    then: update, save, publish, load, evaluate

The path is walked backwards from the moment that the batch was complete, as in the analysis of critical paths of
parallel programs: what is not on the path could have been faster without the step being shorter.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import PenstockError
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.timeline import Span, Work, WorkReport
from penstock.workers.trainer.step_report import StepReport

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


ENGINES, TRAINER = "engines", "trainer"
"""Lanes that stand for all members of a role."""
FINE = 150
"""Number of parts of a step: groups of an engine that begin in one part and end in one part are one span."""
TOUCH_S = 0.005
"""Longest gap in seconds between work that is one span."""
WAIT_SHARE = 0.02
"""Share of the step beyond which a gap is told as a wait."""
SEPARATE = "rollout"
"""The stage whose groups are kept apart."""
Lanes = dict[str, list[Span]]


@dataclass(frozen=True)
class ClosedStep:
    """A step that is over, and not written yet."""

    step: int
    start: float
    end: float
    rank: Sequence[Span]
    """Spans of the slowest rank."""
    groups: Collection[int]
    """Groups of the step's batch."""


class StepTrace:
    """Lifecycle: `begin` when the first step does; `updated` with each step's reports, `close` once all that the next
    step waits for is done; `finish` after the last one."""

    def __init__(
        self,
        directory: RunDirectory,
        work: Callable[[], Awaitable[Mapping[str, Any]]],
        names: Callable[[str], Sequence[str]],
        awaited: Callable[[], Mapping[str, str]],
        group_size: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`work`: asks the store what was done. `names`: returns the present members of a role. `awaited`: returns what
        each member waits for when it does nothing, by member; ranks say that themselves."""
        self._directory, self._work, self._names, self._group_size = directory, work, names, group_size
        self._awaited = awaited
        self._clock = clock
        self._began = clock()
        self._rank: list[Span] = []
        """Spans of the slowest rank in this step."""
        self._groups: set[int] = set()
        """Groups of the batch of this step."""
        self._writing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._began = self._clock()

    def updated(self, step: int, reports: Sequence[StepReport], end: float) -> None:
        """Note that all ranks have made the step's update, at `end`."""
        by_rank = spans_of_ranks(self._names(TRAINER), step, reports, end)
        for spans in by_rank:
            for span in spans:
                self._directory.timeline.add(span)
        self._rank = max(by_rank, key=lambda spans: spans[-1].end - spans[0].start)
        ids = [row for report in reports for row in report.row_ids.tolist()]
        self._groups = {row // self._group_size for row in ids}

    async def close(self, step: int) -> None:
        """Close a step that is over. Its line is written while the next step is made."""
        await self.finish()
        now = self._clock()
        closed = ClosedStep(step, self._began, now, self._rank, self._groups)
        self._began, self._rank, self._groups = now, [], set()
        self._writing = asyncio.create_task(self._write(closed))

    async def finish(self) -> None:
        """Wait until the line that is being written is there."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    async def _write(self, closed: ClosedStep) -> None:
        try:
            report = WorkReport.of(await self._work(), self._clock())
        except PenstockError:  # the step's line says that it lacks the store's part
            report = None
        spans = self._directory.timeline.take()
        members = {TRAINER: self._names(TRAINER), ENGINES: self._names("rollout")}
        awaited = {lane: what for lane, what in self._awaited().items() if lane not in members[TRAINER]}
        await asyncio.to_thread(self._record, closed, report, spans, members, awaited)

    def _record(
        self,
        closed: ClosedStep,
        report: WorkReport | None,
        spans: Sequence[Span],
        members: Mapping[str, Sequence[str]],
        awaited: Mapping[str, str],
    ) -> None:
        """Write the line, in a thread: only the next step's line waits for it."""
        self._directory.log_spans(traced(closed, report, spans, members, awaited))


def spans_of_ranks(names: Sequence[str], step: int, reports: Sequence[StepReport], end: float) -> list[list[Span]]:
    """The spans of each rank in a step whose update ends at `end`: its wait, then its update. `names`: of the ranks."""
    found = []
    for rank, report in enumerate(reports):
        lane, begun = names[rank] if rank < len(names) else TRAINER, end - report.train_s
        parts = {name: round(seconds, 4) for name, seconds in report.seconds.items()}
        wait = Span(lane, WAIT, begun - report.wait_s, begun, {"step": step})
        found.append([wait, Span(lane, "update", begun, end, {"step": step, **parts})])
    return found


def traced(
    closed: ClosedStep,
    report: WorkReport | None,
    spans: Sequence[Span],
    members: Mapping[str, Sequence[str]],
    awaited: Mapping[str, str],
) -> dict[str, Any]:
    """The line of `spans.jsonl` of a step. `report`: the store's part; None: it did not answer. `spans`: the
    controller's and the ranks'. `members`: of the roles that a lane stands for. `awaited`: what members wait for when
    they do nothing."""
    work, admitted = (report.work, report.admitted) if report is not None else ((), {})
    mine = [span for span in spans if span.lane == TRAINER and span.name != WAIT]
    lane = closed.rank[0].lane if closed.rank else TRAINER
    rank = [*closed.rank, *(Span(lane, span.name, span.start, span.end) for span in mine)]
    others = [span for span in spans if span.lane == ENGINES or span.name == "load weights"]
    path = critical_path(closed.start, closed.end, rank, others, work, admitted, closed.groups)
    text = sentence(closed.step, closed.end - closed.start, path)
    lanes = lanes_of(spans, work, {lane: names for lane, names in members.items() if names})
    if report is not None:
        lanes = with_waits(lanes, closed.start, closed.end, awaited)
    missed = None if report is None else report.missed
    return line_of(closed, lanes, path, text, missed)


def line_of(closed: ClosedStep, lanes: Lanes, path: Sequence[Segment], text: str, missed: int | None) -> dict[str, Any]:
    """The line of `spans.jsonl` of a step: times of lanes and path in milliseconds from the step's start."""

    def ms(at: float) -> int:
        return round((at - closed.start) * 1000)

    return {
        "step": closed.step,
        "start": round(closed.start, 3),
        "end": round(closed.end, 3),
        "text": text,
        "missed": missed,
        "path": [[one.lane, words_of(one), ms(one.start), ms(one.end)] for one in path],
        "lanes": {
            lane: [[span.name, ms(span.start), ms(span.end), dict(span.details)] for span in spans]
            for lane, spans in lanes.items()
        },
    }


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
