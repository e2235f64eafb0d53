"""A tracker that is down, slow or broken costs the run nothing, what it lacks is told, and no number comes twice."""

import doctest
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.orchestrator.observability import differences
from penstock.orchestrator.observability.reporting import sinks, trackers
from penstock.orchestrator.observability.reporting.trackers import End, NewSteps
from tests.orchestrator.observability.reporting.sinks.scripted_tracker import (
    PATIENCE_S,
    Gate,
    Scripted,
    new_run,
    sender_to,
    sent,
    until,
)

SHORT_S = 0.05
"""A deadline that is to pass."""
LINES = st.lists(st.tuples(st.integers(0, 5), st.dictionaries(st.sampled_from("abc"), st.just(1.0))))


def test_every_step_arrives_in_order_and_then_the_end(tmp_path: Path) -> None:
    directory, tracker = new_run(tmp_path), Scripted()
    sender, told = sender_to(tracker, directory)
    sent(sender, *range(5))
    assert tracker.calls == ["open", "0", "1", "2", "3", "4", "finish"]
    assert tracker.numbers == [{"loss": 1.0}] * 5
    assert tracker.end == End("finished")
    assert told == ["tracker: its page"]
    assert not directory.failed_writes.lost
    (event,) = [event for event in directory.read_events() if event["kind"] == "tracked"]
    assert (event["tracker"], event["id"], event["place"]) == ("tracker", "new", "its page")


def test_an_evaluation_arrives_after_later_steps_which_stay_the_last(tmp_path: Path) -> None:
    directory, tracker = new_run(tmp_path), Scripted()
    sender, _ = sender_to(tracker, directory)
    for step in range(4):
        sender.log(step, {"loss": 1.0})
    sender.log(2, {"accuracy/heldout": 0.5, "evaluation/step": 2})
    sender.log(1, {"loss": 1.0})  # a step that is taken again
    sender.finish(End("finished"))
    sender.close()
    assert tracker.calls == ["open", "0", "1", "2", "3", "2", "finish"]
    assert tracker.numbers[-1] == {"accuracy/heldout": 0.5, "evaluation/step": 2.0}
    assert trackers.TrackerState(directory, "tracker").step == 3


def test_a_tracker_that_hangs_is_left_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, gate = new_run(tmp_path), Gate("1")
    sender, told = sender_to(Scripted(gate), directory)
    for step in range(4):
        sender.log(step, {"loss": 1.0})
    sender.finish(End("finished"))
    assert gate.reached.wait(60.0)
    monkeypatch.setattr(trackers, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + PATIENCE_S))
    sender.close()
    gate.open()
    (left,) = [text for text in told if "left" in text]
    assert left == "tracker: has not closed within 60 s, and is left. It lacks 3 steps; metrics.jsonl has them."
    assert directory.failed_writes.lost == {"tracker": 3}
    assert directory.failed_writes.waiting.total() == 0


def test_a_tracker_that_hangs_at_its_end_lacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, gate = new_run(tmp_path), Gate("finish")
    sender, told = sender_to(Scripted(gate), directory)
    sender.log(1, {"loss": 1.0})
    sender.finish(End("finished"))
    assert gate.reached.wait(60.0)
    monkeypatch.setattr(trackers, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + PATIENCE_S))
    sender.close()
    gate.open()
    assert told[-1].endswith("and is left. It has every step.")
    assert not directory.failed_writes.lost


def test_a_tracker_that_hangs_until_after_the_end_writes_nothing_any_more(tmp_path: Path) -> None:
    directory, gate = new_run(tmp_path), Gate("open")
    tracker = Scripted(gate)
    sender, told = sender_to(tracker, directory, SHORT_S)
    sent(sender, 1, 2)
    gate.open()
    until(lambda: "tracker-tracker" not in {thread.name for thread in threading.enumerate()})
    assert tracker.calls == ["open"]
    assert not (directory.path / "trackers").exists()
    assert told == ["tracker: has not closed within 0.05 s, and is left. It lacks 2 steps; metrics.jsonl has them."]


