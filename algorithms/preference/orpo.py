"""ORPO: supervised training on the chosen responses with a penalty on the odds of the rejected ones, no reference.

    log P(y | x)    = 1 / |y| · log π(y | x)                 2403.07691 eq. 3
    log odds(y | x) = log P - log(1 - P)                     eq. 4

A loss of `flow.train`; see `dpo.py` for how it is called and what it returns.

Legend: B rows of the micro-batch, T response tokens, padded; P pairs.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.checks import non_negative
from penstock.algorithms.losses import LossAndMetrics
from penstock.algorithms.preference.pairs import Pairs, mean_logprobs, response_mask

LOG_PROBABILITY_BOUND = -1e-6
"""The largest mean log-probability that counts, since odds are infinite at P = 1. It bounds log odds by 13.8 and their
gradient by 1e6; above it the gradient of the odds is zero."""


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
