"""Surrogates by name: the formula of a policy loss, and nothing around it. `policy.py` finds and calls them.

    @surrogate("mine")
    def mine(new_BT, old_BT, advantage_BT, mask_BT, *, clip: NonNegative = 0.2):
        return -advantage_BT * ..., {"clip_fraction": ...}

`new`: log-probabilities of the policy, with gradient. `old`: what the ratio is taken against, without. `advantage`: a
token, without. All `[B, T]`, float32 (float64 stays), zero in padding already. `mask`: bool `[B, T]`. Returned are the
loss of each token `[B, T]`, to be minimised, and token values of metrics `[B, T]`, which are averaged over the batch's
tokens. What is returned under padding is ignored. Settings are keyword-only; `algorithms/registry.py` says how to limit
them.

A surrogate sees one micro-batch. It must treat rows independently, or the result depends on how the batch is cut. Four
kinds are here:

- those that bound how far one batch may move the probability of a token, by its ratio `ρ = π / π_old`: PPO's hard clip
  and SAPO's soft gate;
- those whose ratio is of a whole response, as its reward is, too. A response's value stands at each of its tokens, so
  that the aggregations mean what they say: "sequence_mean" gives every response the same weight, as the papers have it,
  and "token_mean" weighs it by its length;
- `-w · A · log π` with a constant weight w: the gradient is that of REINFORCE, scaled or cut a token. Their *value* is
  a log-likelihood and says little; their gradient is the point;
- those that keep entropy up, 2505.22617. An update lowers the policy's entropy by the covariance of log-probability and
  advantage, and a tiny share of the tokens carries most of it. With the token's own term `c = (log π - mean log π)(A -
  mean A)`, Clip-Cov drops a few tokens with a large c from the gradient, KL-Cov pulls them back to where they were.
  **These two are not exact under micro-batching.** Means and shares are of the call, one micro-batch of one rank:
  small micro-batches mean noisier choices, and at least one token is chosen in each.

Legend: B rows of the micro-batch, T response tokens, padded.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.algorithms.kl import LOG_RATIO_BOUND, log_ratio, sequence_log_ratio
from penstock.algorithms.registry import FormulaRegistry, NonNegative, Positive
from penstock.conf.errors import ConfigError

TokenLosses = tuple[Tensor, dict[str, Tensor]]
"""Losses `[B, T]`, and token values of metrics, `[B, T]` each."""
Surrogate = Callable[..., TokenLosses]
SURROGATES = FormulaRegistry("algorithm.surrogate")
surrogate = SURROGATES.register


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
    """A number in [0, 1) a token, spread evenly and unrelated to how large the log-probability is: its bits, mixed as
    at the end of MurmurHash3. Whole numbers alone: the same on every device, and a number for -inf, too."""
    bits = logprobs.detach().float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return ((bits ^ (bits >> 16)) >> 8).to(logprobs.dtype) / 2**24
