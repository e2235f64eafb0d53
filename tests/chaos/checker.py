"""Reads what a disturbed run has left in its directory, and says what it did not keep of what Penstock promises. It
knows nothing of how the run works: files in, sentences out.

    metrics.jsonl           every step is there once; what was admitted = trained + dropped by reason + in flight
    samples/step_N.parquet  every row is trained once, of whole groups, none staler than the bound
    events.jsonl            every fault was noticed in time, and answered
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pyarrow import parquet

from tests.chaos.disturbance import Done
from tests.chaos.plan import COMMAND, CUT, FENCE, POWER

NOTICED = (
    "fault", "ended", "returning", "returned", "return_failed", "failed", "interrupted", "node_left", "resume",
    "start", "taken_over",
)  # fmt: skip
"""Kinds of events by which a run says that something has happened to it; `resume`, `start`, `taken_over`: of the
command that was started again, from a checkpoint, from the beginning, or with the actors."""


@dataclass(frozen=True)
class Promises:
    """Promises of one run."""

    num_steps: int
    groups_per_step: int
    group_size: int
    max_staleness: int
    noticed_s: dict[str, float]
    """Seconds within which a fault is noticed, by how it was done."""
    start_s: float
    """Further seconds where the run was just starting: an actor that has started and dies is missed once all others
    have started, too."""


@dataclass(frozen=True)
class Answer:
    """A fault, and what the run made of it."""

    done: Done
    noticed_after_s: float | None
    """None: it was not."""
    outcome: str
    """`recovered`, `returned`; `did without` for a node whose work others did; `taken over` for a command that was
    started again and has gone on with the actors, `command` for one that has started all anew; `over` where the run had
    done its work; `nothing` for a cable that was out."""
    seconds: float
    """Seconds that the answer took."""
    was_starting: bool
    """The run was, or the member was just taking the place of one that was lost."""


def broken(directory: Path, promises: Promises, faults: Sequence[Done]) -> list[str]:
    """What was not kept."""
    answers = answers_of(directory, faults)
    return [
        *_of_steps(_lines(directory / "metrics.jsonl"), promises),
        *_of_samples(directory / "samples", promises, _lines(directory / "events.jsonl")),
        *_of_events(_lines(directory / "events.jsonl")),
        *_of_answers(answers, promises),
    ]


def answers_of(directory: Path, faults: Sequence[Done]) -> list[Answer]:
    events = [(_seconds(event), event) for event in _lines(directory / "events.jsonl")]
    return [_answer(done, [(at - done.at, event) for at, event in events]) for done in faults]


def _answer(done: Done, events: Sequence[tuple[float, dict[str, Any]]]) -> Answer:
    """`events`: with the seconds since the fault."""
    turns = [event["kind"] for after, event in events if after < 0 and event["kind"] in ("placed", "serving")]
    was_starting = turns[-1:] == ["placed"] or _was_replaced(done, [event for after, event in events if after < 0])
    if any(event["kind"] == "end" and after < 0 for after, event in events):
        return Answer(done, None, "over", 0.0, was_starting)
    later = [(after, event) for after, event in events if after >= -0.01]
    noticed = next((after for after, event in later if event["kind"] in NOTICED and _is_of(event, done)), None)
    for after, event in later:
        if event["kind"] == "recovered" and _is_of(event, done):
            return Answer(done, noticed, "recovered", event["seconds"], was_starting)
        if event["kind"] == "node_left" and (done.how == POWER or done.who == f"Agent-{event['node']}"):
            return Answer(done, noticed, "did without", 0.0, was_starting)
        if event["kind"] == "left" and _is_of(event, done):  # its node has gone before it was back
            return Answer(done, noticed, "did without", 0.0, was_starting)
        if event["kind"] == "returned":
            return Answer(done, noticed, "returned", event["seconds"], was_starting)
        if event["kind"] == "taken_over" and done.who == COMMAND:
            return Answer(done, noticed, "taken over", after, was_starting)
        if event["kind"] in ("resume", "start"):
            return Answer(done, noticed, "command", after, was_starting)
        if event["kind"] == "end":
            return Answer(done, noticed, "over", after, was_starting)
    return Answer(done, noticed, "nothing", 0.0, was_starting)


def _was_replaced(done: Done, before: Sequence[dict[str, Any]]) -> bool:
    """Whether another was just taking the member's place. `before`: the events until the fault."""
    if done.who == COMMAND or done.how == POWER:
        return False
    about = [
        event["kind"] for event in before
        if event["kind"] in ("returned", "serving") or (event["kind"] in ("fault", "recovered") and _is_of(event, done))
    ]  # fmt: skip
    return about[-1:] == ["fault"]


