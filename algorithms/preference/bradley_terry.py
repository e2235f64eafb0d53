"""Training a reward model on pairs: the probability that one response is better grows with the difference in score.

    P(chosen ≻ rejected) = σ(s_chosen - s_rejected)          R. Bradley and M. Terry, 1952

A loss of `flow.train` on a model with a scalar head: the trainer gives `scores`, with gradient, where other losses take
`logprobs`. See `dpo.py` for how it is called and what it returns.

Legend: B rows of the micro-batch; P pairs.
"""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.algorithms.aggregation import BatchTotals, in_float32
from penstock.algorithms.checks import has_axes, non_negative
from penstock.algorithms.losses import LossAndMetrics
from penstock.algorithms.preference.pairs import Pairs, one_a_row


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
