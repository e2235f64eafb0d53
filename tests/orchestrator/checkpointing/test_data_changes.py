"""What a run does that goes on from a checkpoint of other data."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError, DataError
from penstock.conf.faults import CheckpointConfig
from penstock.orchestrator.checkpointing.checkpoints import Checkpoints, open_checkpoint
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.recovery.resume import open_run, rewind
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.prompts.data_identity import DataIdentity
from penstock.workers.prompts.opening import open_rows
from penstock.workers.prompts.order import CurriculumState, PromptCursor
from penstock.workers.prompts.source import PromptStart
from penstock.workers.runtime.url_files import saved_file


def rows(path: Path, numbers: Sequence[int]) -> str:
    path.write_text("".join(json.dumps({"question": f"{n}?", "answer": f"{n}"}) + "\n" for n in numbers))
    return str(path)


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return [f"output_dir={tmp_path}/runs", f"data.path={rows(tmp_path / 'a.jsonl', range(12))}"]


@pytest.fixture
def saved(words: list[str], tmp_path: Path) -> Checkpoint:
    """A checkpoint after ten rows of run `a`."""
    config = load_config([*words, "name=a"])
    directory = RunDirectory.create(config)
    checkpoints = Checkpoints(f"{directory.path}/checkpoints", CheckpointConfig())
    place = Path(checkpoints.directory(5))
    (place / "trainer").mkdir(parents=True)
    (place / "trainer" / "rank_0.bin").write_bytes(b"weights")
    dataset = open_rows(config)
    assert dataset is not None
    identity = DataIdentity.of(dataset, config.data)
    start = PromptStart(PromptCursor(0, 10), 10, CurriculumState(10, {}), identity)
    files = [saved_file(place / "trainer" / "rank_0.bin")]
    made = Checkpoint(str(place), 5, start, "/", {}, files, {"algorithm": {"name": "grpo"}})
    checkpoints.seal(made)
    directory.close()
    assert open_checkpoint(str(place)) == made
    return made


def resumed(*words: str) -> tuple[PromptStart, list[str]]:
    """Where the run goes on, and what it tells."""
    told: list[str] = []
    directory, goes_on = open_run(load_config(words))
    directory.failed_writes.set_printer(told.append)
    messages = [event["message"] for event in directory.read_events() if event["kind"] == "data_changed"]
    directory.close()
    assert isinstance(goes_on, Checkpoint)
    assert messages == told
    return goes_on.prompts, told


def test_the_same_data_is_gone_on_with(saved: Checkpoint, words: list[str], tmp_path: Path) -> None:
    for resume in ("auto", f"{tmp_path}/runs/a"):
        name = "a" if resume == "auto" else "b"
        assert resumed(*words, f"name={name}", f"resume={resume}") == (saved.prompts, [])


@pytest.mark.parametrize("resume", ["auto", "from"])
def test_other_data_begins_at_its_first_row_and_says_so(
    saved: Checkpoint, words: list[str], tmp_path: Path, resume: str
) -> None:
    other = rows(tmp_path / "b.jsonl", range(50, 70))
    way = ["name=a", "resume=auto"] if resume == "auto" else ["name=b", f"resume={tmp_path}/runs/a"]
    start, (told,) = resumed(*words, f"data.path={other}", *way)
    assert start == PromptStart(first_group=10)
    assert f"a.jsonl with 12 rows and is {other} with 20 others. Rows are drawn from the first on" in told


def test_another_order_is_other_data(saved: Checkpoint, words: list[str], tmp_path: Path) -> None:
    for name, word in (("b", "data.seed=1"), ("c", "data.shuffle=false"), ("d", "data.size=5")):
        start, told = resumed(*words, word, f"name={name}", f"resume={tmp_path}/runs/a")
        assert (start, len(told)) == (PromptStart(first_group=10), 1)


@pytest.mark.parametrize("resume", ["auto", "from"])
def test_other_data_is_refused_before_anything_is_made_or_changed(
    saved: Checkpoint, words: list[str], tmp_path: Path, resume: str
) -> None:
    before = sorted(str(path) for path in (tmp_path / "runs").rglob("*"))
    way = ["name=a", "resume=auto"] if resume == "auto" else ["name=b", f"resume={tmp_path}/runs/a"]
    config = load_config([*words, "data.seed=1", "data.on_change=error", *way])
    with pytest.raises(
        ConfigError, match=r"data\.seed was 0 and is 1.*data\.on_change=restart.*after row 10 of epoch 0"
    ):
        open_run(config)
    after = {str(path) for path in (tmp_path / "runs").rglob("*")} - set(before)
    assert not any("runs/b" in path for path in after)
    assert not any("data_changed" in file.read_text() for file in (tmp_path / "runs").rglob("events.jsonl"))


def test_other_data_may_be_gone_on_with(saved: Checkpoint, words: list[str], tmp_path: Path) -> None:
    way = ["data.seed=1", "data.on_change=continue", "name=b", f"resume={tmp_path}/runs/a"]
    start, (told,) = resumed(*words, *way)
    assert start == saved.prompts
    assert "The run continues after row 10 of epoch 0" in told


def test_a_file_that_only_grew_goes_on_whatever_is_asked(saved: Checkpoint, words: list[str], tmp_path: Path) -> None:
    rows(tmp_path / "a.jsonl", range(15))
    start, (told,) = resumed(*words, "data.on_change=error", "name=b", f"resume={tmp_path}/runs/a")
    assert (start.cursor, start.num_rows, start.curriculum) == (PromptCursor(0, 10), 12, saved.prompts.curriculum)
    assert "has grown from 12 to 15 rows. The new rows are drawn from the next epoch on." in told


def test_a_checkpoint_that_does_not_say_what_its_data_was_is_gone_on_with(
    saved: Checkpoint, words: list[str], tmp_path: Path
) -> None:
    manifest = Path(saved.directory) / "manifest.json"
    values = json.loads(manifest.read_text())
    del values["prompts"]["data"], values["prompts"]["num_rows"]
    manifest.write_text(json.dumps(values))
    start, told = resumed(*words, "data.seed=1", "name=b", f"resume={tmp_path}/runs/a")
    assert (start.cursor, told) == (PromptCursor(0, 10), [])


def test_a_run_that_returns_to_its_checkpoint_looks_at_the_data_again(
    saved: Checkpoint, words: list[str], tmp_path: Path
) -> None:
    config = load_config([*words, "name=a", "resume=auto"])
    directory, _ = open_run(config)
    rows(tmp_path / "a.jsonl", range(99, 120))
    found = rewind(directory, config)
    assert found is not None
    assert found.prompts == PromptStart(first_group=10)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match="there is no such file"):
        rewind(directory, config)
    directory.close()
