"""The policy's losses: one driver for every formula, `w · surrogate + kl_coef · KL`, aggregated, with a bonus for
entropy; the likelihood of demonstrations; and the loss of a critic. The trainer calls them: see `losses/__init__.py`.

    mask ─▶ anchor (old, behavior or proximal log-probabilities) ─▶ correction: weights w ─┐
                     └──────────────▶ surrogate: a loss a token ───────────────────────────┴─▶ mean ─▶ + KL term

The driver checks shapes and settings, masks, and sums; the formulas are in `surrogates.py`, or in a user's own file.

The anchor is the proximal policy, the centre of the trust region, which the ratio is taken against. Decoupled PPO
(2505.24298) has three policies: `π_behavior` sampled, `π_proximal` is where the trust region lies, `π` is trained. The
clipped ratio is `π / π_proximal`, and `π_proximal / π_behavior` becomes the weight of the correction. Any surrogate is
decoupled in this way; `proximal` says what stands for π_proximal:

    old            the trainer's own log-probabilities at the start of the batch. Costs a forward pass.
    column         the column `proximal_logprobs`, from a user's own stage.
    interpolated   between the behavior's and the current ones, by the column `staleness`. Costs nothing.

With "old" and the correction "none" there is one ratio, against the behavior policy.

The trainer computes what a loss asks for by the names of its parameters, and the entropy of every token costs time and
memory: only a loss that names `entropy` gets it. `with_entropy_bonus` adds that name:

    flow.train("policy", loss=with_entropy_bonus(partial(policy_loss, surrogate="gspo"), coef=0.001))

Legend: B rows of the micro-batch, T response tokens, padded: what lies under `mask == 0` may be anything, NaN included.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.algorithms.aggregation import BatchTotals, aggregate, in_float32, masked, per_token
from penstock.algorithms.checks import checked_mask, describe, non_negative, positive, same_shape
from penstock.algorithms.corrections import CORRECTIONS, Correction, none
from penstock.algorithms.graph.loss import wrap_loss
from penstock.algorithms.graph.stage import name_of
from penstock.algorithms.kl import kl_estimate
from penstock.algorithms.losses.surrogates import SURROGATES, Surrogate
from penstock.algorithms.registry import NO_OPTIONS, Options, checked_options
from penstock.conf.algorithms import AGGREGATIONS
from penstock.conf.algorithms import CORRECTIONS as PRESET_CORRECTIONS
from penstock.conf.checks import one_of
from penstock.conf.errors import ConfigError, ShapeError

LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
PROXIMALS = ("old", "column", "interpolated")


def policy_loss(
    logprobs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    advantage: Tensor,
    behavior_logprobs: Tensor,
    old_logprobs: Tensor,
    reference_logprobs: Tensor | None = None,
    proximal_logprobs: Tensor | None = None,
    staleness: Tensor | None = None,
    *,
    surrogate: str | Surrogate = "ppo_clip",
    surrogate_options: Options = NO_OPTIONS,
    correction: str | Correction = "truncated",
    correction_options: Options = NO_OPTIONS,
    proximal: str = "old",
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    aggregation: str = "token_mean",
    constant: float = 1.0,
) -> LossAndMetrics:
    """Any surrogate, with any correction, and a KL term: `L = w · surrogate(π, π_anchor, A) + kl_coef · k(π || π_ref)`.

    `surrogate`, `correction`: a registered name, or the function itself. `proximal`: the anchor of the ratio, see
    above; with "old" it is `old_logprobs`, and `behavior_logprobs` where the correction is "none".
    `aggregation`, `constant`: see `aggregate`; they apply to the surrogate and the KL term, metrics are token means.

    `logprobs`, `old_logprobs`, `behavior_logprobs`, `reference_logprobs`, `proximal_logprobs`, `mask`: `[B, T]`.
    `advantage`, `staleness`: `[B]` or `[B, T]`. Only `logprobs` gets a gradient.
    Metrics: `pg_loss`, `kl` (with a reference), and those of the surrogate and the correction. Raises `ShapeError`,
    `ConfigError`.
    """
    non_negative("algorithm.kl_coef", kl_coef)
    one_of("algorithm.proximal", proximal, PROXIMALS)
    formula, weigh = SURROGATES.find(surrogate), CORRECTIONS.find(correction)
    formula_options = checked_options(formula, surrogate_options, "algorithm.surrogate_options")
    weigh_options = checked_options(weigh, correction_options, "algorithm.correction_options")
    valid = checked_mask("logprobs", logprobs, mask, behavior_logprobs=behavior_logprobs, old_logprobs=old_logprobs)
    new, behavior = masked(logprobs, valid), masked(behavior_logprobs, valid).detach()
    if proximal == "old":
        anchor = behavior if weigh is none else masked(old_logprobs, valid).detach()
    else:
        anchor = proximal_anchor(proximal, new, behavior, valid, proximal_logprobs, staleness)

    values_BT, metrics_BT = formula(new, anchor, per_token(advantage, valid), valid, **formula_options)
    weight_BT, correction_metrics_BT = weigh(anchor, behavior, valid, **weigh_options)
    mean = partial(aggregate, mask_BT=valid, totals=totals, how=aggregation, constant=constant)
    token_mean = partial(aggregate, mask_BT=valid, totals=totals, how="token_mean")
    pg_loss = mean(weight_BT * values_BT)
    metrics = {name: token_mean(value).detach() for name, value in (metrics_BT | correction_metrics_BT).items()}
    metrics["pg_loss"] = pg_loss.detach()
    if reference_logprobs is None:
        _check_no_kl(kl_coef)
        return pg_loss, metrics
    same_shape(logprobs, "logprobs", reference_logprobs=reference_logprobs)
    kl_BT = kl_estimate(new, masked(reference_logprobs, valid).detach(), kl_estimator)
    metrics["kl"] = token_mean(kl_BT).detach()
    return pg_loss + kl_coef * mean(kl_BT) if kl_coef else pg_loss, metrics


def interpolated_policy_loss(
    logprobs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    advantage: Tensor,
    behavior_logprobs: Tensor,
    staleness: Tensor,
    reference_logprobs: Tensor | None = None,
    **settings: Any,
) -> LossAndMetrics:
    """Compute `policy_loss` with `proximal="interpolated"`. It does not ask for `old_logprobs`, so that the trainer is
    spared the forward pass for them when a batch has several optimizer steps. `settings`, shapes, metrics: as there."""
    return policy_loss(
        logprobs,
        mask,
        totals,
        advantage,
        behavior_logprobs,
        logprobs,
        reference_logprobs,
        staleness=staleness,
        proximal="interpolated",
        **settings,
    )


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

    A preset of `policy_loss`, its settings flat. `correction="truncated"`: `ρ = π / π_old` and
    `w = min(π_old / π_behavior, correction_cap)`, a constant: clipping bounds how far this batch moves the policy, `w`
    makes up for the engine (2505.24298). `correction="none"`: `ρ = π / π_behavior`, `w = 1`.

    Shapes as of `policy_loss`. Metrics: `pg_loss`, `clip_fraction` (tokens whose gradient the clip cut), `kl` (with a
    reference; token mean), `correction_weight_mean` and `correction_capped_fraction` (with a correction). Raises
    `ShapeError`, `ConfigError`.
    """
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high), ("correction_cap", correction_cap)):
        non_negative(f"algorithm.{name}", value)
    one_of("algorithm.correction", correction, PRESET_CORRECTIONS)
    return policy_loss(
        logprobs,
        mask,
        totals,
        advantage,
        behavior_logprobs,
        old_logprobs,
        reference_logprobs,
        surrogate_options={"clip_low": clip_low, "clip_high": clip_high},
        correction=correction,
        correction_options={"cap": correction_cap} if correction == "truncated" else NO_OPTIONS,
        kl_coef=kl_coef,
        aggregation=aggregation,
    )


