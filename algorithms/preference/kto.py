"""Kahneman-Tversky optimisation: learning from single samples that are good or bad, without pairs.

    r(x, y) = log π(y | x) - log π_ref(y | x)
    z_0     = max(0, an estimate of KL(π || π_ref))          what a sample is measured against; no gradient

A loss of `flow.train`; see `pair_losses.py` for how it is called. As samples are not paired, the mean is over the
sequences of the optimizer step, not over its groups.

Legend: B rows of the micro-batch, T response tokens, padded; G groups of the micro-batch.
"""

import torch
from torch import Tensor

from penstock.algorithms.aggregation import BatchTotals, in_float32
from penstock.algorithms.checks import non_negative, positive, same_shape
from penstock.algorithms.losses import LossAndMetrics
from penstock.algorithms.preference.pairs import (
    one_a_row,
    response_mask,
    sequence_logprobs,
    signs,
    token_log_ratios,
    whole_numbers,
)


def kto_loss(
    logprobs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    desirable: Tensor,
    group_ids: Tensor,
    reference_logprobs: Tensor,
    kl_baseline: Tensor | None = None,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossAndMetrics:
    """KTO, 2402.01306, a sample, with λ the weight of its kind:

        λ (1 - σ(β (r - z_0)))  desirable,        λ (1 - σ(β (z_0 - r)))  undesirable

    `z_0` is `max(0, kl_baseline)` where a stage writes that column, and `group_baseline` otherwise. The paper's own
    estimate pairs prompts with responses to other prompts and is a mean over the batch, which no single micro-batch
    knows: compute it in a stage of its own. Either way the loss is the same however it is cut in whole groups.

    `logprobs`, `reference_logprobs`, `mask`: `[B, T]`. `desirable`: `[B]`, +1, -1, or 0 for rows that take no part.
    `group_ids`: int64 `[B]`. `kl_baseline`: `[B]`, in nats.
    Metrics, all means over the minibatch's sequences: `loss`; `accuracy`, the samples on the right side of z_0, and
    `margin`, by how much, `± β (r - z_0)`; `kl_baseline`; and for each kind its `desirable_fraction` and
    `desirable_reward`, `β r`: divide the one by the other for a mean over the kind. Rows without a token add 0 and
    count nowhere. Raises `ShapeError`, `ConfigError`.
    """
    positive("algorithm.beta", beta)
    non_negative("algorithm.desirable_weight", desirable_weight)
    non_negative("algorithm.undesirable_weight", undesirable_weight)
    valid = response_mask(logprobs, mask, desirable=desirable, group_ids=group_ids)
    same_shape(logprobs, "logprobs", reference_logprobs=reference_logprobs)
    whole_numbers(group_ids)
    ratio_B = sequence_logprobs(token_log_ratios(logprobs, reference_logprobs, valid), valid)
    has_tokens_B = valid.any(dim=-1)
    sign_B = signs("desirable", desirable).to(ratio_B) * has_tokens_B
    baseline_B = _baseline(kl_baseline, ratio_B, group_ids, has_tokens_B)
    margin_B = sign_B * beta * (ratio_B - baseline_B)
    good_B, bad_B = (sign_B > 0).to(ratio_B), (sign_B < 0).to(ratio_B)
    weight_B = desirable_weight * good_B + undesirable_weight * bad_B

    def mean(values_B: Tensor) -> Tensor:
        return values_B.sum() / max(totals.num_sequences, 1)

    loss = mean(weight_B * torch.sigmoid(-margin_B))  # 1 - σ(x), without the cancellation
    reward_B = beta * ratio_B.detach()
    return loss, {
        "loss": loss.detach(),
        "accuracy": mean((margin_B.detach() > 0).to(ratio_B)),
        "margin": mean(margin_B.detach()),
        "kl_baseline": mean(baseline_B * has_tokens_B),
        "desirable_fraction": mean(good_B),
        "undesirable_fraction": mean(bad_B),
        "desirable_reward": mean(good_B * reward_B),
        "undesirable_reward": mean(bad_B * reward_B),
    }


def group_baseline(log_ratio: Tensor, group_ids: Tensor, counts: Tensor) -> Tensor:
    """The baseline `z_0` of each row from the other rows of its group: `max(0, mean of their log-ratios)`, `[B]`,
    detached.

    For groups that the policy sampled itself, an estimate of KL(π || π_ref) at the row's prompt that does not depend on
    the row. A row with no other has 0. `log_ratio`: `[B]`. `counts`: bool `[B]`, rows that enter the means, whatever
    their label. The mean of a group is within one micro-batch, so no cut in whole groups changes it.
    """
    values_B = torch.where(counts, log_ratio.detach(), 0.0).double()
    group_of_B = torch.unique(group_ids, return_inverse=True)[1]
    sums_G = values_B.new_zeros(len(group_ids)).index_add(0, group_of_B, values_B)
    numbers_G = values_B.new_zeros(len(group_ids)).index_add(0, group_of_B, counts.double())
    others_B = numbers_G[group_of_B] - counts.double()
    mean_B = (sums_G[group_of_B] - values_B) / others_B.clamp(min=1)
    return mean_B.clamp(min=0).to(log_ratio.dtype)


def _baseline(kl_baseline: Tensor | None, ratio_B: Tensor, group_ids: Tensor, has_tokens_B: Tensor) -> Tensor:
    if kl_baseline is None:
        return group_baseline(ratio_B, group_ids, has_tokens_B)
    one_a_row(len(ratio_B), kl_baseline=kl_baseline)
    return in_float32(kl_baseline.detach()).clamp(min=0)
