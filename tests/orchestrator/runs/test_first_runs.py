"""Runs that come before a run, for its models: what they are told, and what is checked of them."""

import dataclasses

import pytest

from penstock.conf.errors import ConfigError, ModelError
from penstock.conf.run import WarmStartConfig
from penstock.orchestrator import run as running
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.configuration.resolved import resolve
from penstock.orchestrator.run import with_models
from penstock.orchestrator.run_directory.run_directory import RunDirectory


def test_models_of_other_recipes_are_made_from_where_the_run_starts(tmp_path, monkeypatch):
    words = ["recipe=distill", f"output_dir={tmp_path}", "name=run", "seed=5", "model.path=/the/start"]
    config = load_config(words)
    asked = []

    def made(first):
        asked.append(first)
        return dataclasses.make_dataclass("Result", ["model"])(tmp_path / "made")

    monkeypatch.setattr(running, "run", made)
    directory = RunDirectory.create(config)
    found = with_models(resolve(config), directory)
    directory.close()
    assert found.model_path == "/the/start"
    assert found.config.model.paths == {"teacher": str(tmp_path / "made")}
    assert config.model.paths == {}
    (first,) = asked
    assert (first.algorithm.name, first.seed, first.model.path) == ("sft", 5, "/the/start")
    assert first.data.teacher is None
    assert first.output_dir == str(directory.path)


def test_a_model_that_is_there_is_not_made_again(tmp_path):
    config = load_config(["recipe=ppo", f"model.paths.reward_model={tmp_path}"])
    assert [start.recipe for start in resolve(config).first_runs] == ["sft"]
    config = load_config(["recipe=ppo", f"model.path={tmp_path}"])
    assert resolve(config).first_runs == [WarmStartConfig(recipe="reward_model")]


def test_a_model_that_nobody_names_is_an_error_with_its_key():
    config = load_config(["recipe=ppo"])
    with pytest.raises(ModelError, match=r"asks for the model 'reward_model'.*Set model\.paths\.reward_model"):
        config.model.path_of("reward_model", "policy")
    assert config.model.path_of("reference", "policy") == "policy"


def test_a_wrong_key_of_a_first_run_is_named():
    with pytest.raises(ConfigError, match="recip"):
        load_config(["recipe=grpo", "other_models.teacher.recip=sft"])
