"""Corrections of the difference between the policy that sampled and the one that is trained: importance weights.

The engine's log-probabilities (other kernels, other precision, perhaps weights a few updates old) differ from the
trainer's. A correction turns their ratio into a constant weight a token, and the weight multiplies the policy term of
the loss (2505.24298 separates the two ratios in this way). `losses/policy.py` applies it; a user's own is

    @correction("mine")
    def mine(old_BT, behavior_BT, mask_BT, *, cap: Positive = 2.0):
        ...
        return weight_BT, {"correction_my_metric": value_BT}

with `old`: the trainer's log-probabilities before the update (or what stands for them, see `losses/policy.py`),
`behavior`: the engine's, both `[B, T]`, float32, zero in padding and without gradient. Weights are float32 without
gradient; 0 masks a token out, and the normaliser does not notice: a masked token adds 0 to the sum and stays in the
count. Bounds are always bounds on **π_trainer / π_behavior**. Each metric is averaged over the batch's tokens.

Legend: B rows of the micro-batch, T response tokens, padded.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.algorithms.checks import non_negative, same_shape
from penstock.algorithms.kl import log_ratio, sequence_log_ratio
from penstock.algorithms.registry import FormulaRegistry, NonNegative
from penstock.conf.errors import ConfigError

TokenWeights = tuple[Tensor, dict[str, Tensor]]
"""Weights `[B, T]` and token values of metrics, `[B, T]` each."""
Correction = Callable[..., TokenWeights]

CORRECTIONS = FormulaRegistry("algorithm.correction")
correction = CORRECTIONS.register


def truncated_importance_weight(trainer_logprobs: Tensor, behavior_logprobs: Tensor, cap: float) -> Tensor:
    """The weight `min(π_trainer / π_behavior, cap)` a token: float32, detached, within [exp(-20), cap].

    `trainer_logprobs`: the trainer's own, at the start of the batch. `behavior_logprobs`: the engine's, when it
    sampled. Both of the same shape, natural logarithm. Raises `ShapeError`, `ConfigError`.
    """
    non_negative("correction_cap", cap)
    same_shape(trainer_logprobs, "old_logprobs", behavior_logprobs=behavior_logprobs)
    return log_ratio(trainer_logprobs, behavior_logprobs).detach().exp().clamp(max=cap)


@correction("none")
def none(old: Tensor, behavior: Tensor, mask: Tensor) -> TokenWeights:
    """Weight 1, no metrics. The loss then takes its ratio against the engine's log-probabilities."""
    return torch.ones_like(old), {}


@correction("truncated")
def truncated(old: Tensor, behavior: Tensor, mask: Tensor, *, cap: NonNegative = 2.0) -> TokenWeights:
    """Truncated importance sampling (Ionides 2008), each token on its own: `w = min(π_old / π_behavior, cap)`.

    Metrics: `correction_weight_mean`, `correction_capped_fraction`.
    """
    return _capped(truncated_importance_weight(old, behavior, cap), cap)


@correction("sequence_truncated")
def sequence_truncated(
    old: Tensor, behavior: Tensor, mask: Tensor, *, cap: NonNegative = 2.0, ratio: str = "product"
) -> TokenWeights:
    """Truncated importance sampling of whole responses: every token weighs `w = min(Π_t π_old / Π_t π_behavior, cap)`.

    `ratio="product"` is the exact ratio of the responses and unbiased but for the cap; its variance grows with the
    length. `ratio="geometric"` takes the mean a token, which is biased and does not. Metrics as of "truncated".
    """
    weight_B1 = sequence_log_ratio(old, behavior, mask, ratio).detach().exp().clamp(max=cap)
    return _capped(weight_B1.expand_as(old), cap)


@correction("masked")
def masked(
    old: Tensor, behavior: Tensor, mask: Tensor, *, low: NonNegative = 0.5, high: NonNegative = 5.0
) -> TokenWeights:
    """Two-sided masking of tokens: `w = k` where `low ≤ k ≤ high`, else 0, with `k = π_old / π_behavior`.

    2510.18855 (IcePop), with its bounds: a token on which engine and trainer disagree badly teaches nothing, instead
    of teaching at the cap. Metrics: `correction_weight_mean`, `correction_masked_fraction`.
    """
    ratio_BT = log_ratio(old, behavior).detach().exp()
    kept_BT = _within(ratio_BT, low, high, "masked")
    return _kept(torch.where(kept_BT, ratio_BT, 0.0), kept_BT)


@correction("rejection")
def rejection(
    old: Tensor, behavior: Tensor, mask: Tensor, *, low: NonNegative = 0.5, high: NonNegative = 2.0
) -> TokenWeights:
    """Whole responses are kept (`w = 1`) or masked out (`w = 0`), by the geometric mean of their tokens' ratios: kept
    if `low ≤ (Π_t π_old / π_behavior)^(1/length) ≤ high`.

    What is kept is not reweighted. Metrics: `correction_weight_mean`, `correction_masked_fraction`.
    """
    ratio_B1 = sequence_log_ratio(old, behavior, mask).detach().exp()
    kept_BT = _within(ratio_B1, low, high, "rejection").expand_as(old)
    return _kept(kept_BT.to(old.dtype), kept_BT)


def _capped(weight_BT: Tensor, cap: float) -> TokenWeights:
    capped_BT = torch.eq(weight_BT, cap).float()
    return weight_BT, {"correction_weight_mean": weight_BT, "correction_capped_fraction": capped_BT}


def _kept(weight_BT: Tensor, kept_BT: Tensor) -> TokenWeights:
    return weight_BT, {"correction_weight_mean": weight_BT, "correction_masked_fraction": (~kept_BT).float()}


def _within(ratio: Tensor, low: float, high: float, name: str) -> Tensor:
    if low > high:
        raise ConfigError(f"correction {name}: low={low} is above high={high}, so that nothing would be kept.")
    return (ratio >= low) & (ratio <= high)
