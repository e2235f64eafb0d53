"""What the tests of the surrogates share: one formula on a few tokens, with its gradient."""

import torch

from penstock.algorithms.aggregation import BatchTotals, aggregate
from penstock.algorithms.losses import SURROGATES

F64 = torch.float64


def tokens(name, new, old, advantage, **options):
    """Values, gradients of their sequence mean, and metrics, of one response: lists of a number a token."""
    new = torch.tensor([new], dtype=F64, requires_grad=True)
    old, advantage = torch.tensor([old], dtype=F64), torch.tensor([advantage], dtype=F64)
    mask = torch.ones(new.shape, dtype=torch.bool)
    values, metrics = SURROGATES.find(name)(new, old, advantage, mask, **options)
    loss = aggregate(values, mask, BatchTotals.of(mask), "sequence_mean")
    (gradient,) = torch.autograd.grad(loss, new)
    shown = {key: value.expand_as(new)[0].tolist() for key, value in metrics.items()}
    return values.expand_as(new)[0].tolist(), gradient[0].tolist(), shown
