"""What actors printed, by actor and time."""

from pathlib import Path

import pytest

from penstock.orchestrator.observability.ui.runs.activity import MOST_LINES, TAIL_BYTES, printed


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
