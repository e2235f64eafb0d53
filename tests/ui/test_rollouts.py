"""Samples that are asked for by what they are, from files in every state."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from penstock.ui.rollouts import Rollouts, SampleFilter
from tests.ui.made_runs import write_samples


@pytest.fixture
def rollouts(tmp_path: Path) -> Rollouts:
    write_samples(tmp_path, 1, [{"group": 0, "reward": 0.0, "text": "four"}, {"group": 0, "reward": 1.0, "text": "4"}])
    write_samples(tmp_path, 2, [
        {"group": 1, "reward": 0.25, "tokens": 9, "finish": "length", "text": "FOUR and more"},
        {"group": 2, "reward": 0.75, "tokens": 1}, {"group": 2, "reward": None, "finish": None},
    ])  # fmt: skip
    found = Rollouts(tmp_path)
    assert found.update(budget_s=10)
    return found


def places(found: dict[str, Any]) -> list[tuple[int, int]]:
    return [(row["step"], row["place"]) for row in found["rows"]]


def test_the_newest_come_first_with_what_is_known_of_them(rollouts: Rollouts) -> None:
    found = rollouts.find(SampleFilter())
    assert (found["total"], found["complete"]) == (5, True)
    assert places(found) == [(2, 0), (2, 1), (2, 2), (1, 0), (1, 1)]
    first = found["rows"][0]
    assert (first["row"], first["group"], first["reward"], first["tokens"]) == (200, 1, 0.25, 9)
    assert (first["finish_reason"], first["response_text"]) == ("length", "FOUR and more")
    assert (found["rows"][2]["reward"], found["rows"][2]["finish_reason"]) == (None, None)


def test_samples_of_several_policies_say_and_are_found_by_whose_they_are(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [{"group": 1, "reward": 1.0, "policy": name} for name in ("solver", "proposer")])
    rollouts = Rollouts(tmp_path)
    assert rollouts.update(budget_s=10)
    assert [row["policy"] for row in rollouts.find(SampleFilter())["rows"]] == ["solver", "proposer"]
    assert places(rollouts.find(SampleFilter(text="propo"))) == [(1, 1)]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (SampleFilter(first_step=2), [(2, 0), (2, 1), (2, 2)]),
        (SampleFilter(last_step=1), [(1, 0), (1, 1)]),
        (SampleFilter(group=2), [(2, 1), (2, 2)]),
        (SampleFilter(least_reward=0.5), [(2, 1), (1, 1)]),
        (SampleFilter(most_reward=0.25, least_reward=0.1), [(2, 0)]),
        (SampleFilter(least_tokens=4), [(2, 0)]),
        (SampleFilter(most_tokens=1), [(2, 1)]),
        (SampleFilter(finish_reason="length"), [(2, 0)]),
        (SampleFilter(finish_reason="unheard of"), []),
        (SampleFilter(text="four"), [(2, 0), (1, 0)]),
        (SampleFilter(text="QUESTION 2"), [(2, 1), (2, 2)]),
        (SampleFilter(text="four", finish_reason="stop"), [(1, 0)]),
        (SampleFilter(sort="reward"), [(1, 1), (2, 1), (2, 0), (1, 0), (2, 2)]),
        (SampleFilter(sort="reward", down=False), [(1, 0), (2, 0), (2, 1), (1, 1), (2, 2)]),
        (SampleFilter(sort="tokens", limit=1), [(2, 0)]),
        (SampleFilter(offset=3, limit=1), [(1, 0)]),
    ],
)
def test_samples_are_asked_for_by_what_they_are(
    rollouts: Rollouts, wanted: SampleFilter, expected: list[tuple[int, int]]
) -> None:
    assert places(rollouts.find(wanted, budget_s=60)) == expected


def test_the_group_with_the_lowest_reward_is_found(tmp_path: Path) -> None:
    for step in range(1, 6):
        write_samples(
            tmp_path,
            step,
            [{"group": 10 * step + place, "reward": (step * 7 + place * 3) % 11 + 1} for place in range(3)],
        )
    write_samples(tmp_path, 6, [{"group": 77, "reward": 0.5}])
    rollouts = Rollouts(tmp_path)
    rollouts.update(10)
    assert rollouts.find(SampleFilter(sort="reward", down=False, limit=1))["rows"][0]["group"] == 77


def test_a_value_equal_to_a_limit_is_found(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, [{"group": 0, "reward": 0.1}])  # which no binary number is
    rollouts = Rollouts(tmp_path)
    rollouts.update(10)
    assert rollouts.find(SampleFilter(least_reward=0.1, most_reward=0.1))["total"] == 1


def test_one_sample_has_all_its_columns(rollouts: Rollouts) -> None:
    assert rollouts.sample(2, 1)["response_ids"] == [0]
    for step, place in ((2, 99), (2, -1), (9, 0)):
        with pytest.raises(LookupError):
            rollouts.sample(step, place)


def test_new_files_are_taken_up_and_broken_ones_left_out(tmp_path: Path) -> None:
    rollouts = Rollouts(tmp_path / "samples")
    assert rollouts.update()
    assert rollouts.find(SampleFilter())["total"] == 0
    write_samples(tmp_path / "samples", 1, [{"group": 0, "reward": 1.0}])
    (tmp_path / "samples" / "step_2.parquet").write_bytes(b"PAR1 and then nothing")
    (tmp_path / "samples" / "notes.txt").write_text("mine")
    parquet.write_table(pa.table({"other": ["version"]}), tmp_path / "samples" / "step_3.parquet")
    assert rollouts.update(10)
    assert rollouts.num_unreadable == 1
    found = rollouts.find(SampleFilter())
    assert places(found) == [(3, 0), (1, 0)]
    assert found["rows"][0]["group"] == -1
    (tmp_path / "samples" / "step_1.parquet").unlink()  # a run that is being removed
    assert "response_text" not in rollouts.find(SampleFilter(last_step=1))["rows"][0]


def test_with_little_time_the_newest_files_come_first(tmp_path: Path) -> None:
    for step in range(1, 9):
        write_samples(tmp_path, step, [{"group": step, "reward": 1.0, "text": "word"}])
    rollouts = Rollouts(tmp_path)
    assert not rollouts.update(budget_s=0.0)
    assert (rollouts.num_files, places(rollouts.find(SampleFilter()))) == ((1, 8), [(8, 0)])
    while not rollouts.update(budget_s=0.0):
        pass
    assert rollouts.find(SampleFilter())["total"] == 8
    found = rollouts.find(SampleFilter(text="word"), budget_s=-1)
    assert (found["total"], found["complete"]) == (0, False)
