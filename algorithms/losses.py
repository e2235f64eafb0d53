"""Losses of the policy. Pure functions of one micro-batch, differentiable in `logprobs`, and in nothing else.

The trainer calls a loss once a micro-batch and finds its arguments by their names (`Dataflow.train`):

    loss, metrics = loss_fn(logprobs=…, mask=…, totals=…, advantage=…, behavior_logprobs=…)

`logprobs` (with gradient), `old_logprobs` (the same at the start of the batch, without), `entropy`, `mask` and `totals`
come from the trainer; every other parameter without a default, or with default None, is a column: `[B, T]` for token
columns, `[B]` for sample columns, None when it has the default None and no stage writes it. Settings are keywords with
a default and are bound by `functools.partial`. Returned are this micro-batch's *contribution* to the batch's loss and
to each metric (float32 `[]`, detached): the trainer adds them up and divides by nothing.

Legend: B rows of the micro-batch, T response tokens, padded: what lies under `mask == 0` may be anything, NaN included.
"""

from functools import partial

import torch
from torch import Tensor

from penstock.algorithms.aggregation import BatchTotals, aggregate, in_float32, masked
from penstock.algorithms.checks import as_mask, describe, has_axes, known, non_negative, same_shape
from penstock.algorithms.corrections import correction_metrics, truncated_importance_weight
from penstock.algorithms.kl import kl_estimate, log_ratio
from penstock.conf.algorithm import CORRECTIONS
from penstock.conf.errors import ConfigError, ShapeError

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]


def sft_loss(logprobs: Tensor, mask: Tensor, totals: BatchTotals, *, aggregation: str = "token_mean") -> LossAndMetrics:
    """Negative log-likelihood of the demonstrations: `-mean log π(y_t | x, y_<t)`. Metric: `loss`.

    `logprobs`, `mask`: `[B, T]`. Raises `ShapeError`, `ConfigError`.
    """
    has_axes("logprobs", logprobs, "BT")
    same_shape(logprobs, "logprobs", mask=mask)
    loss = aggregate(-logprobs, mask, totals, aggregation)
    return loss, {"loss": loss.detach()}


def ppo_clip_loss(
    logprobs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    advantage: Tensor,
    behavior_logprobs: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    aggregation: str = "token_mean",
    correction: str = "truncated",
    correction_cap: float = 2.0,
) -> LossAndMetrics:
    """PPO's clipped surrogate (1707.06347 eq. 7) with GRPO's KL term (2402.03300 eq. 3), a token:

        L = -w · min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A) + kl_coef · k3(π || π_reference)

    `correction="truncated"`: `ρ = π / π_old` and `w = min(π_old / π_behavior, correction_cap)`, a constant: clipping
    bounds how far this batch moves the policy, `w` makes up for the engine (2505.24298). `correction="none"`:
    `ρ = π / π_behavior`, `w = 1`. Log-ratios are clamped to ±20 before exp. The gradient is zero where `ρ A` is the
    larger of the two: A > 0 with ρ > 1 + clip_high, A < 0 with ρ < 1 - clip_low.

    `logprobs`, `old_logprobs`, `behavior_logprobs`, `reference_logprobs`, `mask`: `[B, T]`.
    `advantage`: `[B]` or `[B, T]`.
    Metrics: `pg_loss`, `clip_fraction` (tokens whose gradient the clip cut), `kl` (with a reference; token mean),
    `correction_weight_mean` and `correction_capped_fraction` (with a correction). Raises `ShapeError`, `ConfigError`.
    """
    _check_settings(clip_low, clip_high, kl_coef, correction)
    has_axes("logprobs", logprobs, "BT")
    same_shape(logprobs, "logprobs", mask=mask, behavior_logprobs=behavior_logprobs, old_logprobs=old_logprobs)
    valid = as_mask(mask)
    mean = partial(aggregate, mask_BT=valid, totals=totals, how=aggregation)
    token_mean = partial(aggregate, mask_BT=valid, totals=totals, how="token_mean")
    new, behavior = masked(logprobs, valid), masked(behavior_logprobs, valid).detach()
    old = masked(old_logprobs, valid).detach() if correction == "truncated" else behavior

    clipped, is_clipped = _clipped_surrogate(new, old, per_token(advantage, valid), clip_low, clip_high)
    metrics = {"clip_fraction": token_mean(is_clipped)}
    if correction == "truncated":
        weight = truncated_importance_weight(old, behavior, correction_cap)
        clipped = weight * clipped
        metrics |= correction_metrics(weight, correction_cap, token_mean)
    pg_loss = loss = mean(clipped)
    metrics["pg_loss"] = pg_loss.detach()

    if reference_logprobs is not None:
        same_shape(logprobs, "logprobs", reference_logprobs=reference_logprobs)
        kl_BT = kl_estimate(new, masked(reference_logprobs, valid).detach(), "k3")
        loss = pg_loss + kl_coef * mean(kl_BT) if kl_coef else pg_loss
        metrics["kl"] = token_mean(kl_BT).detach()
    elif kl_coef:
        raise ConfigError(
            f"algorithm.kl_coef={kl_coef} needs reference_logprobs, which nothing writes. "
            "Add flow.logprobs('reference') to the dataflow, or set algorithm.kl_coef=0."
        )
    return loss, metrics


def _clipped_surrogate(
    new: Tensor, old: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """`-min(ρ A, clip(ρ) A)` a token, and 1.0 where the clipped term is the one that counts."""
    ratio = log_ratio(new, old).exp()
    unclipped = -ratio * advantage
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    return torch.maximum(unclipped, clipped), (clipped > unclipped).float()


def per_token(advantage: Tensor, mask: Tensor) -> Tensor:
    """Advantages `[B]` or `[B, T]` as `[B, T]` float32 without gradient, 0 in padding. Raises `ShapeError`."""
    if advantage.shape == mask.shape[:1]:
        return torch.where(mask, in_float32(advantage.detach()).unsqueeze(-1), 0.0)
    if advantage.shape == mask.shape:
        return masked(advantage.detach(), mask)
    raise ShapeError(
        f"advantage is {describe(advantage)}; expected {list(mask.shape[:1])} (a row) or {list(mask.shape)} (a token)."
    )


def _check_settings(clip_low: float, clip_high: float, kl_coef: float, correction: str) -> None:
    non_negative("algorithm.clip_low", clip_low)
    non_negative("algorithm.clip_high", clip_high)
    non_negative("algorithm.kl_coef", kl_coef)
    known("algorithm.correction", correction, CORRECTIONS)
