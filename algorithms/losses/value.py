"""The critic's loss: values against returns. The trainer of the critic calls it: see `losses/__init__.py`.

Legend: B rows of the micro-batch, T response tokens, padded: what lies under `mask == 0` may be anything, NaN included.
"""

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from penstock.algorithms.aggregation import BatchTotals, aggregate, masked
from penstock.algorithms.checks import as_mask, has_axes, same_shape
from penstock.algorithms.losses.policy import LossAndMetrics
from penstock.conf.errors import ConfigError

ROUNDING = 1e-12
"""The share of the mean square below which a variance counts as nothing: sums of float64 have about 16 digits."""


def value_loss(
    values: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    returns: Tensor,
    old_values: Tensor,
    *,
    clip: float = 0.2,
    aggregation: str = "token_mean",
    constant: float = 1.0,
) -> LossAndMetrics:
    """Half the squared error, pessimistically clipped as in PPO's code (1707.06347 eq. 9 has the plain square):

        L = max((V - R)², (V_clip - R)²) / 2,   V_clip = clip(V, V_old - clip, V_old + clip)

    `values` (with gradient), `returns`, `old_values` (of the critic when the returns were computed), `mask`: `[B, T]`.
    `clip`: at least 0; infinity clips nothing. The gradient is zero where the clipped error is the larger one.
    Metrics: `value_loss`, `value_clip_fraction`, and what `explained_variance` needs: the token means `return_mean`,
    `return_square_mean`, `value_error_mean`, `value_error_square_mean`, in float64. Raises `ShapeError`, `ConfigError`.
    """
    if math.isnan(clip) or clip < 0:
        raise ConfigError(f"algorithm.value_clip={clip}: must be at least 0; infinity clips nothing.")
    has_axes("values", values, "BT")
    same_shape(values, "values", mask=mask, returns=returns, old_values=old_values)
    valid = as_mask(mask)
    new, target = masked(values, valid), masked(returns, valid).detach()
    old = masked(old_values, valid).detach()
    plain = (new - target).square()
    clipped = (new.clamp(old - clip, old + clip) - target).square()
    loss = aggregate(torch.maximum(plain, clipped) / 2, valid, totals, aggregation, constant=constant)
    token_mean = partial(aggregate, mask_BT=valid, totals=totals, how="token_mean")
    target, error = target.double(), (target - new).detach().double()  # differences of squares leave few digits
    metrics = {
        "value_loss": loss.detach(),
        "value_clip_fraction": token_mean((clipped > plain).float()),
        "return_mean": token_mean(target),
        "return_square_mean": token_mean(target.square()),
        "value_error_mean": token_mean(error),
        "value_error_square_mean": token_mean(error.square()),
    }
    return loss, metrics


def explained_variance(metrics: Mapping[str, float]) -> float:
    """The explained variance `1 - Var(R - V) / Var(R)` from the metrics of `value_loss`, summed over the batch: 1 is a
    perfect critic, 0 one that might as well be constant. NaN where all returns are equal but for rounding: there is
    nothing to explain.

    Moments add up over micro-batches and ranks, which a ratio of variances does not: so it is made of their sums."""
    variance = metrics["return_square_mean"] - metrics["return_mean"] ** 2
    unexplained = metrics["value_error_square_mean"] - metrics["value_error_mean"] ** 2
    return 1 - unexplained / variance if variance > ROUNDING * metrics["return_square_mean"] else math.nan
