"""Whole runs on a local Ray whose trainers split the work on a row, have copies, or train adapters only."""

import json
from pathlib import Path

import pytest
import torch

from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.run import run
from tests.model_files import load_model

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("cluster")]
SPLITS = (
    "tensor_parallel_size=2", "sequence_parallel_size=2", "sequence_parallel_size=auto", "shard_size=1",
    "activation_checkpointing=stream",
)  # fmt: skip
SMOOTH = ["trainer.optimizer.eps=1e-2", "trainer.optimizer.lr=1e-2"]
"""AdamW's step follows the gradient smoothly then: with a tiny eps, rounding decides where a gradient is near 0."""
COUNTED = ("reward/mean", "response_length/mean", "staleness/max", "actor/kl", "actor/grad_norm", "actor/entropy")


def steps_and_weights(small_run, tmp_path, name, *more):
    words = [*small_run, "rollout.engine=hf", "algorithm.kl_coef=0.1", "trainer.max_steps=2", "trainer.num_threads=1"]
    result = run(load_config([*words, *more, f"name={name}", f"output_dir={tmp_path}"]), quiet=True)
    lines = (Path(result.directory) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], load_model(result.model)


@pytest.fixture(scope="module")
def one(small_run, tmp_path_factory, cluster):
    return steps_and_weights(small_run, tmp_path_factory.mktemp("one"), "one", *SMOOTH)


@pytest.mark.parametrize("split", SPLITS)
def test_a_run_whose_ranks_share_rows_or_weights_is_the_run_of_one_rank(small_run, tmp_path, one, split):
    words = [*SMOOTH, "trainer.num_ranks=2", f"trainer.{split}"]
    steps, weights = steps_and_weights(small_run, tmp_path, "two", *words)
    for ours, expected in zip(steps, one[0], strict=True):
        for name in COUNTED:
            assert ours[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    for name, weight in one[1].items():
        torch.testing.assert_close(weights[name], weight, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("engine", "publish"),
    [
        ("hf", "merged"),
        pytest.param("vllm", "adapter", marks=pytest.mark.promise("What is supported")),
    ],
)
def test_engines_serve_what_an_adapter_makes_of_the_model(small_run, tmp_path, one, engine, publish):
    words = ["trainer.lora.rank=8", "trainer.optimizer.lr=1e-2"]
    words += [f"rollout.engine={engine}", f"trainer.lora.publish={publish}", "trainer.max_steps=3"]
    steps, weights = steps_and_weights(small_run, tmp_path, "lora", *words)
    assert len(steps) == 3
    assert all(line["mismatch/logprob_abs_mean"] < 1e-5 for line in steps)
    assert all(line["staleness/max"] == 0 for line in steps)
    assert steps[-1]["actor/kl"] > 0
    assert torch.equal(weights["model.norm.weight"], torch.ones_like(weights["model.norm.weight"]))
    assert weights.keys() == one[1].keys()
    assert (tmp_path / "lora" / "model" / "adapter" / "adapter_config.json").exists()
