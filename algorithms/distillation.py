"""On-policy distillation: the student samples, the teacher scores every token, and the advantage is their difference.

    rollout ─ behavior_logprobs ─▶ reverse_kl_advantage ─ advantage ─▶ train (ppo_clip_loss, …)
       └─▶ teacher ─ teacher_logprobs ─────┘

A policy gradient with this advantage goes down KL(student || teacher) on the student's own samples: no reward, and a
signal for each token. `reverse_kl_advantage` is for a `compute` stage with `per="sample"`; the padded form is for
losses that have the trainer's own log-probabilities.

Legend: B rows of the micro-batch, T response tokens, padded; T_i tokens of row i.
"""

import torch
from torch import Tensor

from penstock.algorithms.aggregation import masked
from penstock.algorithms.checks import as_mask, describe, has_axes, positive, same_shape
from penstock.algorithms.kl import LOG_RATIO_BOUND
from penstock.conf.checks import within
from penstock.conf.errors import ShapeError


def reverse_kl_advantage(
    behavior_logprobs: list[Tensor],
    teacher_logprobs: list[Tensor],
    *,
    discount: float = 0.0,
    clamp: float = LOG_RATIO_BOUND,
) -> list[Tensor]:
    """The advantage of every token of every row, `[T_i]` float32 each:

        A_t = Σ_{k ≥ t} discount^(k - t) · (log π_teacher - log π)_k

    `discount=0`: a token answers for itself alone, on-policy distillation as in 2306.13649 without a gradient through
    what the student samples. `discount=1`: also for where it leads, which makes the policy gradient that of the
    sequences' reverse KL (2306.08543 eq. 2). Each difference is first clamped to ±`clamp`, so that a token to which the
    teacher gives no probability at all does not drown the others.

    `behavior_logprobs`, `teacher_logprobs`: one `[T_i]` a row, of the sampled tokens. Empty rows stay empty.
    Raises `ShapeError`, `ConfigError`.

    >>> reverse_kl_advantage([torch.tensor([-1.0, -2.0])], [torch.tensor([-1.5, -1.0])])
    [tensor([-0.5000,  1.0000])]
    """
    if len(behavior_logprobs) != len(teacher_logprobs):
        raise ShapeError(
            f"teacher_logprobs has {len(teacher_logprobs)} rows; expected {len(behavior_logprobs)}, as many as "
            "behavior_logprobs."
        )
    advantages = []
    for row, (own, teacher) in enumerate(zip(behavior_logprobs, teacher_logprobs, strict=True)):
        if not isinstance(own, Tensor) or own.dim() != 1:
            raise ShapeError(f"behavior_logprobs of row {row} is {describe(own)}; expected a tensor [T].")
        same_shape(own, f"behavior_logprobs of row {row}", teacher_logprobs=teacher)
        everything = torch.ones(1, len(own), dtype=torch.bool, device=own.device)
        advantage_BT = padded_reverse_kl_advantage(own[None], teacher[None], everything, discount=discount, clamp=clamp)
        advantages.append(advantage_BT[0])
    return advantages


def padded_reverse_kl_advantage(
    logprobs: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    *,
    discount: float = 0.0,
    clamp: float = LOG_RATIO_BOUND,
) -> Tensor:
    """Compute `reverse_kl_advantage` of a padded micro-batch: `[B, T]` each, returns `[B, T]` float32, detached, 0 in
    padding.

    What lies under padding, NaN included, is ignored; the sum over later tokens is taken in float64.
    Raises `ShapeError`, `ConfigError`.
    """
    within("algorithm.discount", discount, 0.0, 1.0)
    positive("algorithm.clamp", clamp)
    has_axes("logprobs", logprobs, "BT")
    same_shape(logprobs, "logprobs", teacher_logprobs=teacher_logprobs, mask=mask)
    valid = as_mask(mask)
    difference_BT = (masked(teacher_logprobs.detach(), valid) - masked(logprobs.detach(), valid)).clamp(-clamp, clamp)
    return torch.where(valid, discounted_sums(difference_BT.double(), discount), 0.0).float()


def discounted_sums(values_BT: Tensor, discount: float) -> Tensor:
    """The sums `S_t = Σ_{k ≥ t} discount^(k - t) · values_k` along the last axis, in log2(T) steps.

    A window of n terms becomes one of 2n by adding that which starts n later: S_2n(t) = S_n(t) + discount^n S_n(t + n).
    """
    sums, num_terms = values_BT, 1
    while num_terms < sums.shape[-1]:
        later = sums[..., num_terms:] * discount**num_terms
        sums = torch.cat([sums[..., :-num_terms] + later, sums[..., -num_terms:]], dim=-1)
        num_terms *= 2
    return sums
