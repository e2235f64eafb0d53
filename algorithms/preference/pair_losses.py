"""Pair losses: learning from pairs of responses, of which one is preferred. Each has another reward r of a response, or
probability of it, whose difference is the margin.

    dpo, ipo        r(x, y) = β · (log π(y | x) - log π_ref(y | x))      the implicit reward, 2305.18290 eq. 5
    simpo           r(x, y) = β / |y| · log π(y | x)                     without a reference, 2405.14734 eq. 4
    orpo            log P(y | x)    = 1 / |y| · log π(y | x)             without a reference, 2403.07691 eq. 3
                    log odds(y | x) = log P - log(1 - P)                 eq. 4
    bradley_terry   P(chosen ≻ rejected) = σ(s_chosen - s_rejected)      of scores s; R. Bradley and M. Terry, 1952

Losses of `flow.train`: the trainer finds their arguments by name (`workers/trainer/update/minibatches.py`) and gives
`group_ids` beside the rest. Each returns this micro-batch's contribution to the mean over the groups of the optimizer
step, exactly the same however the minibatch is cut into whole groups.

Legend: B rows of the micro-batch, T response tokens, padded; P pairs.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.algorithms.aggregation import BatchTotals, in_float32
from penstock.algorithms.checks import has_axes, non_negative, positive, same_shape
from penstock.algorithms.losses import LossAndMetrics
from penstock.algorithms.preference.pairs import (
    Pairs,
    mean_logprobs,
    one_a_row,
    response_mask,
    sequence_logprobs,
    token_log_ratios,
)
from penstock.conf.checks import within
from penstock.conf.errors import ConfigError

LOG_PROBABILITY_BOUND = -1e-6
"""The largest mean log-probability that counts, since odds are infinite at P = 1. It bounds log odds by 13.8 and their
gradient by 1e6; above it the gradient of the odds is zero."""


def dpo_loss(
    logprobs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    preferred: Tensor,
    group_ids: Tensor,
    reference_logprobs: Tensor | None = None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    reference_free: bool = False,
) -> LossAndMetrics:
    """DPO, 2305.18290 eq. 7, a pair: `-(1 - ε) log σ(h) - ε log σ(-h)`, with `ε = label_smoothing`.

    `ε = 0` is DPO. `ε > 0` is conservative DPO (E. Mitchell, 2023, "A note on DPO with noisy preferences"): labels are
    taken to be wrong with probability ε, and the loss is least at `h = log((1 - ε) / ε)` instead of at infinity.
    `reference_free`: the reference is uniform, `r = β log π(y | x)`.

    `logprobs`, `reference_logprobs`, `mask`: `[B, T]`. `preferred`: `[B]`, +1, -1 or 0. `group_ids`: int64 `[B]`.
    Metrics: those of `Pairs.metrics`, with `r` as the reward. Raises `ShapeError`, `ConfigError`.
    """
    positive("algorithm.beta", beta)
    within("algorithm.label_smoothing", label_smoothing, 0.0, 0.5)
    valid = response_mask(logprobs, mask, preferred=preferred, group_ids=group_ids)
    pairs = Pairs.of(preferred, group_ids, totals)
    ratios_BT = _against_reference(logprobs, reference_logprobs, valid, reference_free)
    chosen_P, rejected_P = pairs.split(beta * sequence_logprobs(ratios_BT, valid))
    margin_P = chosen_P - rejected_P
    loss_P = -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)
    loss = pairs.mean(loss_P)
    return loss, pairs.metrics(loss, chosen_P, rejected_P)


def ipo_loss(
    logprobs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    preferred: Tensor,
    group_ids: Tensor,
    reference_logprobs: Tensor | None = None,
    *,
    beta: float = 0.1,
    length_normalize: bool = False,
    reference_free: bool = False,
) -> LossAndMetrics:
    """IPO, 2310.12036 eq. 17, a pair: `(h / β - 1 / (2 β))²`; the paper's τ is β.

    A regression of the log-ratio of the pair on `1 / (2 β)`: unlike DPO's loss it has its minimum there, even where
    every label agrees. `length_normalize`: log-ratios are means over the tokens of a response, not sums, so that the
    target does not depend on the length. `reference_free`: as in `dpo_loss`.

    Arguments and metrics: as in `dpo_loss`. Raises `ShapeError`, `ConfigError`.
    """
    positive("algorithm.beta", beta)
    valid = response_mask(logprobs, mask, preferred=preferred, group_ids=group_ids)
    pairs = Pairs.of(preferred, group_ids, totals)
    ratios_BT = _against_reference(logprobs, reference_logprobs, valid, reference_free)
    over_tokens = mean_logprobs if length_normalize else sequence_logprobs
    chosen_P, rejected_P = pairs.split(over_tokens(ratios_BT, valid))
    loss = pairs.mean((chosen_P - rejected_P - 1 / (2 * beta)).square())
    return loss, pairs.metrics(loss, beta * chosen_P, beta * rejected_P)


def _against_reference(logprobs: Tensor, reference: Tensor | None, valid: Tensor, reference_free: bool) -> Tensor:
    """The log-ratio `log π - log π_ref` a token, `[B, T]`; `log π` where there is to be no reference."""
    if reference_free:
        return logprobs
    if reference is None:
        raise ConfigError(
            "the loss needs reference_logprobs, which nothing writes. "
            "Add flow.logprobs('reference') to the dataflow, or bind reference_free=True."
        )
    same_shape(logprobs, "logprobs", reference_logprobs=reference)
    return token_log_ratios(logprobs, reference, valid)


def simpo_loss(
    logprobs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    preferred: Tensor,
    group_ids: Tensor,
    *,
    beta: float = 2.0,
    target_margin: float = 1.0,
) -> LossAndMetrics:
    """SimPO, 2405.14734 eq. 6, a pair: `-log σ(r(chosen) - r(rejected) - γ)`, with `γ = target_margin`.

    The paper takes β from 2 to 2.5 and γ from 0.3 to 1.6. A response without a token has `r = 0`.

    `logprobs`, `mask`: `[B, T]`. `preferred`: `[B]`, +1, -1 or 0. `group_ids`: int64 `[B]`.
    Metrics: those of `Pairs.metrics`, with `r` as the reward; `margin` and `accuracy` are without γ.
    Raises `ShapeError`, `ConfigError`.
    """
    positive("algorithm.beta", beta)
    non_negative("algorithm.target_margin", target_margin)
    valid = response_mask(logprobs, mask, preferred=preferred, group_ids=group_ids)
    pairs = Pairs.of(preferred, group_ids, totals)
    chosen_P, rejected_P = pairs.split(beta * mean_logprobs(logprobs, valid))
    loss = pairs.mean(-logsigmoid(chosen_P - rejected_P - target_margin))
    return loss, pairs.metrics(loss, chosen_P, rejected_P)


def orpo_loss(
    logprobs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    preferred: Tensor,
    group_ids: Tensor,
    *,
    odds_ratio_coef: float = 0.1,
) -> LossAndMetrics:
    """ORPO, 2403.07691 eq. 6 and 7, a pair: `-log P(chosen) - λ log σ(log odds(chosen) - log odds(rejected))`.

    `λ = odds_ratio_coef`. The first term is the supervised one, a mean over the tokens of each chosen response, so that
    every pair weighs the same. A response without a token has `log P = 0`, which the bound makes a large odds.

    `logprobs`, `mask`: `[B, T]`. `preferred`: `[B]`, +1, -1 or 0. `group_ids`: int64 `[B]`.
    Metrics: those of `Pairs.metrics`, with log odds as the reward; `sft_loss` and `odds_ratio_loss`, the two terms
    without λ. Raises `ShapeError`, `ConfigError`.
    """
    non_negative("algorithm.odds_ratio_coef", odds_ratio_coef)
    valid = response_mask(logprobs, mask, preferred=preferred, group_ids=group_ids)
    pairs = Pairs.of(preferred, group_ids, totals)
    chosen_P, rejected_P = pairs.split(mean_logprobs(logprobs, valid))
    chosen_odds_P, rejected_odds_P = log_odds(chosen_P), log_odds(rejected_P)
    sft = pairs.mean(-chosen_P)
    odds_ratio = pairs.mean(-logsigmoid(chosen_odds_P - rejected_odds_P))
    loss = sft + odds_ratio_coef * odds_ratio
    metrics = pairs.metrics(loss, chosen_odds_P, rejected_odds_P)
    return loss, metrics | {"sft_loss": sft.detach(), "odds_ratio_loss": odds_ratio.detach()}


def log_odds(log_probability: Tensor) -> Tensor:
    """The log-odds `log(P / (1 - P))` of `log P`, elementwise, at most 13.8 (`LOG_PROBABILITY_BOUND`)."""
    bounded = log_probability.clamp(max=LOG_PROBABILITY_BOUND)
    return bounded - torch.log(-torch.expm1(bounded))  # 1 - exp(log P) would lose every digit near P = 1


def bradley_terry_loss(
    scores: Tensor,
    totals: BatchTotals,
    preferred: Tensor,
    group_ids: Tensor,
    margin: Tensor | None = None,
    *,
    centering_coef: float = 0.0,
) -> LossAndMetrics:
    """The negative log-likelihood of the preferences (2203.02155 eq. 1), a pair:

        -log σ(s_chosen - s_rejected - m) + η (s_chosen + s_rejected)²

    For a model with a scalar head: the trainer gives `scores`, with gradient, where other losses take `logprobs`.
    `m`: column `margin` of the chosen row, how much better it is at least (2307.09288 eq. 2); 0 without the column.
    `η = centering_coef` keeps scores around 0, which the likelihood leaves free (2312.09244 eq. 2).

    `scores`: `[B]`, with gradient. `preferred`: `[B]`, +1, -1 or 0; what scores and margins rows with 0 have does not
    matter. `group_ids`: int64 `[B]`. `margin`: `[B]`.
    Metrics: those of `Pairs.metrics`, with `s` as the reward; `margin` and `accuracy` are without `m`.
    Raises `ShapeError`, `ConfigError`.
    """
    non_negative("algorithm.centering_coef", centering_coef)
    has_axes("scores", scores, "B")
    one_a_row(len(scores), preferred=preferred, group_ids=group_ids)
    pairs = Pairs.of(preferred, group_ids, totals)
    chosen_P, rejected_P = pairs.split(in_float32(scores))
    loss_P = -logsigmoid(chosen_P - rejected_P - _margin(margin, scores, pairs))
    if centering_coef:
        loss_P = loss_P + centering_coef * (chosen_P + rejected_P).square()
    loss = pairs.mean(loss_P)
    return loss, pairs.metrics(loss, chosen_P, rejected_P)


def _margin(margin: Tensor | None, scores: Tensor, pairs: Pairs) -> Tensor:
    """The margin `m` of each pair, `[P]` or `[]`, without gradient."""
    if margin is None:
        return torch.zeros((), device=scores.device)
    one_a_row(len(scores), margin=margin)
    return in_float32(margin.detach())[pairs.chosen_P]
