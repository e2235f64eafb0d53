"""Files at URLs: seen whole or not at all, and trouble told by one error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile

from penstock.conf.errors import CheckpointError
from penstock.workers.runtime.url_files import (
    SavedFile,
    download,
    exists,
    file_fault,
    file_versions,
    find,
    list_names,
    read_optional,
    remove,
    upload,
    write_bytes,
)
from tests.remote_places import Flaky, flaky

FAR = "flaky://bucket/run"


@pytest.fixture(autouse=True)
def remote() -> Iterator[type[Flaky]]:
    with flaky() as system:
        yield system


def test_a_file_that_is_uploaded_to_a_directory_is_seen_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, place = tmp_path / "file", tmp_path / "bucket" / "file"
    file.write_text("old")
    upload(file, f"file://{place.parent}")
    file.write_text("new and longer")

    def breaks(self: LocalFileSystem, source: str, target: str, **options: Any) -> None:
        Path(target).write_text("new and")
        raise OSError("the disk is away")

    monkeypatch.setattr(LocalFileSystem, "put_file", breaks)
    with pytest.raises(CheckpointError, match=r"bucket/file: cannot be written: the disk is away"):
        upload(file, f"file://{place.parent}")
    assert [path.name for path in place.parent.iterdir()] == ["file"]
    assert place.read_text() == "old"


@pytest.mark.parametrize("place", ["flaky://bucket/run", "file://{}/run"])
def test_what_is_written_is_found_and_read_and_removed(tmp_path: Path, place: str) -> None:
    url = place.format(tmp_path)
    assert find(url) == list_names(url) == []
    assert read_optional(f"{url}/a") is None
    for name in ("a", "b/c"):
        write_bytes(f"{url}/{name}", name.encode())
    assert find(url) == ["a", "b/c"]
    assert list_names(url) == ["a", "b"]
    assert read_optional(f"{url}/b/c") == b"b/c"
    download(url, tmp_path / "all")
    download(url, tmp_path / "some", ["b/c"])
    assert (tmp_path / "all" / "a").read_text() == "a"
    assert [path.name for path in (tmp_path / "some").iterdir()] == ["b"]
    remove(f"{url}/a")
    remove(f"{url}/b")
    assert not exists(f"{url}/a")
    assert find(url) == []
    with pytest.raises(CheckpointError, match="nothing is there"):
        download(url, tmp_path / "none")


def test_what_a_file_systems_library_raises_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """botocore's errors are no OSErrors."""

    def lost(*_: Any, **options: Any) -> None:
        raise RuntimeError("EndpointConnectionError")

    for method in ("info", "ls", "cat_file", "pipe_file", "find", "isdir"):
        monkeypatch.setattr(Flaky, method, lost)
    for call in (exists, list_names, read_optional, find, remove, lambda place: write_bytes(place, b"")):
        with pytest.raises(CheckpointError, match=rf"{FAR}: cannot be .*: RuntimeError: EndpointConnectionError"):
            call(FAR)


@pytest.mark.parametrize("name", ["../escaped", "a/../../escaped"])
def test_a_key_that_leads_out_of_its_target_is_refused_and_nothing_is_written(
    tmp_path: Path, remote: type[Flaky], name: str
) -> None:
    for key in ("good", name):
        remote.store[f"/bucket/run/{key}"] = MemoryFile(path=f"/bucket/run/{key}", data=b"x")
    with pytest.raises(CheckpointError, match=r"flaky://bucket/run: '.*escaped' is no name of a file below"):
        download(FAR, tmp_path / "target")
    assert not list(tmp_path.rglob("*"))


def test_a_link_behind_a_file_url_is_not_seen(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "file").write_text("y")
    (tmp_path / "run" / "state.json").symlink_to(tmp_path / "secret")
    assert set(file_versions(f"file://{tmp_path}/run")) == {"file"}


def test_a_file_of_a_manifest_that_lies_elsewhere_is_none_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    file = SavedFile.of_bytes("../secret", b"x")
    assert file_fault(str(tmp_path / "checkpoint"), file) == "is no name of a file of its directory"
