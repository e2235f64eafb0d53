"""Surrogates whose ratio is of a whole response: its reward is of the whole response, too.

A response's value stands at each of its tokens, so that the aggregations mean what they say: "sequence_mean" gives
every response the same weight, as the papers have it, and "token_mean" weighs it by its length. Rows are
independent, so micro-batches add up exactly. `policy.py` finds them by their names.

Legend: B rows of the micro-batch, T response tokens, padded; see `surrogate.py` for the arguments.
"""

import torch
from torch import Tensor

from penstock.algorithms.kl import LOG_RATIO_BOUND, log_ratio, sequence_log_ratio
from penstock.algorithms.losses.clipped import pessimistic
from penstock.algorithms.losses.surrogate import TokenLosses, surrogate
from penstock.algorithms.named import NonNegative


@surrogate("gspo")
def gspo(
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: NonNegative = 3e-4,
    clip_high: NonNegative = 4e-4,
) -> TokenLosses:
    """GSPO, 2507.18071 eq. 5-7: PPO's clip on `s = (Π_t ρ_t)^(1/length)`, one ratio a response.

        L = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

    The bounds are the paper's (section 5.1), a thousand times tighter than PPO's: a mean of log-ratios moves little.
    Metric: `clip_fraction`, of tokens in clipped responses.
    """
    ratio_B1 = sequence_log_ratio(new, old, mask).exp()
    loss, is_clipped = pessimistic(ratio_B1, advantage, clip_low, clip_high)
    return loss, {"clip_fraction": is_clipped}


@surrogate("gspo_token")
def gspo_token(
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: NonNegative = 3e-4,
    clip_high: NonNegative = 4e-4,
) -> TokenLosses:
    """GSPO-token, 2507.18071 eq. 13-14: as `gspo`, with `s_t = sg(s) π_t / sg(π_t)`, for advantages that differ between
    the tokens of a response.

    The value of every s_t is s; the gradient of a token's loss reaches that token alone. With one advantage a response,
    loss and gradient are those of `gspo`. Metric: `clip_fraction`.
    """
    sequence_B1 = sequence_log_ratio(new, old, mask).detach()
    own = torch.where(sequence_B1.abs() < LOG_RATIO_BOUND, new - new.detach(), 0.0)  # 0, with the token's gradient
    ratio = (sequence_B1 + own).exp()
    loss, is_clipped = pessimistic(ratio, advantage, clip_low, clip_high)
    return loss, {"clip_fraction": is_clipped}


@surrogate("gmpo")
def gmpo(
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: NonNegative = 0.4,
    clip_high: NonNegative = 0.4,
) -> TokenLosses:
    """GMPO, 2507.20673: the geometric mean of the tokens' clipped ratios, where PPO has the arithmetic mean.

        L = -A · exp(mean_t of r_t),   r_t = s · min(s · log ρ_t, s · clip(log ρ_t, -clip_low, clip_high)),   s = sign A

    The clip is on the logarithm: 0.4 is the paper's range (e^-0.4, e^0.4). A is the response's; if the tokens'
    advantages differ, their mean, each token being clipped by the sign of its own. Metric: `clip_fraction`, of tokens
    whose gradient the clip cut.
    """
    tokens_B1 = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    sign, log_rho = advantage.sign(), log_ratio(new, old)
    unclipped, clipped = sign * log_rho, sign * log_rho.clamp(-clip_low, clip_high)
    mean_B1 = (sign * unclipped.minimum(clipped)).sum(dim=-1, keepdim=True) / tokens_B1
    ratio_B1 = mean_B1.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    loss_B1 = -ratio_B1 * advantage.sum(dim=-1, keepdim=True) / tokens_B1
    return loss_B1.expand_as(new), {"clip_fraction": (clipped < unclipped).float()}