def _check_no_kl(kl_coef: float) -> None:
    if kl_coef:
        raise ConfigError(
            f"algorithm.kl_coef={kl_coef} needs reference_logprobs, which nothing writes. "
            "Add flow.logprobs('reference') to the dataflow, or set algorithm.kl_coef=0."
        )


def proximal_anchor(
    proximal: str,
    new: Tensor,
    behavior: Tensor,
    mask: Tensor,
    proximal_logprobs: Tensor | None,
    staleness: Tensor | None,
) -> Tensor:
    """The log-probabilities `[B, T]` that "column" or "interpolated" name, float32 without gradient, zero in padding.

    `new`, `behavior`: zero in padding already. Raises `ConfigError` for a column that nothing writes, `ShapeError`.
    """
    if proximal == "column":
        column = _require_column("proximal_logprobs", proximal_logprobs, proximal)
        same_shape(new, "logprobs", proximal_logprobs=column)
        return masked(column, mask).detach()
    return interpolated_logprobs(new, behavior, _require_column("staleness", staleness, proximal))


def interpolated_logprobs(new: Tensor, behavior: Tensor, staleness: Tensor) -> Tensor:
    """A proximal policy that needs no forward pass: 2512.06547, log-linear between the policies that are known.

        log π_proximal = log π + (log π_behavior - log π) / d,   d = staleness;   log π where d = 0

    A token that is d updates old lies d steps behind π, the proximal policy one. One update old: the behavior policy
    itself. `new`, `behavior`: `[B, T]`. `staleness`: of the row `[B]` or the token `[B, T]`, at least 0. Returns
    `[B, T]` float32 without gradient. Raises `ShapeError`.
    """
    if staleness.shape not in (new.shape, new.shape[:1]):
        expected = f"{list(new.shape[:1])} (a row) or {list(new.shape)} (a token)"
        raise ShapeError(f"staleness is {describe(staleness)}; expected {expected}.")
    d = in_float32(staleness).nan_to_num().view(*staleness.shape, *[1] * (new.dim() - staleness.dim()))
    share = torch.where(d >= 1, 1 / d.clamp(min=1), 0.0)
    return new.detach() + share * (behavior - new.detach())


