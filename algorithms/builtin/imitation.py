"""Imitation: supervised fine-tuning on demonstrations, and on-policy distillation of a teacher.

    sft         source ─ prompt_ids, response_ids ─▶ train

    distill     source ─▶ rollout ─ behavior_logprobs ─▶ reverse_kl_advantage ─ token_advantage ─▶ train
                             └─▶ teacher ─ teacher_logprobs ─────┘

    candidates  source ─▶ rollout ─▶ teacher ─ candidate_ids, teacher_candidates ─▶ train: divergence_loss

Demonstrations come with the rows, and the loss is their negative log-likelihood. In distillation the student samples,
the teacher (`model.paths.teacher`, of the same tokenizer) scores every token, and the advantage is their difference: a
policy gradient with it goes down KL(student || teacher) on the student's own samples. No reward is asked for, and there
is a signal for each token. With `algorithm.hint` the teacher reads another prompt.

With `algorithm.candidates` the two are compared over the tokens that the teacher finds likeliest, and a bucket for all
others. The gradient goes through the student's probability of every candidate, not only of the token that was sampled:
a dense signal in place of the policy gradient. With as many candidates as words it is the divergence of the whole
distributions.

Legend: B rows of the micro-batch, T response tokens, padded; T_i tokens of row i; J candidates of each token; P the
teacher, Q the student.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.algorithms.aggregation import BatchTotals, aggregate, in_float32, masked
from penstock.algorithms.checks import as_mask, checked_mask, describe, has_axes, positive, same_shape
from penstock.algorithms.graph.columns import CANDIDATES, HINTED, Column, field_of
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.stage import ParameterAlias, columns_read
from penstock.algorithms.kl import LOG_RATIO_BOUND
from penstock.algorithms.losses import policy_loss, sft_loss
from penstock.algorithms.losses.policy import LossAndMetrics
from penstock.algorithms.registry import algorithm
from penstock.conf.algorithms import DIVERGENCES, DistillConfig, SftConfig
from penstock.conf.checks import one_of, within
from penstock.conf.errors import DataflowError, ShapeError, suggest

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
    prompt, teacher = "prompt_ids" if cfg.hint is None else HINTED, cfg.teacher
    for value, model in cfg.teachers.items():
        flow.logprobs(model, candidates=cfg.candidates, prompt=prompt, rows_of=(cfg.teacher_by, value))
    if cfg.teachers:
        teacher = "teacher"
        add_teacher_choice(flow, cfg)
    else:
        flow.logprobs(teacher, candidates=cfg.candidates, prompt=prompt)
    if cfg.candidates:
        compared = partial(divergence_loss, divergence=cfg.divergence, beta=cfg.beta, aggregation=cfg.aggregation)
        return flow.train("policy", loss=compared)
    judge = ParameterAlias(
        partial(reverse_kl_advantage, discount=cfg.discount), "teacher_logprobs", f"{teacher}_logprobs"
    )
    flow.compute(judge, per="sample", reads=columns_read(judge), writes=[TOKEN_ADVANTAGE])
    loss = partial(policy_loss, surrogate="reinforce", aggregation=cfg.aggregation)
    return flow.train("policy", loss=ParameterAlias(loss, "advantage", TOKEN_ADVANTAGE.name))


def add_teacher_choice(flow: Dataflow, cfg: DistillConfig) -> Dataflow:
    """Add the stage that takes, of what several teachers have written, the columns of each row's own."""
    names = ("{}_logprobs", "{}_candidate_ids", "{}_candidates") if cfg.candidates else ("{}_logprobs",)
    of_teachers = {value: [name.format(model) for name in names] for value, model in cfg.teachers.items()}
    writes: list[str | Column] = [Column("teacher_logprobs", "float32", "token")]
    writes += [CANDIDATES, "teacher_candidates"] if cfg.candidates else []
    reads = ["task", *(name for columns in of_teachers.values() for name in columns)]
    choose = partial(choose_teacher_columns, by=cfg.teacher_by, of_teachers=of_teachers)
    return flow.compute(choose, per="sample", reads=reads, writes=writes, name="of_its_teacher")


def choose_teacher_columns(
    task: list[str], *, by: str, of_teachers: Mapping[str, Sequence[str]], **columns: list[Tensor]
) -> tuple[list[Tensor], ...]:
    """The columns of each row's own teacher. `task`: JSON. `of_teachers`: names of the columns that the teacher of each
    value of the task's field `by` has written. Raises `DataflowError` for a row that is nobody's."""
    chosen = []
    for row, text in enumerate(task):
        value = field_of(text, by, "algorithm.teacher_by")
        if value not in of_teachers:
            raise DataflowError(
                f"algorithm.teachers has none for {by}={value}{suggest(value, of_teachers)} Name one for each."
            )
        chosen.append([columns[name][row] for name in of_teachers[value]])
    return tuple([list(part) for part in zip(*chosen, strict=True)])


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
    valid = checked_mask("logprobs", logprobs, mask, teacher_logprobs=teacher_logprobs)
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
