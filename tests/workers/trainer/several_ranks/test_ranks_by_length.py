"""Ranks over gloo that choose for each micro-batch which of them split its rows, against one rank, in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.conf.model import FreshModelConfig
from penstock.workers.fresh_model import build_fresh_model
from tests.rank_processes import run_ranks
from tests.workers.trainer.several_ranks import ranks_by_length as ranks

pytestmark = pytest.mark.real
FRESH = FreshModelConfig(
    num_layers=2, hidden_size=32, intermediate_size=48, num_heads=8, num_kv_heads=4, max_position_embeddings=128
)
CASES = [(number, scenario) for number, some in ranks.SCENARIOS.items() for scenario in some]
NUMBERS = (1, *ranks.SCENARIOS)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, warm_python: list[str]) -> dict[int, Path]:
    """The directories of what one, two and four processes wrote."""
    model = tmp_path_factory.mktemp("models")
    build_fresh_model(model, FRESH, seed=3)
    directories = {number: tmp_path_factory.mktemp(f"ranks{number}") for number in NUMBERS}
    for number, directory in directories.items():
        run_ranks([*warm_python, "-m", ranks.__name__], number, model, directory)
    return directories


def of_ranks(results: dict[int, Path], num_ranks: int, scenario: str) -> list[dict[str, Any]]:
    paths = [results[num_ranks] / f"{scenario}.{rank}.pt" for rank in range(num_ranks)]
    return [torch.load(path, weights_only=False) for path in paths]


@pytest.mark.parametrize(("num_ranks", "scenario"), CASES)
def test_gradients_are_those_of_one_rank(results: dict[int, Path], num_ranks: int, scenario: str) -> None:
    (expected,) = of_ranks(results, 1, scenario)
    for found in of_ranks(results, num_ranks, scenario):
        assert found["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            assert gradient.dtype == torch.float64
            torch.testing.assert_close(found["gradients"][name], gradient, atol=1e-9, rtol=0, msg=name)


@pytest.mark.parametrize(("num_ranks", "scenario"), CASES)
def test_all_ranks_make_as_many_passes_in_groups_of_several_sizes(
    results: dict[int, Path], num_ranks: int, scenario: str
) -> None:
    sizes = [found["sizes"] for found in of_ranks(results, num_ranks, scenario)]
    assert len({len(some) for some in sizes}) == 1
    if scenario == "four":
        assert [sorted(some) for some in zip(*sizes, strict=True)] == [[4] * 4, [1, 1, 2, 2], [1] * 4, [4] * 4]
    elif num_ranks == 2:
        assert {size for some in sizes for size in some} == {1, 2}


@pytest.mark.parametrize(("num_ranks", "scenario"), CASES)
def test_metrics_and_answers_are_those_of_one_rank_on_every_rank(
    results: dict[int, Path], num_ranks: int, scenario: str
) -> None:
    (expected,) = of_ranks(results, 1, scenario)
    for found in of_ranks(results, num_ranks, scenario):
        for name, value in expected["metrics"].items():
            if "share" not in name:  # of padding
                assert found["metrics"][name] == pytest.approx(value, abs=1e-6), name
        for row, logprobs in found["logprobs"].items():
            np.testing.assert_allclose(logprobs, expected["logprobs"][row], atol=1e-5)


@pytest.mark.parametrize(("num_ranks", "scenario"), CASES)
def test_each_rank_knows_what_others_have_noted_of_its_tokens(
    results: dict[int, Path], num_ranks: int, scenario: str
) -> None:
    (expected,) = of_ranks(results, 1, scenario)
    for found in of_ranks(results, num_ranks, scenario):
        places = {row: place for place, row in enumerate(expected["noted"].row_ids.tolist())}
        for row, mask in zip(found["noted"].row_ids.tolist(), found["noted"].loss_mask, strict=True):
            np.testing.assert_array_equal(mask, expected["noted"].loss_mask[places[row]])


@pytest.mark.parametrize(("num_ranks", "scenario"), CASES)
def test_all_ranks_have_measured_the_same_costs(results: dict[int, Path], num_ranks: int, scenario: str) -> None:
    first, *others = (found["measured"] for found in of_ranks(results, num_ranks, scenario))
    assert all(other == first for other in others)
    assert min(cost.token for cost in first.by_size.values()) > 0
