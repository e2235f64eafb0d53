"""The checker of disturbed runs finds what is planted in what a run has left, and nothing in what a good one has."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.chaos.checker import Promises, broken
from tests.chaos.disturbance import Done
from tests.chaos.plan import CUT, KILL, Target, draw

STEPS, GROUPS, SIZE = 3, 2, 2
PROMISES = Promises(STEPS, GROUPS, SIZE, 0, {KILL: 10.0}, 20.0)
FAULT = Done("Rollout-0", KILL, 1, 100.0)


def event(at: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time": datetime.fromtimestamp(at, UTC).isoformat(), "kind": kind, **fields}


class Left:
    """What a run has left, to be changed before it is written."""

    def __init__(self) -> None:
        self.events = [
            event(90.0, "start"), event(91.0, "placed"), event(92.0, "serving"),
            event(101.0, "fault", member="Rollout-0"), event(103.0, "recovered", member="Rollout-0", seconds=2.0),
            event(200.0, "end"),
        ]  # fmt: skip
        batch = GROUPS * SIZE
        self.metrics = [
            {
                "step": step, "store/groups_admitted": (step + 1) * GROUPS, "store/rows_trained": step * batch,
                "store/rows": batch,
            }
            for step in range(1, STEPS + 1)
        ]  # fmt: skip
        self.samples = {
            step: [
                {"group_id": row // SIZE, "row_id": row, "token_versions": [step - 1]}
                for row in range((step - 1) * batch, step * batch)
            ]
            for step in range(1, STEPS + 1)
        }

    def found(self, directory: Path, *faults: Done) -> list[str]:
        (directory / "samples").mkdir()
        for name, lines in (("events", self.events), ("metrics", self.metrics)):
            (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for step, rows in self.samples.items():
            parquet.write_table(pa.Table.from_pylist(rows), directory / "samples" / f"step_{step}.parquet")
        return broken(directory, PROMISES, faults)


def test_a_good_run_has_kept_everything(tmp_path: Path) -> None:
    after_its_end = Done("Rollout-1", KILL, 3, 201.0)
    assert Left().found(tmp_path, FAULT, Done("2", CUT, 1, 120.0), after_its_end) == []


def test_one_noticed_that_left_with_its_node_before_it_was_back_is_done_without(tmp_path: Path) -> None:
    left = Left()
    left.events[4:5] = [event(112.0, "node_left", node="10.0.0.3"), event(112.0, "left", member="Rollout-0")]
    assert left.found(tmp_path, FAULT) == []


def test_one_that_hangs_in_its_restart_is_noticed_within_the_time_of_a_start(tmp_path: Path) -> None:
    left = Left()
    left.events[4:5] = [
        event(128.0, "fault", member="Rollout-0"), event(130.0, "recovered", member="Rollout-0", seconds=29.0),
    ]  # fmt: skip
    assert left.found(tmp_path, FAULT, Done("Rollout-0", KILL, 1, 102.0)) == []


def test_a_command_that_begins_anew_answers_what_the_one_before_was_about_to(tmp_path: Path) -> None:
    left = Left()
    left.events[3:5] = [event(101.0, "fault", member="Agent-1"), event(101.1, "returning"), event(104.0, "start")]
    assert left.found(tmp_path, Done("Agent-1", KILL, 1, 100.0), Done("the command", KILL, 1, 101.2)) == []


def one_leaves_before_anybody_notices(left: Left) -> None:
    left.events[3:5] = [event(112.0, "left", member="Rollout-0")]


def a_step_is_missing(left: Left) -> None:
    del left.metrics[1]


def a_row_is_nowhere(left: Left) -> None:
    left.metrics[1]["store/rows"] -= 1


def a_row_is_trained_twice(left: Left) -> None:
    left.samples[3][0]["row_id"] = 0


def a_group_is_cut(left: Left) -> None:
    left.samples[2].pop()


def a_token_is_stale(left: Left) -> None:
    left.samples[3][1]["token_versions"] = [2, 1]


def a_token_is_of_the_future(left: Left) -> None:
    left.samples[3][1]["token_versions"] = [2, 3]


def nobody_notices(left: Left) -> None:
    del left.events[3:5]


def it_is_noticed_late(left: Left) -> None:
    left.events[3:5] = [
        event(111.0, "fault", member="Rollout-0"),
        event(112.0, "recovered", member="Rollout-0", seconds=1),
    ]


def it_ends_badly(left: Left) -> None:
    left.events[-1] = event(200.0, "failed")


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (a_step_is_missing, "steps were logged as"),
        (a_row_is_nowhere, "are in flight"),
        (a_row_is_trained_twice, "row 0 was trained in step 1 and in step 3"),
        (a_group_is_cut, "on groups of [1, 2] rows"),
        (a_token_is_stale, "has a token of version 1"),
        (a_token_is_of_the_future, "which was not there yet"),
        (nobody_notices, "nobody noticed"),
        (one_leaves_before_anybody_notices, "nobody noticed"),
        (it_is_noticed_late, "noticed after 11.0 s, not within 10 s"),
        (it_ends_badly, "the last event is 'failed'"),
    ],
)
def test_what_was_not_kept_is_found(harm: Callable[[Left], None], sentence: str, tmp_path: Path) -> None:
    left = Left()
    harm(left)
    assert any(sentence in found for found in left.found(tmp_path, FAULT))


def test_a_seed_draws_each_target_once_in_any_order_and_the_last_ones_last() -> None:
    targets = [Target(str(number), KILL) for number in range(8)]
    drawn = draw(3, targets, 20, last=[Target("last", KILL)])
    assert sorted(fault.target.who for fault in drawn[:-1]) == [target.who for target in targets]
    assert drawn[-1].target.who == "last"
    assert [fault.step for fault in drawn] == sorted(fault.step for fault in drawn)
    assert drawn == draw(3, targets, 20, last=[Target("last", KILL)]) != draw(4, targets, 20)
