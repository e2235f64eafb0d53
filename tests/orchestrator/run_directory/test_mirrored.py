"""What of a run is to be at its URL, when, and which copy of a run is the newer one."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.orchestrator.run_directory.mirror import (
    PACE_BYTES,
    FileStamp,
    RunRecords,
    due,
    is_ahead,
    is_fetched,
    is_mirrored,
    list_files,
    replaced_model_files,
    whole_lines,
    without_end_event,
)

NEVER: dict[str, float] = {}


@pytest.mark.parametrize(
    ("name", "mirrored", "fetched"),
    [
        ("config.yaml", True, True),
        ("metrics.jsonl", True, True),
        ("initial_model/model.safetensors", True, True),
        ("sft/model/config.json", True, True),
        ("samples/step_10.parquet", True, False),
        ("tensorboard/events.out.tfevents.1", True, False),
        ("wandb/offline-run-1/run-1.wandb", True, False),
        ("trackers/wandb.json", True, True),
        ("stacks/Rollout-0.txt", True, False),
        ("report.html", True, False),
        ("run.lock", False, False),
        ("mirror.json", False, False),
        ("checkpoints/global_step_2/COMPLETE", False, False),
        ("sft/checkpoints/global_step_2/COMPLETE", False, False),
        ("resumed_store/groups.arrow", False, False),
        (".report.html.part", False, False),
        ("model/.seen-by-all-nodes-x", False, False),
    ],
)
def test_all_but_locks_checkpoints_and_what_is_on_its_way_is_mirrored(name: str, mirrored: bool, fetched: bool) -> None:
    assert (is_mirrored(name), is_fetched(name)) == (mirrored, fetched)


def test_lines_come_last_and_events_after_all_that_they_tell_of() -> None:
    seen = dict.fromkeys(
        ["events.jsonl", "sft/events.jsonl", "metrics.jsonl", "model/a", "report.html"], FileStamp(1, 1)
    )
    order = ["model/a", "report.html", "metrics.jsonl", "sft/events.jsonl", "events.jsonl"]
    assert due(seen, seen, {}, NEVER, 5.0) == order


def test_a_file_that_still_changes_waits_and_one_that_did_not_change_is_left() -> None:
    seen = {"changes": FileStamp(2, 2), "stays": FileStamp(1, 1), "is there": FileStamp(1, 1)}
    before = {"changes": FileStamp(1, 1), "stays": FileStamp(1, 1), "is there": FileStamp(1, 1)}
    uploaded = {"is there": FileStamp(1, 1)}
    assert due(seen, before, uploaded, NEVER, 5.0) == ["stays"]
    assert due(seen, before, uploaded, NEVER, 5.0, everything=True) == ["changes", "stays"]


@pytest.mark.parametrize(("num_mib", "waited_s", "is_due"), [(0, 0.0, True), (3, 14.0, False), (3, 15.0, True)])
def test_the_longer_lines_are_the_more_rarely_they_are_brought(num_mib: int, waited_s: float, is_due: bool) -> None:
    seen = {"metrics.jsonl": FileStamp(num_mib * PACE_BYTES, 2)}
    assert bool(due(seen, {}, {}, {"metrics.jsonl": waited_s}, 5.0)) == is_due
    assert due(seen, {}, {}, {"metrics.jsonl": waited_s}, 5.0, everything=True)


def test_files_of_a_replaced_model_go_and_none_of_a_directory_that_is_away() -> None:
    uploaded = dict.fromkeys(["config.yaml", "model/a", "model/b", "samples/c"], FileStamp(1, 1))
    seen = dict.fromkeys(["config.yaml", "model/b"], FileStamp(1, 1))
    assert replaced_model_files(seen, uploaded) == ["model/a"]
    assert replaced_model_files({}, uploaded) == []


def test_a_line_that_is_half_written_is_left_out() -> None:
    assert whole_lines(b"one\ntwo\nthr") == b"one\ntwo\n"
    assert whole_lines(b"on") == b""


def test_the_end_of_a_run_and_what_follows_are_held_back_unless_it_went_on() -> None:
    start, end, other = (f'{{"kind": "{kind}"}}\n'.encode() for kind in ("start", "end", "recording_failed"))
    assert without_end_event(start + end) == without_end_event(start + end + other) == start
    for data in (start + other, start + end + start, b"", b"no json\n[1]\n"):
        assert without_end_event(data) == data


@pytest.mark.parametrize(
    ("remote", "local", "ahead"),
    [
        (None, None, False),
        (None, RunRecords(b"a\n", b""), False),
        (RunRecords(b"a\n", b""), None, True),
        (RunRecords(b"a\n", b"1\n"), RunRecords(b"a\n", b"1\n"), False),
        (RunRecords(b"a\n", b"1\n"), RunRecords(b"a\n", b"1\n2\n"), False),  # died before its last upload
        (RunRecords(b"a\n", b"1\n2\n"), RunRecords(b"a\n", b"1\n"), True),  # lost its last lines with its power
        (RunRecords(b"a\nb\n", b""), RunRecords(b"a\n", b"1\n2\n"), True),  # another went on from all that was here
        (RunRecords(b"a\nc\n", b""), RunRecords(b"a\nb\n", b"1\n2\n"), True),  # another went on from a part of it
        (RunRecords(b"a\n", b"1\n2\n3\n"), RunRecords(b"a\nb\n", b"1\n"), False),  # went on here from a checkpoint
    ],
)
def test_the_copy_that_went_on_is_the_newer_one(
    remote: RunRecords | None, local: RunRecords | None, ahead: bool
) -> None:
    assert is_ahead(remote, local) == ahead


@given(st.lists(st.sampled_from(["upload", "here", "elsewhere"]), max_size=12))
def test_a_history_on_two_machines_is_gone_on_with_from_where_it_is_longest(turns: list[str]) -> None:
    """Each turn goes on from what its machine would choose; one on the other machine always uploads."""
    remote: bytes | None = None
    here: bytes | None = None
    for number, turn in enumerate(turns):
        chosen = remote if is_ahead(_lines(remote), _lines(here)) else here
        if turn == "upload":
            remote = here if not is_ahead(_lines(remote), _lines(here)) else remote
        elif turn == "here":
            here = (chosen or b"") + b"here %d\n" % number
        else:
            remote = (remote or b"") + b"elsewhere %d\n" % number
            assert is_ahead(_lines(remote), _lines(here))
        if turn == "here":
            assert not is_ahead(_lines(remote), _lines(here))


def _lines(events: bytes | None) -> RunRecords | None:
    return None if events is None else RunRecords(events, b"")


def test_a_look_finds_what_is_mirrored(tmp_path: Path) -> None:
    for name in ("config.yaml", "checkpoints/global_step_1/x", "sft/model/a", "run.lock", ".x.part"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("12")
    found = list_files(tmp_path)
    assert sorted(found) == ["config.yaml", "sft/model/a"]
    assert found["config.yaml"].num_bytes == 2
    assert list_files(tmp_path / "away") == {}
