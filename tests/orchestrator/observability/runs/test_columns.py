"""Metrics as columns, whatever the writer is doing meanwhile."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.orchestrator.observability.runs.columns import Columns


def written(file: Path, *lines: Any) -> Columns:
    with file.open("a") as opened:
        opened.writelines(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    columns = Columns(file)
    columns.update()
    return columns


def shown(columns: Columns, key: str) -> list[float | None]:
    return [None if math.isnan(value) else value for value in columns[key].tolist()]


def test_columns_have_a_place_for_each_step(tmp_path: Path) -> None:
    lines = [{"step": 0, "accuracy": 0.5}, {"step": 1, "loss": 2}, {"step": 2, "loss": None, "accuracy": 1}]
    columns = written(tmp_path / "metrics.jsonl", *lines)
    assert columns.steps.tolist() == [0, 1, 2]
    assert shown(columns, "accuracy") == [0.5, None, 1]
    assert shown(columns, "loss") == [None, 2, None]
    assert sorted(columns.keys) == ["accuracy", "loss"]
    assert shown(columns, "nothing") == [None] * 3


def test_what_is_added_is_read_once_and_half_a_line_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    columns = Columns(file)
    assert not columns.update()
    with file.open("w") as opened:
        opened.write('{"step": 1, "a": 1}\n{"step": 2, "a')
        opened.flush()
        assert columns.update()
        assert columns.steps.tolist() == [1]
        assert not columns.update()
        opened.write('": 5, "b": 7}\n')
    assert columns.update()
    assert shown(columns, "a") == [1, 5]
    assert shown(columns, "b") == [None, 7]


def test_steps_that_are_made_again_count_as_they_were_made_last(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    columns = written(file, {"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 2, "a": 20})
    assert shown(columns, "a") == [1, 20]
    file.write_text('{"step": 1, "a": 10}\n')  # cut back by a run that goes on
    assert columns.update()
    assert shown(columns, "a") == [10]
    file.unlink()
    assert columns.update()
    assert len(columns.steps) == 0


def test_a_step_keeps_its_metrics_when_its_evaluation_comes_after_later_steps(tmp_path: Path) -> None:
    lines = {"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 1, "accuracy": 0.5}
    columns = written(tmp_path / "metrics.jsonl", *lines)
    assert shown(columns, "a") == [1, 2]
    assert shown(columns, "accuracy") == [0.5, None]


@pytest.mark.parametrize("junk", ["not json\n", "[1]\n", '{"no": "step"}\n', '{"step": "one"}\n', "\x00\x00\n", "\n"])
def test_lines_that_are_none_of_ours_are_counted_and_left_out(tmp_path: Path, junk: str) -> None:
    columns = written(tmp_path / "metrics.jsonl", {"step": 1, "a": 1}, junk, {"step": 2, "a": 2, "said": "text"})
    assert columns.steps.tolist() == [1, 2]
    assert shown(columns, "a") == [1, 2]
    assert columns.num_unreadable == (junk != "\n") or junk == "\n"
    assert "said" not in columns.keys


NUMBERS = st.one_of(st.none(), st.integers(-5, 5), st.floats(allow_nan=False, allow_infinity=False, width=32))
LINES = st.lists(st.tuples(st.integers(0, 6), st.dictionaries(st.sampled_from("abc"), NUMBERS)), max_size=12)


@given(LINES, st.data())
def test_a_file_read_in_any_pieces_has_the_values_of_its_lines(tmp_path_factory: Any, lines: Any, data: Any) -> None:
    file = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    text = "".join(json.dumps({"step": step, **values}) + "\n" for step, values in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    columns = Columns(file)
    with file.open("wb") as opened:
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            opened.write(text[start:end])
            opened.flush()
            columns.update()
    expected: dict[int, dict[str, Any]] = {}
    for step, values in lines:  # of each metric the last value counts
        expected.setdefault(step, {}).update({key: value for key, value in values.items() if value is not None})
    assert columns.steps.tolist() == sorted(expected)
    for key in "abc":
        values = [expected[step].get(key) for step in sorted(expected)]
        np.testing.assert_array_equal(columns[key], [math.nan if value is None else float(value) for value in values])


@pytest.mark.parametrize("piece", [1, 7, 20, 10_000])
def test_lines_are_whole_in_whatever_pieces_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr("penstock.orchestrator.observability.runs.columns.PIECE_BYTES", piece)
    lines = [{"step": step, "a": step / 4, **({"b": 1} if step > 2 else {})} for step in range(5)]
    columns = written(tmp_path / "metrics.jsonl", *lines, '{"step": 9')
    assert columns.steps.tolist() == [0, 1, 2, 3, 4]
    assert shown(columns, "a") == [0, 0.25, 0.5, 0.75, 1]
    assert shown(columns, "b") == [None, None, None, 1, 1]