def test_a_tracker_that_was_down_gets_everything_once_it_is_back(tmp_path: Path) -> None:
    failures = Counter({"open": 2, "3": 2})

    def down_for_a_while(call: str) -> None:
        if failures[call]:
            failures[call] -= 1
            raise ConnectionRefusedError("nobody there\nand a long page about it")

    directory, tracker = new_run(tmp_path), Scripted(down_for_a_while)
    sender, told = sender_to(tracker, directory)
    sender.log(1, {"loss": 1.0})
    until(lambda: tracker.calls == ["open", "1"])
    for step in (2, 3):
        sender.log(step, {"loss": 1.0})
    until(lambda: tracker.calls[-1] == "3")
    sent(sender, 4)
    assert tracker.calls == ["open", "1", "2", "3", "4", "finish"]
    assert not directory.failed_writes.lost
    trouble = [text for text in told if "written" in text]
    assert [text.partition(". The run")[0] for text in trouble] == [
        "tracker: cannot be written: ConnectionRefusedError: nobody there", "tracker: can be written again",
    ] * 2  # fmt: skip


def test_a_tracker_that_stays_down_is_told_once_with_what_it_lacks(tmp_path: Path) -> None:
    def is_down(call: str) -> None:
        raise ConnectionRefusedError("nobody there")

    directory = new_run(tmp_path)
    sender, told = sender_to(Scripted(is_down), directory, pause_s=60.0)
    sent(sender, *range(100))
    assert [text.partition(":")[2].partition(":")[0] for text in told] == [
        " cannot be written",
        " It lacks 100 steps; metrics.jsonl has them.",
    ]
    assert directory.failed_writes.lost == {"tracker": 100}
    assert [event["what"] for event in directory.read_events() if event["kind"] == "recording_failed"] == ["tracker"]


def test_a_step_that_it_chokes_on_costs_that_step_alone(tmp_path: Path) -> None:
    def chokes(call: str) -> None:
        if call == "2":
            raise KeyError("what a broken package raises")

    directory, tracker = new_run(tmp_path), Scripted(chokes)
    sender, _ = sender_to(tracker, directory)
    sent(sender, 1, 2, 3)
    assert tracker.calls == ["open", "1", "3", "finish"]
    assert directory.failed_writes.lost == {"tracker": 1}


def test_more_than_fits_in_the_queue_is_dropped_from_its_old_end_and_told_once(tmp_path: Path) -> None:
    directory, gate = new_run(tmp_path), Gate("open")
    tracker = Scripted(gate)
    sender, told = sender_to(tracker, directory, most=3)
    for step in range(10):
        sender.log(step, {"loss": 1.0})
    assert directory.failed_writes.waiting["tracker"] == 3
    gate.open()
    sent(sender)
    assert tracker.calls == ["open", "7", "8", "9", "finish"]
    assert directory.failed_writes.lost == {"tracker": 7}
    assert len([text for text in told if "queue" in text]) == 1


def test_a_run_that_goes_on_is_the_same_run_and_gives_no_step_twice(tmp_path: Path) -> None:
    directory, first = new_run(tmp_path), Scripted()
    sent(sender_to(first, directory)[0], 1, 2, 3)
    second = Scripted()
    sent(sender_to(second, directory)[0], 2, 3, 4)
    assert second.ids == ["new"]
    assert second.calls == ["open", "4", "finish"]


def test_a_run_that_returns_to_a_checkpoint_gives_no_step_twice(tmp_path: Path) -> None:
    directory, tracker = new_run(tmp_path), Scripted()
    sent(sender_to(tracker, directory)[0], 1, 2, 3, 2, 3, 4)
    assert tracker.calls == ["open", "1", "2", "3", "4", "finish"]


def test_a_damaged_note_of_the_last_run_does_no_harm(tmp_path: Path) -> None:
    directory, tracker = new_run(tmp_path), Scripted()
    (directory.path / "trackers").mkdir()
    (directory.path / "trackers" / "tracker.json").write_text("{")
    sent(sender_to(tracker, directory)[0], 1)
    assert tracker.ids == [None]
    assert tracker.calls == ["open", "1", "finish"]


def test_the_examples_of_the_trackers_hold() -> None:
    assert [doctest.testmod(module).failed for module in (trackers, sinks, differences)] == [0, 0, 0]


@given(LINES, st.none() | st.integers(0, 3))
def test_steps_grow_and_no_number_comes_twice(lines: list[tuple[int, dict[str, float]]], after: int | None) -> None:
    new = NewSteps(after)
    heard = [(step, name) for step, numbers in lines for name in new.of(step, numbers)]
    steps = [step for step, _ in heard]
    assert steps == sorted(steps)
    assert len(set(heard)) == len(heard)
    assert all(after is None or step > after for step in steps)


@given(st.lists(st.integers(0, 50), unique=True))
def test_a_run_without_repetitions_loses_nothing(steps: list[int]) -> None:
    new = NewSteps(None)
    assert all(new.of(step, {"a": 1.0}) == {"a": 1.0} for step in sorted(steps))
