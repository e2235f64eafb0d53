"""What died in a run, as its events tell it, and where the report draws it."""

from pathlib import Path
from typing import Any

import pytest

from penstock.orchestrator.observability.faults import Fault, FaultTimeline, faults_of
from penstock.orchestrator.observability.reporting.closing import cards_of
from penstock.orchestrator.observability.reporting.report import write_report
from tests.orchestrator.observability.reporting.test_report import checked, make_run


def event(at_s: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": f"2026-01-01T00:{int(at_s) // 60:02}:{at_s % 60:06.3f}Z", "kind": kind, **fields}


def lost(seconds: float, member: str, role: str, step: int) -> dict[str, Any]:
    return event(seconds, "fault", member=member, role=role, step=step, error="WorkerDied", message="killed\nlog: x")


def test_a_member_that_was_replaced_says_when_and_how_long_it_was_away() -> None:
    events = [
        event(0, "start"),
        lost(70, "Rollout-0", "rollout", 3),
        event(72, "recovered", member="Rollout-0", role="rollout", step=4, seconds=2.0),
    ]
    expected = Fault("Rollout-0", "rollout", 70.0, 3, "WorkerDied: killed", 1, 2.0, 4, "replaced")
    assert faults_of(events) == [expected]
    assert expected.text == "Rollout-0 lost at step 3, replaced after 2.0 s"


def test_a_restart_that_failed_is_the_same_loss() -> None:
    events = [event(0, "start"), lost(1, "Rollout-0", "rollout", 3), lost(5, "Rollout-0", "rollout", 3)]
    events.append(event(9, "recovered", member="Rollout-0", role="rollout", step=3, seconds=8.0, tokens_again=1234))
    (fault,) = faults_of(events)
    assert (fault.num_tries, fault.seconds) == (2, 8.0)
    assert fault.cost == "1,234 tokens made again, failed restarts: 1"


def test_a_return_mends_all_and_says_what_is_done_twice() -> None:
    events = [
        event(0, "start"),
        lost(30, "Rollout-0", "rollout", 6),
        lost(31, "Store", "store", 6),
        event(32, "returning", from_step=5, error="WorkerDied", message="the store"),
        event(50, "returned", step=4, seconds=18.0, steps_again=1, tokens_again=2000),
        event(60, "returning", from_step=5, error="PartnerGone", message="somebody"),
        event(70, "given_up", reason="too many"),
    ]
    engine, store, run = faults_of(events)
    assert (engine.seconds, store.seconds) == (20.0, 19.0)
    assert store.outcome == "returned to step 4"
    assert store.cost == "1 steps and 2,000 tokens trained again"
    assert (run.member, run.step, run.seconds, run.outcome) == ("the run", 5, None, "nobody took its place")


def test_marks_lie_in_their_chart_and_bars_in_their_lane() -> None:
    faults = [
        Fault("Rollout-0", "rollout", 10.0, 2, "", seconds=30.0, until_step=4),
        Fault("Store", "store", 50.0, 9, ""),
        Fault("Rollout-0", "rollout", 60.0, 0, "", seconds=1.0),
    ]
    timeline = FaultTimeline.of(faults, 100.0)
    assert timeline is not None
    assert [member for _, member in timeline.lanes] == ["Rollout-0", "Store"]
    first, second, third = timeline.bars
    assert first.lane == third.lane < second.lane
    assert first.width == pytest.approx(0.3 * (FaultTimeline.RIGHT - FaultTimeline.LEFT))
    assert second.left + second.width == pytest.approx(FaultTimeline.RIGHT)
    assert [bar.is_open for bar in timeline.bars] == [False, True, False]
    assert [(bar.label.anchor, bar.label.text) for bar in timeline.bars] == [
        ("start", "rollout, 30.0 s"), ("end", "store"), ("end", "rollout, 1.0 s"),
    ]  # fmt: skip
    assert FaultTimeline.of([], 100.0) is None


def test_the_report_shows_who_died(tmp_path: Path) -> None:
    directory = make_run(tmp_path, 0, ended=None)
    directory.event("fault", member="Rollout-0", role="rollout", step=1, error="WorkerDied", message="<killed>")
    directory.event("recovered", member="Rollout-0", role="rollout", step=2, seconds=4.25)
    for step in (1, 2, 3):
        directory.log_metrics({"step": step, "reward/mean": 0.5, "faults/effective_time": 0.95})
    directory.close()
    text = checked(write_report(directory.path))
    assert "WorkerDied: &lt;killed&gt;" in text
    assert text.count("Rollout-0 lost at step 1, replaced after 4.2 s") == 2  # in the chart and in the timeline
    (card,) = (card for card in cards_of(directory) if card.label == "Members lost")
    assert (card.value, card.detail) == ("1", "rollout 1; effective training time 95.0%")


def test_a_report_without_faults_has_no_word_of_them(tmp_path: Path) -> None:
    text = checked(write_report(make_run(tmp_path, 3).path, pngs=False))
    assert "What died" not in text
