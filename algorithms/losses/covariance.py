"""Surrogates that keep entropy up by treating the few tokens differently that bring it down: 2505.22617.

An update lowers the policy's entropy by the covariance of log-probability and advantage, and a tiny share of
the tokens carries most of it. With the token's own term `c = (log π - mean log π)(A - mean A)`, Clip-Cov drops
a few tokens with a large c from the gradient, KL-Cov pulls them back to where they were.

**These two are not exact under micro-batching.** Means and shares are of the call, one micro-batch of one rank, since a
surrogate sees nothing else: small micro-batches mean noisier choices, and at least one token is chosen in each. Every
other surrogate treats rows independently. `policy.py` finds them by their names.

Legend: B rows of the micro-batch, T response tokens, padded; see `surrogates.py` for the arguments.
"""

import torch
from torch import Tensor

from penstock.algorithms.kl import log_ratio
from penstock.algorithms.losses.surrogates import TokenLosses, pessimistic, surrogate
from penstock.algorithms.named import NonNegative
from penstock.conf.errors import ConfigError


@surrogate("clip_cov")
def clip_cov(
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    share: NonNegative = 2e-4,
    lowest: float = 1.0,
    highest: float = 5.0,
) -> TokenLosses:
    """Clip-Cov, 2505.22617: PPO's loss, without the tokens chosen at random from those with
    `lowest < c < highest` that PPO has not clipped already; `share` of all tokens, at least one.

    The draw is a fixed function of the tokens' old log-probabilities (`pseudo_random`): no state, the same after a
    resume, and in whatever order the rows come. Metrics: `clip_fraction` (PPO's), `cov_fraction` (of tokens dropped).
    """
    if lowest > highest:
        raise ConfigError(f"clip_cov: lowest={lowest} is above highest={highest}, so that no token would be chosen.")
    ratio = log_ratio(new, old).exp()
    loss, is_clipped = pessimistic(ratio, advantage, clip_low, clip_high)
    cov = token_covariance(new, advantage, mask)
    candidates = mask & (cov > lowest) & (cov < highest) & (is_clipped == 0)
    dropped = _largest(torch.where(candidates, pseudo_random(old), -1.0), _number(mask, share)) & candidates
    return torch.where(dropped, 0.0, loss), {"clip_fraction": is_clipped, "cov_fraction": dropped.float()}


@surrogate("kl_cov")
def kl_cov(
    new: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, *, share: NonNegative = 2e-4, coef: NonNegative = 1.0
) -> TokenLosses:
    """KL-Cov, 2505.22617: `L = -ρ A`, and `+ coef · |log ρ|` for the `share` of all tokens with the largest c,
    at least one.

    The paper writes the pull as KL(π_old || π) of the token; its authors' code has the absolute log-ratio, and so has
    this. Metric: `cov_fraction`, of tokens that are pulled.
    """
    log_rho = log_ratio(new, old)
    cov = token_covariance(new, advantage, mask)
    pulled = _largest(torch.where(mask, cov, -torch.inf), _number(mask, share)) & mask
    loss = -log_rho.exp() * advantage
    return loss + torch.where(pulled, coef * log_rho.abs(), 0.0), {"cov_fraction": pulled.float()}


def token_covariance(new: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """The covariance `(log π - mean log π)(A - mean A)` a token, `[B, T]`, without gradient; the means are over the
    mask's tokens, and both factors are zero in padding."""
    count = mask.sum().clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        return torch.where(mask, values - torch.where(mask, values, 0.0).sum() / count, 0.0)

    return centred(new.detach()) * centred(advantage)


def _number(mask: Tensor, share: float) -> int:
    """Number of tokens that `share` is: at least one if there are any. A share of 0 turns the surrogate's own part
    off."""
    tokens = int(mask.sum())
    return min(tokens, max(1, int(tokens * share))) if share else 0


def _largest(score: Tensor, number: int) -> Tensor:
    """True for the `number` largest of all scores `[B, T]`."""
    chosen = torch.zeros(score.numel(), dtype=torch.bool, device=score.device)
    chosen[score.flatten().topk(number).indices] = True
    return chosen.view_as(score)


def pseudo_random(logprobs: Tensor) -> Tensor:
    """A number in [0, 1) a token, spread evenly and unrelated to how large the log-probability is: the digits of its
    sine from the fourth on."""
    return (logprobs.double() * 12.9898).sin().mul(43758.5453).frac().abs().to(logprobs.dtype)
