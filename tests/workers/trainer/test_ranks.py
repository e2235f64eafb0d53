"""Two ranks over gloo, in small micro-batches, against one rank with all rows in one: the same mathematics."""

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("trainer_ranks", HERE / "ranks.py")
assert _spec is not None
assert _spec.loader is not None
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)
EXACT = [name for name in ranks.SCENARIOS if "bfloat16" not in name]


@pytest.fixture(scope="module")
def two(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left."""
    directory = tmp_path_factory.mktemp("two")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, str(HERE / "ranks.py")]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", address, model_path, str(directory)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return directory


@pytest.fixture(scope="module")
def one(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank leaves."""
    directory = tmp_path_factory.mktemp("one")
    ranks.run(0, 1, None, model_path, directory)
    return directory


def result(directory: Path, scenario: str, rank: int = 0) -> dict[str, Any]:
    return torch.load(directory / f"{scenario}.{rank}.pt", weights_only=False)


def weights(directory: Path, scenario: str) -> dict[str, torch.Tensor]:
    return load_file(directory / scenario / "v00000001" / "model.safetensors")


@pytest.mark.parametrize("scenario", EXACT)
def test_gradients_of_two_ranks_are_those_of_one(one: Path, two: Path, scenario: str) -> None:
    expected, ours = weights(one, scenario), weights(two, scenario)
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("scenario", EXACT)
def test_metrics_are_those_of_the_whole_batch_on_every_rank(one: Path, two: Path, scenario: str) -> None:
    expected = result(one, scenario)["metrics"]
    for rank in range(2):
        metrics = result(two, scenario, rank)["metrics"]
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("scenario", EXACT)
@pytest.mark.parametrize("when", ["before", "after"])
def test_each_row_gets_the_logprobs_that_it_gets_from_one_rank(one: Path, two: Path, scenario: str, when: str) -> None:
    expected = result(one, scenario)[when]
    for rank in range(2):
        ours = result(two, scenario, rank)[when]
        for position, values in zip(ranks.share_of(scenario, rank, 2), ours, strict=True):
            np.testing.assert_allclose(values, expected[position], atol=1e-5)


def test_tokens_are_counted_by_rank(one: Path, two: Path) -> None:
    assert result(two, "empty_rank", 1)["tokens"] == 0
    assert sum(result(two, "uneven", rank)["tokens"] for rank in range(2)) == result(one, "uneven")["tokens"]


@pytest.mark.parametrize("scenario", ["bfloat16", "bfloat16_tiled"])
def test_bfloat16_on_two_ranks_is_near_one(one: Path, two: Path, scenario: str) -> None:
    expected, ours = weights(one, scenario), weights(two, scenario)
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, atol=2e-3, rtol=0, msg=name)


def test_an_export_of_two_ranks_is_their_publication(two: Path) -> None:
    exported = load_file(two / "exported" / "model.safetensors")
    published = weights(two, list(ranks.SCENARIOS)[-1])
    assert exported.keys() == published.keys()
    assert all(torch.equal(exported[name], published[name]) for name in published)
