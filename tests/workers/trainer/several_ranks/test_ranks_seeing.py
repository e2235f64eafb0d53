"""Two ranks that share a model that sees, of which one has no picture: they wait for each other in every layer of the
tower, and make the weights that one rank makes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.rank_processes import run_ranks
from tests.workers.trainer.seeing import save_model
from tests.workers.trainer.several_ranks import ranks_seeing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl", "llava"])
def seeing_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(request.param, tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def one(seeing_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one")
    keeps = ranks_seeing.fsdp.KEEP_WHOLE_BYTES
    ranks_seeing.run(0, 1, None, seeing_path, directory)
    ranks_seeing.fsdp.KEEP_WHOLE_BYTES = keeps
    return directory


@pytest.fixture(scope="module")
def two(seeing_path: str, tmp_path_factory: pytest.TempPathFactory, warm_python: list[str]) -> Path:
    directory = tmp_path_factory.mktemp("two")
    run_ranks([*warm_python, "-m", ranks_seeing.__name__], 2, seeing_path, directory, timeout_s=300)
    return directory


@pytest.mark.parametrize("freeze", ranks_seeing.FREEZES)
def test_a_rank_without_pictures_keeps_step_with_one_that_has_them(one: Path, two: Path, freeze: str) -> None:
    expected, ours = (load_file(place / freeze / "v00000001" / "model.safetensors") for place in (one, two))
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, atol=2e-6, rtol=1e-5, msg=name)
