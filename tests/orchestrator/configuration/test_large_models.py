"""A model above a billion parameters is not computed on CPUs by mistake: a preset's zeros are for its own model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.errors import ConfigError
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.large_models import count_parameters
from penstock.orchestrator.configuration.memory_view import ACCELERATOR
from penstock.orchestrator.configuration.resolved import resolve
from penstock.planner import plan_inputs
from penstock.planner.planned_runs import planned
from tests.orchestrator.configuration.memory.shapes import QWEN3_30B_A3B

ZEROS = ("rollout.num_gpus_per_worker=0", "trainer.num_gpus_per_rank=0")


def model_at(path: Path, **changes: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(QWEN3_30B_A3B | changes))
    return path


def devices(config: RunConfig) -> tuple[Any, ...]:
    rollout, trainer = config.rollout, config.trainer
    return (rollout.num_gpus_per_worker, rollout.dtype, rollout.enforce_eager, trainer.num_gpus_per_rank, trainer.dtype)


ON_CPU, ON_GPU = (0, "float32", True, 0, "float32"), (1, "bfloat16", False, 1, "bfloat16")


@pytest.mark.parametrize("words", [("recipe=moe",), ("recipe=moe", "model=tiny"), ("recipe=gsm8k", "model=tiny")])
def test_zeros_of_a_preset_do_not_hold_for_a_large_model(tmp_path: Path, words: tuple[str, ...]) -> None:
    small = model_at(tmp_path / "small", num_hidden_layers=1, num_experts=4, vocab_size=1000)
    assert devices(load_config([*words, f"model.path={small}"])) == devices(load_config([*words])) == ON_CPU
    assert devices(load_config([*words, f"model.path={model_at(tmp_path / 'large')}"])) == ON_GPU


def test_a_recipes_large_model_does_not_count_where_another_takes_its_place() -> None:
    assert devices(load_config(["recipe=geo3k"])) == ON_GPU
    assert devices(load_config(["recipe=geo3k", "model=tiny", "rollout.sampling.max_tokens=64"])) == ON_CPU


def test_a_model_of_the_hub_counts_by_its_name_where_it_has_no_config_here() -> None:
    assert devices(load_config(["recipe=moe", "model.path=someone/Qwen3-30B-A3B"])) == ON_GPU
    assert devices(load_config(["recipe=moe", "model.path=someone/Qwen2.5-0.5B-Instruct"])) == ON_CPU
    assert count_parameters("someone/Mixtral-8x7B-v0.1") == 56e9
    assert count_parameters("someone/of-no-size") is None
    assert count_parameters("/there/is/no-7B") is None


def test_keys_that_are_given_stay_and_so_do_the_keys_of_a_recipe(tmp_path: Path) -> None:
    large = model_at(tmp_path / "large")
    config = load_config(["recipe=moe", f"model.path={large}", "rollout.dtype=float32", "trainer.num_gpus_per_rank=.5"])
    assert devices(config) == (1, "float32", False, 0.5, "bfloat16")
    mine = tmp_path / "mine"
    mine.mkdir()
    text = f"base: moe\nmodel: {{path: {large}}}\nrollout: {{enforce_eager: true}}\n"
    (mine / "recipe.yaml").write_text(text)
    assert devices(load_config([f"recipe={mine}"])) == (1, "bfloat16", True, 1, "bfloat16")
    shared = load_config(["recipe=moe", f"model.path={large}", "placement=colocated"])
    assert devices(shared) == (0.5, "bfloat16", False, 0.5, "bfloat16")


@pytest.mark.parametrize("zeros", [ZEROS, ZEROS[:1], ZEROS[1:]])
def test_zeros_that_were_typed_are_refused_by_their_keys(tmp_path: Path, zeros: tuple[str, ...]) -> None:
    words = ["recipe=moe", f"model.path={model_at(tmp_path / 'large')}", *zeros]
    with pytest.raises(ConfigError, match=r"30\.5B parameters .*" + " and ".join(map(re.escape, zeros))) as refused:
        load_config(words)
    assert str(refused.value).count(". ") == 0
    assert "plan=never" in str(refused.value)
    config = load_config([*words, "plan=never"])
    assert 0 in (config.rollout.num_gpus_per_worker, config.trainer.num_gpus_per_rank)


def test_zeros_for_the_model_of_a_preset_are_as_they_were() -> None:
    config = load_config(["recipe=gsm8k", *ZEROS])
    assert (config.rollout.num_gpus_per_worker, config.trainer.num_gpus_per_rank) == (0, 0)


def test_a_mixture_is_then_planned_for_the_gpus_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Node("0", "n0", "10.0.0.1", 96, 8, {ACCELERATOR: "H100"})]
    monkeypatch.setattr(plan_inputs, "look", lambda: nodes)
    words = ["recipe=moe", f"model.path={model_at(tmp_path / 'large')}", "trainer.lora.rank=16"]
    said = list[str]()
    run = planned(resolve(load_config(words)), said.append)
    assert said[0].startswith("plan for 1x8:h100: ")
    assert sum(actor.num_gpus for actor in run.plan) == 8
    assert run.config.trainer.dtype == run.config.rollout.dtype == "bfloat16"
