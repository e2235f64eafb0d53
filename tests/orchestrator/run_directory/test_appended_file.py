"""Records are in the file whole, in order and once each, though it could not be written for a while."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import RunInUse
from penstock.orchestrator.run_directory.failed_writes import AppendedFile, FailedWrites
from penstock.orchestrator.run_directory.json_lines import open_for_lines
from tests.small_files import files_up_to


def file_at(path: Path) -> tuple[AppendedFile, FailedWrites]:
    failed_writes = FailedWrites(lambda kind, error: None)
    return AppendedFile(path, "metrics", failed_writes, open_for_lines), failed_writes


@given(st.lists(st.tuples(st.integers(0, 12), st.one_of(st.none(), st.integers(0, 60))), max_size=20))
def test_whatever_fits_is_there_and_the_rest_follows_once(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[int, int | None]]
) -> None:
    """Each record is given by its length, and by the number of bytes that the disk holds at that moment."""
    path = tmp_path_factory.mktemp("disk") / "lines"
    file, failed_writes = file_at(path)
    all_records = b""
    for number, (length, room) in enumerate(history):
        record = f"{number}".encode() * length + b"\n"
        all_records += record
        with files_up_to(-1 if room is None else room):
            file.append(record)
        written = path.read_bytes()
        assert all_records.startswith(written)
        assert not written or written.endswith(b"\n")
        assert len(written) + sum(map(len, file.waiting)) == len(all_records)
        assert failed_writes.waiting["metrics"] == len(file.waiting)
    file.close()
    assert path.read_bytes() == all_records if history else not path.exists()
    assert not failed_writes.lost.total()


def test_a_record_that_was_written_although_its_write_failed_is_there_once(tmp_path: Path) -> None:
    file, _ = file_at(tmp_path / "lines")
    file.append(b"one\n")
    with files_up_to(5):
        file.append(b"two\n")
    assert (tmp_path / "lines").read_bytes() == b"one\n"
    with (tmp_path / "lines").open("ab") as late:
        late.write(b"two\n")
    file.append(b"three\n")
    assert (tmp_path / "lines").read_bytes() == b"one\ntwo\nthree\n"


def test_what_somebody_else_has_appended_meanwhile_stays(tmp_path: Path) -> None:
    file, _ = file_at(tmp_path / "lines")
    file.append(b"one\n")
    with files_up_to(5):
        file.append(b"two\n")
    with (tmp_path / "lines").open("ab") as other:
        other.write(b"other\nhalf")
    file.append(b"three\n")
    assert (tmp_path / "lines").read_bytes() == b"one\nother\ntwo\nthree\n"


def test_a_place_that_is_away_is_written_to_once_it_is_back_and_not_elsewhere(tmp_path: Path) -> None:
    place, away = tmp_path / "mount" / "run", tmp_path / "away"
    place.mkdir(parents=True)
    file, failed_writes = file_at(place / "lines")
    file.append(b"one\n")
    with files_up_to(4):
        file.append(b"two\n")
    place.rename(away)
    file.append(b"three\n")
    assert not place.exists()
    assert failed_writes.waiting["metrics"] == 2
    away.rename(place)
    file.append(b"four\n")
    assert (place / "lines").read_bytes() == b"one\ntwo\nthree\nfour\n"


def test_more_than_can_be_kept_costs_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.orchestrator.run_directory.failed_writes.MAX_WAITING", 2)
    file, failed_writes = file_at(tmp_path / "lines")
    with files_up_to(0):
        for record in (b"one\n", b"two\n", b"three\n", b"four\n"):
            file.append(record)
    assert (failed_writes.lost["metrics"], failed_writes.waiting["metrics"]) == (2, 2)
    file.append(b"five\n")
    assert (tmp_path / "lines").read_bytes() == b"four\nfive\n"
    assert failed_writes.metrics() == {"recording/lost": 3.0, "recording/waiting": 0.0}


def test_records_that_still_wait_at_the_end_are_lost_and_told(tmp_path: Path) -> None:
    (tmp_path / "lines").symlink_to("/dev/full")
    file, failed_writes = file_at(tmp_path / "lines")
    told: list[str] = []
    failed_writes.set_printer(told.append)
    for record in (b"one\n", b"two\n"):
        file.append(record)
    file.close()
    file.close()
    first, last = told
    assert first.startswith("metrics: cannot be written: [Errno 28] No space left on device. Up to 10,000 ")
    assert last == "metrics: 2 of its records are lost"
    assert failed_writes.metrics() == {"recording/lost": 2.0, "recording/waiting": 0.0}


def test_an_error_that_is_no_disks_is_raised_and_keeps_the_record(tmp_path: Path) -> None:
    def refuse(path: Path) -> int:
        raise RunInUse("taken")

    file = AppendedFile(tmp_path / "lines", "metrics", FailedWrites(lambda *_: None), refuse)
    with pytest.raises(RunInUse):
        file.append(b"one\n")
    assert list(file.waiting) == [b"one\n"]


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file, _ = file_at(tmp_path / "lines")
    for room in (-1, 3, -1, 5, -1):
        with files_up_to(room):
            file.append(b"a record\n")
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before
