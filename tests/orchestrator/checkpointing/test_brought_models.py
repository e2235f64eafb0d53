"""A model that was made for a run is found by whoever goes on from its checkpoints, wherever that is."""

from pathlib import Path

import pytest

from penstock.conf.errors import CheckpointError
from penstock.orchestrator.checkpointing.checkpoints import local_path, portable_path, with_local_models
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.recovery.resume import check_fits
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.orchestrator.run_directory.mirror import MirrorRecord
from penstock.orchestrator.run_directory.run_directory import RunDirectory
from penstock.workers.prompts.order import PromptCursor
from penstock.workers.prompts.source import PromptStart


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/run"


def working_copy(path: Path, url: str) -> RunDirectory:
    path.mkdir(parents=True)
    MirrorRecord(url).write(path)
    return RunDirectory(path, url)


def test_a_model_in_a_working_copy_is_named_by_its_url_and_found_in_another(tmp_path: Path, url: str) -> None:
    one, other = working_copy(tmp_path / "one" / "run", url), working_copy(tmp_path / "other" / "run", url)
    told = portable_path(str(one.path / "sft" / "model"), one)
    assert told == f"{url}/sft/model"
    assert local_path(told, other) == str(other.path / "sft" / "model")
    before = RunDirectory(other.path / "dpo", f"{url}/dpo")
    assert local_path(told, before) == local_path(told, other)


def test_other_models_are_what_they_are(tmp_path: Path, url: str) -> None:
    one = working_copy(tmp_path / "one" / "run", url)
    local = RunDirectory(tmp_path / "local")
    for model in ("org/name", "/data/model"):
        assert portable_path(model, one) == local_path(model, one) == model
    assert portable_path(str(local.initial_model), local) == str(local.initial_model)


def test_a_model_of_another_run_is_brought_once(tmp_path: Path, url: str) -> None:
    (tmp_path / "bucket" / "run" / "initial_model").mkdir(parents=True)
    (tmp_path / "bucket" / "run" / "initial_model" / "config.json").write_text("{}")
    made = Checkpoint("", 1, PromptStart(PromptCursor(0, 0), 0), f"{url}/initial_model", {"teacher": "org/name"})
    fork = RunDirectory(tmp_path / "fork")
    fork.path.mkdir()
    for _ in range(2):
        found = with_local_models(made, fork)
        assert Path(found.model_path).parent == fork.path / "resumed_models"
        assert (Path(found.model_path) / "config.json").read_text() == "{}"
        assert found.model_paths == made.model_paths
        (tmp_path / "bucket" / "run" / "initial_model" / "config.json").unlink(missing_ok=True)


def test_a_model_that_is_gone_from_its_url_is_told_by_its_name(tmp_path: Path, url: str) -> None:
    config = load_config([f"output_dir={tmp_path}"])
    about = {"algorithm": {"name": config.algorithm.name}}
    made = Checkpoint("there", 1, PromptStart(PromptCursor(0, 0), 0), f"{url}/initial_model", {}, config=about)
    with pytest.raises(CheckpointError, match=r"trained from file://.*/initial_model, which is gone"):
        check_fits(made, config)


def test_a_checkpoint_that_names_a_model_elsewhere_is_refused_without_writing(tmp_path: Path, url: str) -> None:
    """The manifest lies at a URL, where others may write."""
    model = f"{url}/../../../loose/resumed_models/x"
    made = Checkpoint("", 1, PromptStart(PromptCursor(0, 0), 0), model, {})
    with pytest.raises(CheckpointError, match=r"is no name of a file below"):
        with_local_models(made, working_copy(tmp_path / "one" / "run", url))
    assert not list(tmp_path.rglob("resumed_models"))
