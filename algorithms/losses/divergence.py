"""Divergence of the student from a teacher, over the tokens that the teacher finds likeliest and a bucket for others.

    teacher ─ candidate_ids, teacher_candidates ─▶ trainer ─ candidate_logprobs ─▶ divergence_loss

The gradient goes through the student's probability of every candidate, not only of the token that was sampled: a dense
signal in place of the policy gradient of `builtin/imitation.py`'s advantage. With as many candidates as words it is the
divergence of the whole distributions.

Legend: B rows of the micro-batch, T response tokens, padded, J candidates of each; P the teacher, Q the student.
"""

import math

import torch
from torch import Tensor

from penstock.algorithms.aggregation import BatchTotals, aggregate, in_float32
from penstock.algorithms.checks import as_mask, describe, has_axes, same_shape
from penstock.algorithms.losses.policy import LossAndMetrics
from penstock.conf.algorithms.preference import DIVERGENCES
from penstock.conf.checks import one_of, within
from penstock.conf.errors import ShapeError

MOST_MASS = -1e-7
"""Largest logarithm of the candidates' probability together, so that the bucket's has one in float32."""


def divergence_loss(
    candidate_logprobs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    teacher_candidates: Tensor,
    *,
    divergence: str = "reverse_kl",
    beta: float = 0.5,
    aggregation: str = "token_mean",
) -> LossAndMetrics:
    """Mean over the response's tokens of the divergence of Q from P, in nats. `divergence`:

        forward_kl       Σ P log(P / Q): the student covers all that the teacher says
        reverse_kl       Σ Q log(Q / P): it says nothing that the teacher would not
        jensen_shannon   β KL(P ‖ M) + (1 - β) KL(Q ‖ M), with M = β P + (1 - β) Q     (2306.13649, eq. 1)

    `candidate_logprobs`: `[B, T, J]` float32, the student's, with gradient. `teacher_candidates`: `[B, T, J]`, the
    teacher's of the same tokens. `mask`: `[B, T]`. Metrics: `loss`, and `teacher_mass`, `student_mass`: probability of
    the candidates together. Raises `ShapeError`, `ConfigError`.
    """
    one_of("algorithm.divergence", divergence, DIVERGENCES)
    within("algorithm.beta", beta, 0.0, 1.0)
    has_axes("candidate_logprobs", candidate_logprobs, "BTJ")
    same_shape(candidate_logprobs, "candidate_logprobs", teacher_candidates=teacher_candidates)
    if mask.shape != candidate_logprobs.shape[:2]:
        raise ShapeError(f"mask is {describe(mask)}; candidate_logprobs is {describe(candidate_logprobs)}: [B, T, J].")
    valid_BT1 = as_mask(mask).unsqueeze(-1)
    even = -math.log(candidate_logprobs.shape[-1] + 1)  # under padding, where anything may be
    student_BTJ = torch.where(valid_BT1, in_float32(candidate_logprobs), even)
    teacher_BTJ = torch.where(valid_BT1, in_float32(teacher_candidates.detach()), even)
    student, teacher = with_bucket(student_BTJ), with_bucket(teacher_BTJ)
    if divergence == "forward_kl":
        values_BT = kl(teacher, student)
    elif divergence == "reverse_kl":
        values_BT = kl(student, teacher)
    else:
        mixed = torch.logaddexp(teacher + _log(beta), student + _log(1.0 - beta))
        values_BT = beta * kl(teacher, mixed) + (1.0 - beta) * kl(student, mixed)
    loss = aggregate(values_BT, mask, totals, aggregation)
    masses = {"teacher_mass": teacher_BTJ, "student_mass": student_BTJ.detach()}
    metrics = {name: aggregate(part.exp().sum(-1), mask, totals, "token_mean") for name, part in masses.items()}
    return loss, {"loss": loss.detach(), **metrics}


def with_bucket(logprobs_BTJ: Tensor) -> Tensor:
    """The log-probabilities, and that of all other tokens together: `[B, T, J + 1]`."""
    mass_BT1 = logprobs_BTJ.logsumexp(dim=-1, keepdim=True).clamp(max=MOST_MASS)
    return torch.cat([logprobs_BTJ, torch.log(-torch.expm1(mass_BT1))], dim=-1)


def kl(one: Tensor, other: Tensor) -> Tensor:
    """KL(one ‖ other) of log-probabilities, over the last axis, in nats."""
    return (one.exp() * (one - other)).sum(dim=-1)


def _log(value: float) -> float:
    return math.log(value) if value > 0.0 else -math.inf
