"""The likelihood of demonstrations. The trainer calls it: see `losses/__init__.py`.

Legend: B rows of the micro-batch, T response tokens, padded.
"""

from torch import Tensor

from penstock.algorithms.aggregation import BatchTotals, aggregate
from penstock.algorithms.checks import has_axes, same_shape
from penstock.algorithms.losses.policy import LossAndMetrics


def sft_loss(logprobs: Tensor, mask: Tensor, totals: BatchTotals, *, aggregation: str = "token_mean") -> LossAndMetrics:
    """Negative log-likelihood of the demonstrations: `-mean log π(y_t | x, y_<t)`. Metric: `loss`.

    `logprobs`, `mask`: `[B, T]`. Raises `ShapeError`, `ConfigError`.
    """
    has_axes("logprobs", logprobs, "BT")
    same_shape(logprobs, "logprobs", mask=mask)
    loss = aggregate(-logprobs, mask, totals, aggregation)
    return loss, {"loss": loss.detach()}