def _require_column(name: str, column: Tensor | None, proximal: str) -> Tensor:
    if column is None:
        raise ConfigError(
            f"algorithm.proximal={proximal} needs {name}, which nothing writes. "
            "Let a stage before flow.train write it, or set algorithm.proximal=old."
        )
    return column


def sft_loss(logprobs: Tensor, mask: Tensor, totals: BatchTotals, *, aggregation: str = "token_mean") -> LossAndMetrics:
    """Negative log-likelihood of the demonstrations: `-mean log π(y_t | x, y_<t)`. Metric: `loss`.

    `logprobs`, `mask`: `[B, T]`. Raises `ShapeError`, `ConfigError`.
    """
    valid = checked_mask("logprobs", logprobs, mask)
    loss = aggregate(-logprobs, valid, totals, aggregation)
    return loss, {"loss": loss.detach()}


@dataclass(frozen=True)
class EntropyBonus:
    """A loss that has one more parameter, `entropy` `[B, T]` with gradient, and the metric `entropy`, its token mean.

    It takes everything by keyword, as the trainer gives it. Pickles wherever the loss does.
    """

    loss: Callable[..., LossAndMetrics]
    coef: float
    aggregation: str = "token_mean"
    constant: float = 1.0

    def __post_init__(self) -> None:
        non_negative("algorithm.entropy_coef", self.coef)
        one_of("algorithm.aggregation", self.aggregation, AGGREGATIONS)
        positive("constant", self.constant)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.loss)
        if "entropy" in signature.parameters:
            return signature
        entropy = inspect.Parameter("entropy", inspect.Parameter.KEYWORD_ONLY)
        parameters = list(signature.parameters.values())
        ends_open = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        parameters.insert(len(parameters) - ends_open, entropy)
        return signature.replace(parameters=parameters)

    @property
    def __name__(self) -> str:
        return name_of(self.loss, "loss")

    def __call__(self, *, entropy: Any, mask: Any, totals: Any, **arguments: Any) -> LossAndMetrics:
        if "entropy" in inspect.signature(self.loss).parameters:
            arguments["entropy"] = entropy
        loss, metrics = self.loss(mask=mask, totals=totals, **arguments)
        bonus = aggregate(entropy, mask, totals, self.aggregation, constant=self.constant)
        mean = aggregate(entropy.detach(), mask, totals, "token_mean")
        return loss - self.coef * bonus, metrics | {"entropy": mean}


def with_entropy_bonus(
    loss: Callable[..., LossAndMetrics], coef: float, *, aggregation: str = "token_mean", constant: float = 1.0
) -> EntropyBonus:
    """Make the loss `loss - coef · mean(entropy)`, for the trainer to call like any loss. `aggregation`, `constant`:
    see `aggregate`; give those of the loss. Raises `ConfigError`."""
    return EntropyBonus(wrap_loss(loss, aggregation), coef, aggregation, constant)


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
    valid = checked_mask("values", values, mask, returns=returns, old_values=old_values)
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
