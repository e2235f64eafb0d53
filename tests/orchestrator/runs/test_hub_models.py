"""A run of a hub's model: each node has it before actors are made, and they read its directory."""

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from tests.model_files import load_model
from tests.run_files import metrics_of

pytestmark = pytest.mark.real

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_model(small_run: list[str]) -> Iterator[tuple[str, str]]:
    """Path of a model's directory, and the name under which this machine's cache of the hub has it. No network is
    asked: the processes of tests are offline."""
    path = next(word.removeprefix("model.path=") for word in small_run if word.startswith("model.path="))
    name = f"penstock-tests/{uuid.uuid4().hex}"
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    shutil.copytree(path, folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    yield path, name
    shutil.rmtree(folder)


def test_a_run_of_the_hubs_model_trains_what_one_of_its_directory_does(
    small_run: list[str],
    hub_model: tuple[str, str],
    cluster: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    path, name = hub_model
    words = [
        *(word for word in small_run if not word.startswith("model.path=")), "rollout.engine=hf", "trainer.max_steps=2",
        f"output_dir={tmp_path}",
    ]  # fmt: skip
    local = run(load_config([*words, f"model.path={path}", "name=local"]), quiet=True).directory
    fetched = run(load_config([*words, f"model.path={name}", "name=fetched"]), quiet=True).directory
    assert [line["step"] for line in metrics_of(fetched)] == [1, 2]
    expected, found = load_model(local / "model"), load_model(fetched / "model")
    assert all(expected[key].equal(found[key]) for key in expected)
