"""Two ranks that share a model that sees, in every way in which they can. They make the weights that one rank makes,
and answer what it answers, also where one of them has no picture and they wait for each other in every layer of the
tower."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.rank_processes import run_ranks
from tests.workers.trainer.seeing import ROPE, save_model
from tests.workers.trainer.several_ranks import ranks_seeing
from tests.workers.trainer.several_ranks.ranks_seeing import KINDS, RESUMED, SCENARIOS, SHARES, alone

pytestmark = pytest.mark.real
GAP = 1e-5
"""Largest mean difference of log-probabilities, float32."""


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # to be split over two


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        rope = ROPE | {"mrope_section": [2, 3, 3]}
        text = HEADS | (
            {"rope_parameters": rope | {"mrope_interleaved": kind == "qwen3_vl"}} if kind != "llava" else {}
        )
        save_model(kind, directory / kind, text)
    return directory


@pytest.fixture(scope="module")
def one(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("one")
    keeps = ranks_seeing.fsdp.KEEP_WHOLE_BYTES
    ranks_seeing.run(0, 1, None, models, directory)
    ranks_seeing.fsdp.KEEP_WHOLE_BYTES = keeps
    return directory


@pytest.fixture(scope="module")
def two(models: Path, tmp_path_factory: pytest.TempPathFactory, warm_python: list[str]) -> Path:
    directory = tmp_path_factory.mktemp("two")
    run_ranks([*warm_python, "-m", ranks_seeing.__name__], 2, models, directory, timeout_s=300)
    return directory


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_ranks_that_see_make_the_weights_of_one(one: Path, two: Path, scenario: str) -> None:
    ours, expected = (
        load_file(directory / name / "v00000001" / "model.safetensors")
        for directory, name in ((two, scenario), (one, alone(scenario)))
    )
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, atol=2e-6, rtol=1e-5, msg=name)


CASES = [
    *((name, when) for name in SCENARIOS for when in ("before", "after")),
    *((name, "resumed") for name in RESUMED),
]


@pytest.mark.parametrize(("scenario", "when"), CASES)
def test_each_row_with_pictures_gets_the_answers_of_one_rank(one: Path, two: Path, scenario: str, when: str) -> None:
    expected = answers(one, alone(scenario), 0)["after" if when == "resumed" else when]
    for rank in range(2):
        ours = answers(two, scenario, rank)[when]
        share = SHARES[rank] if len(ours) < len(expected) else range(len(expected))
        gaps = [np.abs(values - expected[row]) for row, values in zip(share, ours, strict=True)]
        assert np.concatenate(gaps).mean() <= GAP


def answers(directory: Path, scenario: str, rank: int) -> dict[str, Any]:
    return torch.load(directory / f"{scenario}.{rank}.pt", weights_only=False)
