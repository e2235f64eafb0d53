"""The recipe `custom_algorithm`, as far as it goes without actors."""

from pathlib import Path

import numpy as np
import pytest
import torch

import penstock.recipes
from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.catalogue import build_dataflow
from penstock.orchestrator.configuration.recipes import load_file
from penstock.store.data.rows import Rows

RECIPE = next(path for root in penstock.recipes.__path__ if (path := Path(root) / "custom_algorithm").is_dir())


@pytest.fixture(scope="module")
def declarative():
    return load_file(RECIPE / "declarative.py", "imports")


@pytest.fixture(scope="module")
def imperative():
    return load_file(RECIPE / "imperative.py", "imports")


def test_the_declarative_file_is_under_60_lines():
    assert len((RECIPE / "declarative.py").read_text().splitlines()) < 60


def test_leave_one_out_by_hand(declarative):
    # 1 - (0 + 0) / 2 = 1; 0 - (1 + 0) / 2 = -0.5
    assert declarative.leave_one_out(torch.tensor([1.0, 0.0, 0.0])).tolist() == [1.0, -0.5, -0.5]
    assert declarative.leave_one_out(torch.tensor([2.0])).tolist() == [2.0]


def test_the_loss_by_hand(declarative):
    # both tokens on policy (w = 1): (-(1 · 2 · -1) - (0.5 · -2 · -3)) / 2 tokens = (2 - 3) / 2
    logprobs = torch.tensor([[-1.0], [-3.0]])
    loss, _ = declarative.asymmetric_loss(
        logprobs, torch.ones(2, 1), BatchTotals(2, 2), torch.tensor([2.0, -2.0]), logprobs, negative_weight=0.5
    )
    assert loss.item() == -0.5


def test_its_dataflow_passes_the_check(declarative):
    flow = build_dataflow(declarative.AsymmetricConfig(group_size=3))
    assert flow.samples_per_prompt == 3
    assert flow.stage("train").reads[2:] == ("advantage", "behavior_logprobs")


def test_both_forms_compute_the_same(declarative, imperative):
    rewards, groups = [1.0, 0.0, 0.5, 2.0, 2.5], [0, 0, 0, 1, 1]
    rows = Rows.from_lists({"reward": rewards}, group_ids=groups)
    by_group = [
        declarative.leave_one_out(torch.tensor(rewards[:3])),
        declarative.leave_one_out(torch.tensor(rewards[3:])),
    ]
    advantage = imperative.leave_one_out(rows)
    np.testing.assert_allclose(advantage, torch.cat(by_group).numpy(), rtol=1e-6)

    generator = torch.Generator().manual_seed(0)
    new, behavior = (-torch.rand(5, 4, generator=generator) for _ in range(2))
    arguments = (new, torch.ones(5, 4), BatchTotals(20, 5), torch.from_numpy(advantage), behavior)
    assert torch.equal(declarative.asymmetric_loss(*arguments)[0], imperative.asymmetric_loss(*arguments)[0])
