"""Lines of spans.jsonl by step, while it is written."""

import json
from pathlib import Path

from penstock.orchestrator.observability.ui.runs.activity import MOST_STEPS, Traced


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
