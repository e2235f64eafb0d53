"""A model of a checkpoint is written whole or not at all."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.conf.errors import WeightError
from penstock.orchestrator.checkpointing import export
from penstock.workers.trainer import training_state


class Written:
    """A trainer that fails once the first file is there."""

    fails = True

    def __init__(self, *_: Any) -> None: ...

    def load(self, *_: Any) -> None: ...

    def export(self, directory: str) -> None:
        Path(directory, "config.json").write_text("{}")
        if self.fails:
            raise WeightError("no room")

    def close(self) -> None: ...


@pytest.mark.parametrize("is_there", [False, True])
def test_an_export_that_fails_leaves_nothing(tmp_path: Path, is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = SimpleNamespace(model_path="hub/id", trainer="", files=[])
    monkeypatch.setattr(export, "open_checkpoint", lambda place: checkpoint)
    monkeypatch.setattr(export, "open_trainer", Written)
    monkeypatch.setattr(training_state, "TrainingState", Written)
    target = tmp_path / "model"
    if is_there:
        target.mkdir()
    with pytest.raises(WeightError, match="no room"):
        export.export_checkpoint("runs/a", target)
    assert [*tmp_path.rglob("*")] == [target] * is_there
    monkeypatch.setattr(Written, "fails", False)
    assert export.export_checkpoint("runs/a", target) == str(target)
    assert [*tmp_path.rglob("*")] == [target, target / "config.json"]


def test_a_model_takes_the_place_of_the_one_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = SimpleNamespace(model_path="hub/id", trainer="", files=[])
    monkeypatch.setattr(export, "open_checkpoint", lambda place: checkpoint)
    monkeypatch.setattr(export, "open_trainer", Written)
    monkeypatch.setattr(training_state, "TrainingState", Written)
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("before")
    with pytest.raises(WeightError, match="no room"):
        export.replace_model("runs/a", target)
    assert (target / "config.json").read_text() == "before"
    monkeypatch.setattr(Written, "fails", False)
    export.replace_model("runs/a", target)
    assert (target / "config.json").read_text() == "{}"
    assert [*tmp_path.iterdir()] == [target]
