"""Imitation: supervised fine-tuning on demonstrations, and on-policy distillation of a teacher.

    sft         source ─ prompt_ids, response_ids ─▶ train

    distill     source ─▶ rollout ─ behavior_logprobs ─▶ reverse_kl_advantage ─ token_advantage ─▶ train
                             └─▶ teacher ─ teacher_logprobs ─────┘

Demonstrations come with the rows, and the loss is their negative log-likelihood. In distillation the student samples,
the teacher (`model.paths.teacher`, of the same tokenizer) scores every token, and the advantage is their difference: a
policy gradient with it goes down KL(student || teacher) on the student's own samples. No reward is asked for, and there
is a signal for each token. With `algorithm.candidates` the two are compared in the likeliest tokens of each place
(`losses/divergence.py`); with `algorithm.hint` the teacher reads another prompt.

Legend: B rows of the micro-batch, T response tokens, padded; T_i tokens of row i.
"""

from functools import partial

import torch
from torch import Tensor

from penstock.algorithms.aggregation import masked
from penstock.algorithms.checks import as_mask, describe, has_axes, positive, same_shape
from penstock.algorithms.graph.columns import HINTED, Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.stage import Renamed, columns_read
from penstock.algorithms.kl import LOG_RATIO_BOUND
from penstock.algorithms.losses import policy_loss, sft_loss
from penstock.algorithms.losses.divergence import divergence_loss
from penstock.algorithms.registry import algorithm
from penstock.conf.algorithms.base import SftConfig
from penstock.conf.algorithms.preference import DistillConfig
from penstock.conf.checks import within
from penstock.conf.errors import ShapeError

TOKEN_ADVANTAGE = Column("token_advantage", "float32", "token")


@algorithm("sft")
def sft(cfg: SftConfig) -> Dataflow:
    """Maximum likelihood on demonstrations."""
    flow = Dataflow().demonstrations()
    flow.train("policy", loss=partial(sft_loss, aggregation=cfg.aggregation))
    return flow


@algorithm("distill")
def distill(cfg: DistillConfig) -> Dataflow:
    """Descent of a divergence from the teacher, on the student's own samples: 2306.13649."""
    flow = Dataflow()
    flow.rollout("policy", samples_per_prompt=cfg.group_size)
    flow.logprobs(cfg.teacher, candidates=cfg.candidates, prompt="prompt_ids" if cfg.hint is None else HINTED)
    if cfg.candidates:
        compared = partial(divergence_loss, divergence=cfg.divergence, beta=cfg.beta, aggregation=cfg.aggregation)
        return flow.train("policy", loss=compared)
    judge = Renamed(partial(reverse_kl_advantage, discount=cfg.discount), "teacher_logprobs", f"{cfg.teacher}_logprobs")
    flow.compute(judge, per="sample", reads=columns_read(judge), writes=[TOKEN_ADVANTAGE])
    loss = partial(policy_loss, surrogate="reinforce", aggregation=cfg.aggregation)
    return flow.train("policy", loss=Renamed(loss, "advantage", TOKEN_ADVANTAGE.name))


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
    logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, discount: float = 0.0, clamp: float = LOG_RATIO_BOUND
) -> Tensor:
    """Compute `reverse_kl_advantage` of a padded micro-batch, for losses that have the trainer's own log-probabilities:
    `[B, T]` each, returns `[B, T]` float32, detached, 0 in padding.

    What lies under padding, NaN included, is ignored; the sum over later tokens is taken in float64. Raises
    `ShapeError`, `ConfigError`.
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
