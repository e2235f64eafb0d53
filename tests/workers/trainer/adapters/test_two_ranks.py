"""Adapters, and whole models, that take turns on two ranks over gloo, against one rank with all data: the same
mathematics, and each with the bits that it gets alone."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.workers.fresh_model import build_fresh_model
from penstock.workers.protocols import AdapterState
from tests.rank_processes import run_ranks
from tests.workers.trainer.adapters import ranks
from tests.workers.trainer.adapters.conftest import assert_equal
from tests.workers.trainer.conftest import FRESH

pytestmark = pytest.mark.real
Results = dict[str, Any]
ALL = [*ranks.WAYS, *ranks.WHOLE_WAYS]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose heads two ranks can split."""
    directory = tmp_path_factory.mktemp("heads")
    build_fresh_model(directory, replace(FRESH, num_kv_heads=2), seed=3)
    return str(directory)


@pytest.fixture(scope="module")
def two(path: str, tmp_path_factory: pytest.TempPathFactory, warm_python: list[str]) -> Path:
    """The directory of what two processes wrote."""
    directory = tmp_path_factory.mktemp("two")
    run_ranks([*warm_python, "-m", ranks.__name__], 2, path, directory, timeout_s=900)
    return directory


@pytest.fixture(scope="module")
def one(path: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one")
    ranks.run(0, 1, None, path, directory)
    return directory


def alone(one: Path, way: str) -> Results:
    """What one rank with all data comes to."""
    return result(one, "whole alone" if way in ranks.WHOLE_WAYS else "alone")


def result(directory: Path, way: str, rank: int = 0) -> Results:
    loaded: Results = pickle.loads((directory / f"{way}.{rank}.pickle").read_bytes())
    return loaded


def assert_close(ours: AdapterState, expected: AdapterState) -> None:
    assert (ours.spec, ours.num_steps) == (expected.spec, expected.num_steps)
    assert ours.tensors.keys() == expected.tensors.keys()
    for name, values in expected.tensors.items():
        np.testing.assert_allclose(ours.tensors[name], values, atol=1e-4, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("way", ALL)
def test_two_ranks_give_an_adapter_what_one_gives_it(one: Path, two: Path, way: str) -> None:
    ours, theirs = result(two, way), alone(one, way)
    assert_close(ours["alone"], theirs["alone"])
    assert result(two, way, 1)["alone"] is None
    for output, expected in zip(ours["first"], theirs["first"], strict=True):
        if isinstance(expected, dict):
            assert output == pytest.approx(expected, rel=1e-4)
        else:
            assert output.metrics == pytest.approx(expected.metrics, rel=1e-4)


@pytest.mark.parametrize("way", ["sharded", "tensor"])
def test_each_rank_gets_the_scores_of_its_own_data(one: Path, two: Path, way: str) -> None:
    expected = alone(one, way)["first"][0].logprobs
    num = 2 if way == "sharded" else 1
    for rank in range(2):
        ours = result(two, way, rank)["first"][0].logprobs
        for values, others in zip(ours, expected[rank % num :: num], strict=True):
            np.testing.assert_allclose(values, others, atol=1e-5)


@pytest.mark.parametrize("way", ALL)
def test_beside_others_it_gets_the_bits_that_it_gets_alone(two: Path, way: str) -> None:
    ours = result(two, way)
    assert_equal(ours["together"], ours["alone"])


@pytest.mark.parametrize("way", ALL)
def test_from_its_state_it_goes_on_bit_for_bit(two: Path, way: str) -> None:
    ours = result(two, way)
    assert_equal(ours["on of a"], ours["on of alone"])


@pytest.mark.parametrize("way", ALL)
def test_data_of_one_rank_that_do_not_fit_are_refused_on_both(two: Path, way: str) -> None:
    """Both go on: a request without data is none to wait for."""
    for rank in range(2):
        ours = result(two, way, rank)
        assert "datum 0 has targets of shape [2] for 1 tokens" in ours["refusal"]
        assert ours["nothing"] == {"loss": 0.0}
        assert ours["step"]["skipped_nonfinite"] == 0.0
        assert ours["step"] == result(two, way)["step"]
