"""What happened is marked at its step, and never with more marks than a chart can bear."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.orchestrator.observability.charts.cards import cards
from penstock.orchestrator.observability.marks import MOST, Mark, few, marks_of
from penstock.orchestrator.observability.runs.columns import Columns


def event(kind: str, step: Any = 3, **more: Any) -> dict[str, Any]:
    return {"time": "2026-01-01T00:00:00.000Z", "kind": kind, "step": step, **more}


@pytest.mark.parametrize(
    ("told", "text", "level"),
    [
        (event("checkpoint"), "checkpoint", "note"),
        (event("checkpoint_failed", message="no room\nmore"), "checkpoint failed: no room", "bad"),
        (event("joined", member="Rollout-1"), "Rollout-1 joined", "note"),
        (event("left", member="Rollout-1"), "Rollout-1 left", "note"),
        (event("join_failed", role="rollout", message="no CPU"), "a member failed to join: no CPU", "note"),
        (event("paced", text="engines and ranks take turns"), "engines and ranks take turns", "note"),
        (event("resume"), "resumed from step 3", "note"),
        (event("stopped_early", accuracy=0.95, goal=0.9), "goal reached: accuracy 95.0% of 90.0%", "good"),
        (event("warning", text="it is cut off"), "warning: it is cut off", "warn"),
        (event("taken_over", silent_s=2.0), "the command lost at step 3, another took over after 2.0 s", "bad"),
    ],
)
def test_what_happened_is_told_with_its_level(told: dict[str, Any], text: str, level: str) -> None:
    assert marks_of([event("start", None), told]) == [Mark(3, text, level)]


def test_a_loss_lasts_until_another_serves() -> None:
    lost = event("fault", member="Rollout-0", role="rollout")
    back = event("recovered", step=5, member="Rollout-0", seconds=2.0)
    assert marks_of([event("checkpoint", 4), lost, back]) == [
        Mark(3, "Rollout-0 lost at step 3, replaced after 2.0 s", "bad", 5),
        Mark(4, "checkpoint"),
    ]


def test_only_the_best_checkpoint_by_now_is_marked() -> None:
    first = event("checkpoint_scored", 2, metric="accuracy/heldout", score=0.5, best=2, best_score=0.5)
    second = event("checkpoint_scored", 4, metric="accuracy/heldout", score=0.75, best=4, best_score=0.75)
    third = event("checkpoint_scored", 6, metric="accuracy/heldout", score=0.5, best=4, best_score=0.75)
    told = [event("checkpoint", 4), first, second, third]
    assert marks_of(told) == [Mark(4, "checkpoint"), Mark(4, "best checkpoint: accuracy/heldout 0.75", "good")]
    assert marks_of([event("checkpoint_scored", 2, best="x", best_score=None)]) == []
    (card,) = [card for card in cards(Columns(Path("none")), {}, told, 1.0) if card.label == "Best checkpoint"]
    assert (card.value, card.detail) == ("step 4", "accuracy/heldout 0.75; penstock export RUN DIRECTORY --best")


def test_what_says_no_step_and_what_is_a_hint_has_no_mark() -> None:
    told = [event("checkpoint", step) for step in (None, True, "3", float("nan"))]
    assert marks_of([*told, event("hint", text="it waits"), event("serving")]) == []


def test_many_of_a_kind_become_a_few_that_say_how_many_they_stand_for() -> None:
    found = marks_of([event("checkpoint", step) for step in range(1, 101)] + [event("warning", 50, text="x")])
    assert len(found) == 16
    assert found[0].text == "7 checkpoints, steps 1 to 7; the first: checkpoint"
    assert [mark.text for mark in found if mark.level == "warn"] == ["warning: x"]


@given(st.lists(st.integers(0, 10_000), max_size=200))
def test_marks_are_never_too_many_and_stand_for_all(steps: list[int]) -> None:
    found = few([Mark(step, "x") for step in steps], "things")
    assert len(found) <= MOST
    told = sum(int(mark.text.split()[0]) if mark.text != "x" else 1 for mark in found)
    assert told == len(steps)
    if steps:
        assert found[0].step == (steps[0] if len(steps) <= MOST else min(steps))
