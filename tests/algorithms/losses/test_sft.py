import math

import torch

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.losses import sft_loss


def test_sft_is_the_negative_log_likelihood():
    # token mean: (1 + 2 + 3) / 3 = 2; sequence mean: ((1 + 2) / 2 + 3) / 2 = 2.25
    logprobs, mask = torch.tensor([[-1.0, -2.0], [-3.0, math.nan]]), torch.tensor([[1, 1], [1, 0]])
    loss, metrics = sft_loss(logprobs, mask, BatchTotals.of(mask))
    assert loss.item() == metrics["loss"].item() == 2.0
    assert sft_loss(logprobs, mask, BatchTotals.of(mask), aggregation="sequence_mean")[0].item() == 2.25
