"""A run at a URL, seen from a machine that has nothing of it, or something else."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.cli.main import main
from penstock.conf.errors import CheckpointError, ConfigError
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.observability.reporting import report
from penstock.orchestrator.run_directory.failed_writes import FailedWrites
from penstock.orchestrator.run_directory.fetching import fetch_run, open_at, upload_all
from penstock.orchestrator.run_directory.picture_folder import PictureFolder, name_of
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.orchestrator.run_directory.run_place import RunPlace
from penstock.store.data.rows import Rows
from penstock.workers.runtime.url_files import find, remove
from tests.remote_places import Flaky, flaky
from tests.vision_models import picture

URL = "flaky://bucket/runs"


@pytest.fixture(autouse=True)
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Flaky]]:
    monkeypatch.setattr(report, "write_pngs", lambda *_: [])
    with flaky() as system:
        yield system


class Machine:
    """What has a cache of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch

    def place(self) -> RunPlace:
        self._monkeypatch.setenv("XDG_CACHE_HOME", str(self._folder))
        return RunPlace.of(URL, "run")

    def turn(self, step: int, *, is_brought: bool = True) -> RunDirectory:
        """A process that takes the run up and trains a step."""
        place = self.place()
        config = load_config([f"output_dir={URL}", "name=run"])
        fetch_run(place)
        is_new = not place.path.is_dir()
        directory = RunDirectory.create(config) if is_new else RunDirectory.open(place.path, place.url)
        if is_brought:
            directory.mirror(config.tracking)
        directory.event("start" if is_new else "resume", step=step)
        directory.log_metrics({"step": step})
        directory.write_samples(step, Rows.from_lists({"reward": [float(step)]}))
        directory.close()
        return directory


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "one", monkeypatch)


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "other", monkeypatch)


def steps(directory: RunDirectory) -> list[int]:
    return [line["step"] for line in directory.read_metrics()]


def test_a_machine_that_has_nothing_goes_on_with_what_is_there(one: Machine, other: Machine) -> None:
    one.turn(1)
    found = other.turn(2)
    assert steps(found) == [1, 2]
    assert [path.name for path in found.sample_files()] == ["step_2.parquet"]
    assert "samples/step_1.parquet" in find(f"{URL}/run")


def test_the_first_machine_takes_the_others_steps_and_drops_what_came_nowhere(one: Machine, other: Machine) -> None:
    one.turn(1)
    one.turn(2, is_brought=False)
    other.turn(3)
    found = one.turn(4)
    assert steps(found) == [1, 3, 4]
    assert not (found.samples / "step_2.parquet").exists()


def test_files_that_were_not_uploaded_stay_if_nobody_went_on(one: Machine) -> None:
    one.turn(1)
    one.turn(2, is_brought=False)
    assert steps(one.turn(3)) == [1, 2, 3]
    assert find(f"{URL}/run").count("samples/step_2.parquet") == 1


def test_a_copy_that_was_half_fetched_is_fetched_again(
    one: Machine, other: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one.turn(1)
    whole = Flaky.get_file

    def breaks(self: Flaky, name: str, *rest: object, **options: object) -> None:
        if name.endswith("metrics.jsonl"):
            raise OSError("the line is dead")
        whole(self, name, *rest, **options)

    monkeypatch.setattr(Flaky, "get_file", breaks)
    with pytest.raises(CheckpointError, match="the line is dead"):
        fetch_run(other.place())
    monkeypatch.setattr(Flaky, "get_file", whole)
    fetch_run(other.place())
    assert steps(RunDirectory.open(other.place().path)) == [1]


def test_a_run_is_looked_at_in_its_working_copy_or_in_a_passing_one_elsewhere(one: Machine, other: Machine) -> None:
    here = one.turn(1)
    with open_at(f"{URL}/run") as found:
        assert found.path == here.path
    other.place()
    with open_at(f"{URL}/run") as found:
        assert (found.path.name, steps(found)) == ("run", [1])
        assert found.place == f"{URL}/run"
    assert not found.path.exists()
    assert not other.place().path.exists()
    with pytest.raises(ConfigError, match=r"runs/nobody: there is no run\."), open_at(f"{URL}/nobody"):
        pass


@pytest.mark.parametrize("from_where", ["one", "other"])
def test_a_report_of_a_url_is_made_with_its_last_samples_and_brought_there(
    one: Machine, other: Machine, from_where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one.turn(9)
    one.turn(10)
    (one if from_where == "one" else other).place()
    assert main(["report", f"{URL}/run"]) == 0
    assert capsys.readouterr().out == f"{URL}/run/report.html\n"
    page = Flaky.store["/bucket/runs/run/report.html"].getvalue().decode()
    assert "step 10" in page
    assert main(["status", f"{URL}/run"]) == 2
    assert "run: has no cluster.json" in capsys.readouterr().err


@pytest.mark.parametrize("from_where", ["one", "other"])
def test_a_report_of_a_url_has_the_pictures_of_its_last_samples(one: Machine, other: Machine, from_where: str) -> None:
    shown, earlier = picture(28, 28, 1), picture(28, 28, 2)
    path = one.turn(1).path
    folder = PictureFolder(path / "pictures", 1e9, FailedWrites(lambda kind, error: None))
    for step, seen in ((2, earlier), (3, shown)):
        RunDirectory(path).write_samples(step, pa.table({"task": ["{}"], "pictures": folder.keep([[seen]])}))
    with open_at(f"{URL}/run") as directory:
        upload_all(directory)
    (one if from_where == "one" else other).place()
    assert main(["report", f"{URL}/run"]) == 0
    page = Flaky.store["/bucket/runs/run/report.html"].getvalue().decode()
    assert base64.b64encode(shown).decode() in page
    assert base64.b64encode(earlier).decode() not in page
    assert {f"pictures/{name_of(one)}" for one in (shown, earlier)} < set(find(f"{URL}/run"))


def test_a_report_brings_what_never_came_and_says_what_does_not_come_now(
    one: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    one.turn(1)
    one.turn(2, is_brought=False)
    Flaky.refused["report.html"] = OSError("full")
    assert main(["report", f"{URL}/run"]) == 1
    assert "1 file(s) could not be uploaded. upload: cannot be written: report.html: full." in capsys.readouterr().err
    Flaky.refused.clear()
    assert main(["report", f"{URL}/run"]) == 0
    assert {"report.html", "samples/step_2.parquet"} < set(find(f"{URL}/run"))


def test_a_run_that_was_removed_there_is_gone_on_with_from_its_working_copy(one: Machine) -> None:
    one.turn(1)
    remove(f"{URL}/run")
    assert steps(one.turn(2)) == [1, 2]
