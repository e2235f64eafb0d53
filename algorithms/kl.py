"""Log-ratios of the probabilities that two policies give a sampled token, or a whole response, and estimates of
KL(policy || reference) from them, with their coefficient.

Every exp of a difference of log-probabilities in this package goes through one of the two log-ratios, which clamp it.

With `r = log policy - log reference` of a token that the policy sampled (J. Schulman, 2020, "Approximating KL
divergence"):

    k1 = r                   unbiased, high variance, may be negative
    k2 = r² / 2              biased, low variance, never negative
    k3 = exp(-r) - 1 + r     unbiased, low variance, never negative; GRPO's, 2402.03300 eq. 4

That is about their *values*. A loss follows their *gradients*, and those are another matter. On samples of the policy
itself the gradient of the divergence is `E[r ∇log π]` (the term `E[∇r] = E[∇log π]` is zero). k2's gradient is
`r ∇log π`: unbiased. k1's is `∇log π`, whose expectation is zero: as a loss it does nothing but add noise. k3's is
`(1 - exp(-r)) ∇log π`, which is the gradient of the *reverse* divergence KL(reference || policy). The straight-through
variants `k1_st` and `k3_st` have the value of k1 or k3, for the metrics, and the gradient of k2.

In the loss: `kl_estimate`, called by `losses/policy.py` with log-probabilities that carry gradients. In the reward:
`kl_penalty` of tokens and `penalized_reward` of responses, where only values count. The coefficient is a number, or
follows a target between steps: `AdaptiveKl`.

Legend: B rows of the micro-batch, T response tokens, padded.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from penstock.algorithms.aggregation import in_float32, masked
from penstock.algorithms.checks import as_mask, has_axes, non_negative, positive, same_shape
from penstock.conf.checks import one_of

LOG_RATIO_BOUND = 20.0
"""The bound that log-ratios are clamped to before exp, ±20. exp(20) = 4.9e8 is finite in float32 and far beyond any
ratio that is not a bug; beyond the bound the gradient is zero."""
SEQUENCE_RATIOS = ("geometric", "product")
ESTIMATORS = ("k1", "k2", "k3", "k1_st", "k3_st")


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The difference `numerator - denominator` of two log-probabilities, float32, clamped to ±`LOG_RATIO_BOUND`."""
    return (in_float32(numerator) - in_float32(denominator)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def sequence_log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor, how: str = "geometric") -> Tensor:
    """The log-ratio of whole responses, float32 `[B, 1]`, clamped to ±`LOG_RATIO_BOUND`; 0 for a row without a token.

    `numerator`, `denominator`: log-probabilities `[B, T]`, zero in padding. `mask`: bool `[B, T]`.
    `how`: "product", `Σ_t`, the ratio of the responses' probabilities; "geometric", `Σ_t / length`, the ratio a token,
    which does not drift with the length (2507.18071 eq. 7). The clamp is on the result, so that one token far off
    counts with what it is. Raises `ConfigError` for an unknown `how`.
    """
    one_of("ratio", how, SEQUENCE_RATIOS)
    sum_B1 = (in_float32(numerator) - in_float32(denominator)).sum(dim=-1, keepdim=True)
    if how == "geometric":
        sum_B1 = sum_B1 / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return sum_B1.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: str = "k3") -> Tensor:
    """The estimate, elementwise, float32, of the inputs' shape, exactly 0 where the two agree.

    `logprobs`: of the policy, with gradient; `reference_logprobs`: of the reference, constant. Log-ratios are clamped
    to ±20; beyond that the gradient is zero. Raises `ShapeError`, `ConfigError`.
    """
    one_of("estimator", estimator, ESTIMATORS)
    same_shape(logprobs, "logprobs", reference_logprobs=reference_logprobs)
    r = log_ratio(logprobs, reference_logprobs)
    value = _value(r, estimator.removesuffix("_st"))
    if not estimator.endswith("_st"):
        return value
    k2 = _value(r, "k2")
    return k2 - k2.detach() + value.detach()


def _value(r: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return r
    if estimator == "k2":
        return r.square() / 2
    return torch.expm1(-r) + r  # expm1: exp(-r) - 1 would lose every digit where the two nearly agree


def kl_penalty(
    logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, *, coef: float | Tensor, estimator: str = "k1"
) -> Tensor:
    """The penalty to subtract from the reward of each token, `coef · k(π || π_reference)`: 1909.08593 eq. 2, a token.

    All `[B, T]`; what is under `mask == 0` is ignored, NaN included. Returns `[B, T]` float32 without gradient, 0 in
    padding. `coef`: a number, or one a row `[B]`. k1 by default: summed over a response it is exactly the log-ratio of
    the paper. Raises `ShapeError`, `ConfigError`.
    """
    has_axes("logprobs", logprobs, "BT")
    if isinstance(coef, Tensor):
        same_shape(logprobs[:, 0], "logprobs' rows", kl_coef=coef)
        coef = coef.unsqueeze(-1)
    else:
        non_negative("kl_coef", coef)
    same_shape(logprobs, "logprobs", reference_logprobs=reference_logprobs, mask=mask)
    valid = as_mask(mask)
    return coef * kl_estimate(masked(logprobs, valid).detach(), masked(reference_logprobs, valid).detach(), estimator)


@dataclass(frozen=True)
class AdaptiveKl:
    """A coefficient that follows a target: 1909.08593 section 2.2,

        e = clip(KL / target - 1, -0.2, 0.2),   coef ← coef · (1 + gain · e)

    The paper's gain is 0.1 a step. (Elsewhere it is written as samples of a step / horizon.) A value, not a holder of
    one: each step's state is made from the last, so that it can be checkpointed and replayed. A state of
    `Dataflow.compute`.

    >>> AdaptiveKl(coef=0.1, target=6.0).after(kl=12.0).coef  # e = 0.2: 0.1 · 1.02
    0.10200000000000001
    """

    coef: float
    target: float
    gain: float = 0.1
    kl: float = 0.0
    """The divergence that was seen last, in nats a response."""

    def __post_init__(self) -> None:
        non_negative("kl_coef", self.coef)
        positive("kl_target", self.target)
        non_negative("kl_gain", self.gain)

    def after(self, kl: float) -> "AdaptiveKl":
        """The state for the next step. `kl`: the mean divergence of this step's responses, in nats; finite or not, the
        coefficient moves by at most `0.2 · gain`, and a NaN moves nothing."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return self if math.isnan(kl) else replace(self, coef=self.coef * (1 + self.gain * error), kl=kl)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics `kl_coef`, of the next step, and `response_kl`, of the last one."""
        return {"kl_coef": self.coef, "response_kl": self.kl}
