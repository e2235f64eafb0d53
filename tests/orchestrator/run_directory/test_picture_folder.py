"""Pictures of recorded samples are kept once, by their content, and no larger in all than was said."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.orchestrator.run_directory.failed_writes import FailedWrites
from penstock.orchestrator.run_directory.picture_folder import NAME, PictureFolder, name_of
from tests.amounts import amount
from tests.small_files import files_up_to

PNG, OTHER, JPEG = b"\x89PNG one", b"\x89PNG another", b"\xff\xd8\xff a photo"


def folder(path: Path, most_bytes: float = 1000) -> PictureFolder:
    return PictureFolder(path / "pictures", most_bytes, FailedWrites(lambda kind, error: None))


def test_a_picture_is_named_by_its_content_and_its_format() -> None:
    assert name_of(PNG) == f"{hashlib.blake2b(PNG, digest_size=16).hexdigest()}.png"
    assert name_of(memoryview(JPEG)) == f"{hashlib.blake2b(JPEG, digest_size=16).hexdigest()}.jpg"
    assert all(NAME.fullmatch(name_of(one)) for one in (PNG, OTHER, JPEG, b""))


def test_rows_name_their_pictures_and_each_is_written_once(tmp_path: Path) -> None:
    kept = folder(tmp_path)
    one, other, photo = map(name_of, (PNG, OTHER, JPEG))
    assert kept.keep([[PNG, OTHER], [memoryview(PNG), PNG], []]) == [[one, other], [one, one], []]
    files = tmp_path / "pictures"
    assert {file.name: file.read_bytes() for file in files.iterdir()} == {one: PNG, other: OTHER}
    written_at = (files / one).stat().st_mtime_ns
    assert kept.keep([[PNG, JPEG]]) == [[one, photo]]
    assert folder(tmp_path).keep([[PNG]]) == [[one]]  # a run that was resumed
    assert (files / one).stat().st_mtime_ns == written_at


def test_pictures_of_an_attempt_are_counted_by_first_sight(tmp_path: Path) -> None:
    rows = [[PNG, OTHER, PNG, JPEG, OTHER]]
    assert folder(tmp_path).keep(rows, distinct=True) == [[name_of(PNG), name_of(OTHER), name_of(JPEG)]]


def test_what_is_too_much_is_left_out_and_keeps_its_place(tmp_path: Path) -> None:
    kept = folder(tmp_path, len(PNG) + len(JPEG))
    assert not kept.is_full
    assert kept.keep([[PNG]]) == [[name_of(PNG)]]
    assert kept.keep([[OTHER, PNG]], distinct=True) == [[None, name_of(PNG)]]
    assert kept.is_full
    assert folder(tmp_path, len(PNG) + 1).keep([[PNG], [JPEG]]) == [[name_of(PNG)], [None]]
    assert folder(tmp_path, 0).is_full


def test_a_disk_without_room_costs_the_pictures_and_no_more(tmp_path: Path) -> None:
    noted: list[str] = []
    kept = PictureFolder(tmp_path / "pictures", 1e9, FailedWrites(lambda kind, error: noted.append(kind)))
    with files_up_to(100):
        assert kept.keep([[PNG, b"x" * 1000]]) == [[name_of(PNG), None]]
    assert noted == ["pictures"]
    assert [file.name for file in (tmp_path / "pictures").iterdir()] == [name_of(PNG)]
    assert kept.keep([[b"x" * 1000]]) == [[name_of(b"x" * 1000)]]


@settings(max_examples=amount(40), deadline=None)
@given(
    rows=st.lists(st.lists(st.binary(max_size=20), max_size=4), max_size=4),
    most=st.integers(0, 60),
    twice=st.booleans(),
)
def test_files_are_those_named_and_within_the_bound(
    rows: list[list[bytes]], most: int, twice: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("run")
    kept = folder(path, most)
    for _ in range(1 + twice):
        names = kept.keep(rows)
    assert [len(row) for row in names] == [len(row) for row in rows]
    there = {file.name: file.read_bytes() for file in (path / "pictures").iterdir()}
    assert {name for row in names for name in row if name} == set(there)
    assert sum(map(len, there.values())) <= most
    assert all(name is None or there[name] == picture for row, named in zip(rows, names, strict=True)
               for picture, name in zip(row, named, strict=True))  # fmt: skip
