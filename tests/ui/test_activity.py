"""Lines of spans.jsonl by step, while it is written, and what actors printed, by actor and time."""

import json
from pathlib import Path

import pytest

from penstock.ui.activity import MOST_LINES, MOST_STEPS, TAIL_BYTES, Traced, printed


def line(step: int, text: str = "") -> str:
    return json.dumps({"step": step, "text": text}) + "\n"


def test_lines_are_found_by_step_and_a_step_that_was_made_again_counts_once(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    traced = Traced(file)
    traced.update()
    assert traced.bounds is None
    file.write_text(line(1) + line(2, "lost") + "{broken\n" + line(2, "again") + '{"step": 3, "te')
    traced.update()
    assert traced.bounds == (1, 2)
    assert [one["text"] for one in traced.lines(1, 9)] == ["", "again"]
    with file.open("a") as opened:
        opened.write('xt": "whole"}\n')
    traced.update()
    assert [one["text"] for one in traced.lines(3, 3)] == ["whole"]


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    file.write_text(line(1) + line(2) + line(3))
    traced = Traced(file)
    traced.update()
    file.write_text(line(1) + line(2, "other"))
    traced.update()
    assert traced.bounds == (1, 2)
    assert traced.lines(2, 2)[0]["text"] == "other"


def test_an_answer_is_bounded_to_the_last_steps(tmp_path: Path) -> None:
    file = tmp_path / "spans.jsonl"
    file.write_text("".join(line(step) for step in range(1, 1001)))
    traced = Traced(file)
    traced.update()
    assert [one["step"] for one in traced.lines(1, 1000)] == list(range(1001 - MOST_STEPS, 1001))


def write(folder: Path, name: str, *lines: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.log").write_text("".join(line + "\n" for line in lines))


def texts(found: dict[str, list[dict[str, str]]]) -> list[str]:
    return [line["text"] for line in found["lines"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    write(
        folder,
        "Rollout-0",
        "2026-01-01T00:00:01Z out loading",
        "2026-01-01T00:00:05Z err \x1b[31mRuntimeError\x1b[0m: no",
    )
    write(folder, "Trainer-policy-0", "2026-01-01T00:00:03Z out one\x85two", "no line of ours")
    write(folder, "Rollout-0.before", "2026-01-01T00:00:00Z out long ago")
    return folder


def test_lines_of_all_actors_come_in_the_order_of_time_without_colours(folder: Path) -> None:
    found = printed(folder)
    assert found["members"] == ["Rollout-0", "Trainer-policy-0"]
    assert texts(found) == ["loading", "one\x85two", "RuntimeError: no"]
    assert [line["trouble"] for line in found["lines"]] == [False, False, True]


def test_lines_are_chosen_by_actor_by_text_and_by_whether_they_tell_of_trouble(folder: Path) -> None:
    assert texts(printed(folder, "Rollout-0")) == ["loading", "RuntimeError: no"]
    assert texts(printed(folder, text="LOAD")) == ["loading"]
    assert texts(printed(folder, only_trouble=True)) == ["RuntimeError: no"]
    with pytest.raises(LookupError, match="printed nothing"):
        printed(folder, "../events")


def test_a_long_file_is_read_from_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    write(folder, "Rollout-0", *(f"2026-01-01T00:00:00Z out {number:09}" for number in range(TAIL_BYTES // 20)))
    found = printed(folder)
    assert len(found["lines"]) == MOST_LINES
    assert found["more"] > 0
    assert texts(found)[-1] == f"{TAIL_BYTES // 20 - 1:09}"


def test_a_run_that_printed_nothing_has_no_lines(tmp_path: Path) -> None:
    assert printed(tmp_path / "logs") == {"members": [], "lines": [], "more": 0}
