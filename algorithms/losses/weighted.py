"""Surrogates `-w · A · log π` with a constant weight w: the gradient is that of REINFORCE, scaled or cut a token.

Their *value* is a log-likelihood and says little; their gradient is the point. `policy.py` finds them by their names.

Legend: B rows of the micro-batch, T response tokens, padded; see `surrogate.py` for the arguments.
"""

import torch
from torch import Tensor

from penstock.algorithms.kl import log_ratio
from penstock.algorithms.losses.surrogate import TokenLosses, surrogate
from penstock.algorithms.named import NonNegative, Positive


@surrogate("reinforce")
@surrogate("gpg")
def reinforce(new: Tensor, old: Tensor, advantage: Tensor, mask: Tensor) -> TokenLosses:
    """REINFORCE, `L = -A log π` (Williams 1992). No ratio and no bound: for samples of the policy itself.

    GPG (2504.02546) has this loss too, under the name "gpg"; what is its own is its advantage,
    `advantages.gpg`. No metrics.
    """
    return -advantage * new, {}


@surrogate("cispo")
def cispo(
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: NonNegative = 1.0,
    clip_high: NonNegative = 4.0,
) -> TokenLosses:
    """CISPO, 2506.13585: `L = -sg(clip(ρ, 1 - clip_low, 1 + clip_high)) A log π`.

    The weight is clipped, not the update: every token keeps a gradient, also the rare ones that PPO's clip would cut
    first. The paper sets no lower bound (clip_low=1: the ratio is at least 0 anyway) and tunes the upper one without
    giving it; 1 + 4 is the 5 of ScaleRL (2510.13786). Metric: `clip_fraction`, of tokens with a clipped weight.
    """
    ratio = log_ratio(new, old).detach().exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantage * new, {"clip_fraction": torch.ne(weight, ratio).float()}


@surrogate("dppo_tv")
def dppo_tv(
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    cap: Positive = 20.0,
) -> TokenLosses:
    """DPPO with the binary total variation, 2602.04879: a token's gradient is cut where its *probability* has moved
    too far the way its advantage pushes it.

        L = -M sg(min(ρ, cap)) A log π,   M = 0 if A > 0 and π - π_old > clip_high, or A < 0 and π_old - π > clip_low

    A ratio says little of a rare token: 1e-5 becoming 1e-4 is a ratio of 10 and moves nothing. |π - π_old| is the total
    variation of "this token or another", a lower bound of that of the whole distributions. The paper anchors the region
    at the policy that sampled: that is `correction="none"` of the driver. `cap` truncates the weight (its section 5.4).
    Metric: `clip_fraction`, of tokens whose gradient the bound cut.
    """
    weight = log_ratio(new, old).detach().exp().clamp(max=cap)
    moved = new.detach().exp() - old.exp()
    cut = ((advantage > 0) & (moved > clip_high)) | ((advantage < 0) & (moved < -clip_low))
    return torch.where(cut, 0.0, -weight * advantage * new), {"clip_fraction": cut.float()}
