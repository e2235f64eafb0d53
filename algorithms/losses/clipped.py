"""Surrogates that bound how far one batch may move the probability of a token: PPO's hard clip and SAPO's soft gate.

Both are functions of the ratio `ρ = π / π_old` of each token. `policy.py` finds them by their names.

Legend: B rows of the micro-batch, T response tokens, padded; see `surrogate.py` for the arguments.
"""

import torch
from torch import Tensor

from penstock.algorithms.kl import log_ratio
from penstock.algorithms.losses.surrogate import TokenLosses, surrogate
from penstock.algorithms.named import NonNegative, Positive
from penstock.conf.errors import ConfigError


@surrogate("ppo_clip")
def ppo_clip(
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: Positive | None = None,
) -> TokenLosses:
    """PPO, 1707.06347 eq. 7: `L = -min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A)`.

    `clip_high=0.28` is DAPO's clip-higher (2503.14476, section 3.1). `dual_clip=c`: where A < 0 the loss is at most
    `-c A`, 1912.09729, without which a ratio that explodes makes it unbounded; c must be above 1 (the paper has 3).
    The gradient is zero where the bound counts: A > 0 with ρ > 1 + clip_high, A < 0 with ρ < 1 - clip_low or ρ > c.
    Metrics: `clip_fraction`, and with dual_clip `dual_clip_fraction`, of tokens whose gradient each of them cut. Raises
    `ConfigError`.
    """
    ratio = log_ratio(new, old).exp()
    loss, is_clipped = pessimistic(ratio, advantage, clip_low, clip_high)
    metrics = {"clip_fraction": is_clipped}
    if dual_clip is not None:
        if dual_clip <= 1:
            raise ConfigError(f"dual_clip={dual_clip}: must be above 1, or it would cut ratios that have not moved.")
        bound = -dual_clip * advantage
        metrics["dual_clip_fraction"] = ((advantage < 0) & (loss > bound)).float()
        loss = torch.where(advantage < 0, torch.minimum(loss, bound), loss)
    return loss, metrics


def pessimistic(ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """The loss `-min(ρ A, clip(ρ) A)`, and 1.0 where the clipped term is the one that counts. The two broadcast."""
    unclipped = -ratio * advantage
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    return torch.maximum(unclipped, clipped), (clipped > unclipped).float()


@surrogate("sapo")
def sapo(
    new: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    positive_temperature: Positive = 1.0,
    negative_temperature: Positive = 1.05,
) -> TokenLosses:
    """SAPO, 2511.20347: `L = -(4 / τ) σ(τ (ρ - 1)) A`, with τ by the sign of A.

    A clip that fades instead of cutting. The gradient with respect to log π is `-4 p (1 - p) ρ A` with
    `p = σ(τ (ρ - 1))`: on policy that is `-A`, as of PPO, and it fades as ρ leaves 1, the faster the higher τ. Tokens
    of bad responses fade faster (1.05 against 1, the paper's), since raising all the other tokens is what is unstable.
    Metric: `gate_mean`, the share `4 p (1 - p)` of its gradient that a token keeps.
    """
    ratio = log_ratio(new, old).exp()
    temperature = torch.where(advantage > 0, positive_temperature, negative_temperature).to(ratio.dtype)
    gate = torch.sigmoid(temperature * (ratio - 1))
    kept = (4 * gate * (1 - gate)).detach()
    return -4 / temperature * gate * advantage, {"gate_mean": kept}