def _is_of(event: dict[str, Any], done: Done) -> bool:
    """Whether it may be about the fault. A return is about all that had died until then."""
    if "member" not in event or done.who == COMMAND or done.how == POWER:
        return True
    first, _, last = event["member"].partition(" to ")
    return event["member"].startswith(done.who) or (bool(last) and first <= done.who <= last)


def _of_steps(lines: Sequence[dict[str, Any]], promises: Promises) -> Iterable[str]:
    steps = [line["step"] for line in lines if line["step"]]
    if steps != list(range(1, promises.num_steps + 1)):
        yield f"steps were logged as {steps}, not as 1 to {promises.num_steps}"
    size = promises.group_size
    for line in lines:
        if "store/groups_admitted" not in line:
            continue
        admitted, trained = line["store/groups_admitted"] * size, line.get("store/rows_trained", 0)
        dropped = sum(value for name, value in line.items() if name.startswith("dropped/"))
        if admitted != trained + dropped + line["store/rows"]:
            yield (
                f"step {line['step']}: of {admitted:g} rows that were admitted {trained:g} were trained and "
                f"{dropped:g} dropped, and {line['store/rows']:g} are in flight"
            )
        if trained < line["step"] * promises.groups_per_step * size:
            yield f"step {line['step']}: only {trained:g} rows have been trained"


def _of_samples(samples: Path, promises: Promises, events: Sequence[dict[str, Any]]) -> Iterable[str]:
    trained_in: dict[int, int] = {}
    lost = {event["step"] for event in events if event["kind"] == "samples_lost"}
    """With a store: what was trained is not known from files."""
    for step in range(1, promises.num_steps + 1):
        file = samples / f"step_{step}.parquet"
        if not file.exists() and step in lost:
            continue
        if not file.exists():
            yield f"{file.name} is not there"
            continue
        rows = parquet.read_table(file).to_pydict()
        for row in rows["row_id"]:
            if row in trained_in:
                yield f"row {row} was trained in step {trained_in[row]} and in step {step}"
            trained_in[row] = step
        sizes = Counter(rows["group_id"])
        if len(sizes) != promises.groups_per_step or set(sizes.values()) != {promises.group_size}:
            yield f"step {step} was trained on groups of {sorted(sizes.values())} rows"
        versions = [version for row in rows["token_versions"] for version in row]
        if min(versions) < step - 1 - promises.max_staleness:
            yield f"step {step} has a token of version {min(versions)}"
        if max(versions) > step - 1:
            yield f"step {step} has a token of version {max(versions)}, which was not there yet"
    if promises.max_staleness == 0 and not lost and sorted(trained_in) != list(range(len(trained_in))):
        yield "rows were left out between others that were trained"


def _of_events(events: Sequence[dict[str, Any]]) -> Iterable[str]:
    if events[-1]["kind"] != "end":
        yield f"the last event is {events[-1]['kind']!r}"
    lost = Counter(event["member"] for event in events if event["kind"] == "fault")
    for member in {event["member"] for event in events if event["kind"] == "recovered"}:
        if not lost[member]:
            yield f"{member} recovered from nothing"


def _of_answers(answers: Sequence[Answer], promises: Promises) -> Iterable[str]:
    for answer in answers:
        done = answer.done
        what = f"{done.how} {done.who} after step {done.step}"
        if done.how in (CUT, FENCE):
            continue
        bound = promises.noticed_s[done.how] + (promises.start_s if answer.was_starting else 0.0)
        if answer.outcome == "over" and answer.seconds <= bound:
            continue
        if answer.noticed_after_s is None or answer.outcome in ("nothing", "over"):
            yield f"{what}: nobody noticed"
        elif answer.noticed_after_s > bound:
            yield f"{what}: noticed after {answer.noticed_after_s:.1f} s, not within {bound:g} s"


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _seconds(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()
