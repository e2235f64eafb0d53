"""Estimates of KL(policy || reference) from the log-probabilities of the sampled tokens alone.

With `r = log policy - log reference` of a token that the policy sampled (J. Schulman, 2020, "Approximating KL
divergence"):

    k1 = r                   unbiased, high variance, may be negative
    k2 = r² / 2              biased, low variance, never negative
    k3 = exp(-r) - 1 + r     unbiased, low variance, never negative; GRPO's, 2402.03300 eq. 4

Called by `losses.py` with log-probabilities that carry gradients. Elementwise over any shape.
"""

import torch
from torch import Tensor

from penstock.algorithms.aggregation import in_float32
from penstock.algorithms.checks import known, same_shape

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ±20 before exp. exp(20) = 4.9e8 is finite in float32 and far beyond any ratio that is not a
bug; beyond the bound the gradient is zero."""

ESTIMATORS = ("k1", "k2", "k3")


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """`numerator - denominator` of two log-probabilities, float32, clamped to ±`LOG_RATIO_BOUND`."""
    return (in_float32(numerator) - in_float32(denominator)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str = "k3") -> Tensor:
    """Elementwise estimate, float32, of the inputs' shape, exactly 0 where the two agree.

    `logprobs`: of the policy, with gradient; `reference_logprobs`: of the reference, constant. Raises `ShapeError`,
    `ConfigError`.
    """
    known("estimator", estimator, ESTIMATORS)
    same_shape(logprobs, "logprobs", reference_logprobs=reference_logprobs)
    r = log_ratio(logprobs, reference_logprobs)
    if estimator == "k1":
        return r
    if estimator == "k2":
        return r.square() / 2
    return torch.expm1(-r) + r  # expm1: exp(-r) - 1 would lose every digit where the two nearly agree
