"""SimPO: preferences without a reference, by the mean log-probability of a token.

    r(x, y) = β / |y| · log π(y | x)                         2405.14734 eq. 4

A loss of `flow.train`; see `dpo.py` for how it is called and what it returns.

Legend: B rows of the micro-batch, T response tokens, padded; P pairs.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.checks import non_negative, positive
from penstock.algorithms.losses import LossAndMetrics
from penstock.algorithms.preference.pairs import Pairs, mean_logprobs, response_mask


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
