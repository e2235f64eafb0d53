"""Where a run is, on this machine and at its URL."""

from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError
from penstock.orchestrator.run_directory.mirror import MirrorRecord
from penstock.orchestrator.run_directory.run_place import RunPlace, join_url, working_copies


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_path_is_a_directory_and_nothing_else(tmp_path: Path) -> None:
    assert RunPlace.of(str(tmp_path), "a") == RunPlace(tmp_path / "a")


@pytest.mark.parametrize("output_dir", ["s3://bucket/runs", "s3://bucket/runs/"])
def test_a_url_has_a_working_copy_of_its_own(cache: Path, output_dir: str) -> None:
    place = RunPlace.of(output_dir, "a")
    assert place.url == "s3://bucket/runs/a"
    assert place.path.parent.parent == cache / "penstock" / "runs"
    assert len(place.path.parent.name) == 16
    assert place == RunPlace.at("s3://bucket/runs/a/")
    assert place.path != RunPlace.of("s3://other/runs", "a").path


def test_a_run_at_the_root_of_a_file_system_has_one_too() -> None:
    assert RunPlace.of("memory://", "a") == RunPlace.at("memory://a")
    assert join_url("memory://", "a") == "memory://a"
    assert join_url("file:///a", "b") == "file:///a/b"


def test_without_the_variable_it_is_the_home_directorys_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert working_copies("s3://a").is_relative_to(Path.home() / ".cache" / "penstock" / "runs")


def test_a_run_before_a_run_is_below_its_url_and_so_is_one_before_that() -> None:
    place = RunPlace.of("s3://bucket/runs", "a")
    place.path.mkdir(parents=True)
    assert RunPlace.of(str(place.path), "sft").url is None
    assert place.url is not None
    MirrorRecord(place.url).write(place.path)
    assert RunPlace.of(str(place.path), "sft") == RunPlace(place.path / "sft", "s3://bucket/runs/a/sft")
    assert RunPlace.of(str(place.path / "sft"), "base").url == "s3://bucket/runs/a/sft/base"


def test_a_url_that_no_run_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"name=a\*: is to be a directory's name"):
        RunPlace.at("s3://bucket/a*")
