import math
from functools import partial

import pytest
import torch

from penstock.algorithms.aggregation import BatchTotals, aggregate
from penstock.algorithms.corrections import correction_metrics, truncated_importance_weight
from penstock.conf.errors import ConfigError, ShapeError


def test_the_weight_is_the_ratio_up_to_the_cap():
    # trainer / engine = 0.5, 1, 1.5, 8 capped at 2
    trainer = torch.tensor([[0.5, 1.0, 1.5, 8.0]]).log()
    weight = truncated_importance_weight(trainer, torch.zeros(1, 4), cap=2.0)
    torch.testing.assert_close(weight, torch.tensor([[0.5, 1.0, 1.5, 2.0]]))


def test_the_weight_carries_no_gradient():
    trainer = torch.zeros(1, 2, requires_grad=True)
    assert not truncated_importance_weight(trainer, torch.zeros(1, 2), cap=2.0).requires_grad


def test_a_log_ratio_of_100_gives_a_finite_weight():
    weight = truncated_importance_weight(torch.tensor([100.0, -100.0]), torch.zeros(2), cap=1e30)
    torch.testing.assert_close(weight, torch.tensor([math.exp(20.0), math.exp(-20.0)]))


def test_metrics_are_the_mean_weight_and_the_capped_share():
    # weights 1 and 2 (capped): mean 1.5, one of two capped; what is under padding is ignored
    mask = torch.tensor([[True, True, False]])
    mean = partial(aggregate, mask_BT=mask, totals=BatchTotals.of(mask), how="token_mean")
    metrics = correction_metrics(torch.tensor([[1.0, 2.0, 2.0]]), 2.0, mean)
    assert {name: value.item() for name, value in metrics.items()} == {
        "correction_weight_mean": 1.5,
        "correction_capped_fraction": 0.5,
    }


def test_bad_input_is_named():
    with pytest.raises(ConfigError, match="correction_cap=-1"):
        truncated_importance_weight(torch.zeros(1), torch.zeros(1), cap=-1)
    with pytest.raises(ShapeError, match=r"behavior_logprobs is float32 \[2\]; expected \[1\]"):
        truncated_importance_weight(torch.zeros(1), torch.zeros(2), cap=2)
