"""The recipe `custom_algorithm`, as far as it goes without actors."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch

import penstock.recipes
from penstock.algorithms.catalogue import build_dataflow
from penstock.algorithms.graph.loss import LossInputs
from penstock.conf.errors import ConfigError
from penstock.orchestrator.configuration.recipes import load_file
from penstock.store.data.rows import Rows

RECIPE = next(path for root in penstock.recipes.__path__ if (path := Path(root) / "custom_algorithm").is_dir())


@pytest.fixture(scope="module")
def declarative():
    return load_file(RECIPE / "declarative.py", "imports")


def test_the_declarative_file_is_under_60_lines():
    assert len((RECIPE / "declarative.py").read_text().splitlines()) < 60


def test_leave_one_out_by_hand(declarative):
    # 1 - (0 + 0) / 2 = 1; 0 - (1 + 0) / 2 = -0.5
    assert declarative.leave_one_out(torch.tensor([1.0, 0.0, 0.0])).tolist() == [1.0, -0.5, -0.5]
    assert declarative.leave_one_out(torch.tensor([2.0])).tolist() == [2.0]


def test_the_loss_by_hand(declarative):
    # both tokens on policy (w = 1): -(1 · 2 · -1) and -(0.5 · -2 · -3)
    logprobs = torch.tensor([[-1.0], [-3.0]])
    columns = {"advantage": torch.tensor([[2.0], [-2.0]]), "behavior_logprobs": logprobs}
    inputs = LossInputs(logprobs, torch.ones(2, 1, dtype=torch.bool), columns)
    loss, metrics = declarative.asymmetric_loss(inputs, negative_weight=0.5)
    assert loss.tolist() == metrics["pg_loss"].tolist() == [[2.0], [-3.0]]


def test_its_dataflow_passes_the_check(declarative):
    flow = build_dataflow(declarative.AsymmetricConfig(group_size=3))
    assert flow.samples_per_prompt == 3
    assert flow.reads_of(flow.stage("train"))[2:] == ("advantage", "behavior_logprobs")


def test_both_forms_share_their_formulas(declarative):
    imperative = importlib.import_module("penstock.recipes.custom_algorithm.imperative")
    rows = Rows.from_lists({"reward": [1.0, 0.0, 0.5, 2.0, 2.5]}, group_ids=[0, 0, 0, 1, 1])
    by_group = [declarative.leave_one_out(rows.tensors("reward")[part]) for part in (slice(3), slice(3, None))]
    advantage = rows.per_group(imperative.leave_one_out, "reward")
    np.testing.assert_allclose(advantage, torch.cat(by_group).numpy(), rtol=1e-6)


def test_its_configuration_has_the_class_of_its_own():
    declarative = importlib.import_module("penstock.recipes.custom_algorithm.declarative")
    words = ["recipe=custom_algorithm", "algorithm.negative_weight=0.25"]
    config = penstock.load_config(words, algorithm=declarative.AsymmetricConfig)
    assert type(config.algorithm) is declarative.AsymmetricConfig
    assert config.algorithm.negative_weight == 0.25
    with pytest.raises(ConfigError, match="algorithm=grpo: AsymmetricConfig is that of 'asymmetric_reinforce'"):
        penstock.load_config(["recipe=arithmetic"], algorithm=declarative.AsymmetricConfig)
