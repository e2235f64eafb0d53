"""A user's own algorithm: REINFORCE with a leave-one-out baseline that pushes harder towards good samples than away
from bad ones. Run it: `penstock run recipe=custom_algorithm algorithm.negative_weight=0.25`."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock import AlgorithmConfig, BatchTotals, Dataflow, aggregate, algorithm, truncated_importance_weight


@dataclass
class AsymmetricConfig(AlgorithmConfig):
    name: str = "asymmetric_reinforce"
    group_size: int = 8
    negative_weight: float = 0.5
    """Weight of a sample below its baseline, against 1 for one above it."""


def leave_one_out(reward: Tensor) -> Tensor:
    """Turn `[G]` rewards of a group into `[G]` advantages: the reward less the mean of the others (2402.14740)."""
    others = max(len(reward) - 1, 1)
    return reward - (reward.sum() - reward) / others


def asymmetric_loss(
    logprobs: Tensor,  # [B, T] from the trainer, with gradient
    mask: Tensor,  # [B, T] from the trainer: True for response tokens
    totals: BatchTotals,  # from the trainer: tokens and sequences of the whole batch
    advantage: Tensor,  # [B] column
    behavior_logprobs: Tensor,  # [B, T] column
    *,
    negative_weight: float = 0.5,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss `-w A log π`, negative A scaled down; `w` makes up for the engine's slightly different probabilities."""
    push = torch.where(advantage > 0, advantage, negative_weight * advantage)[:, None]
    weight = truncated_importance_weight(logprobs, behavior_logprobs, cap=2.0)
    loss = aggregate(-weight * push * logprobs, mask, totals, "token_mean")
    return loss, {"pg_loss": loss.detach()}


@algorithm("asymmetric_reinforce")
def asymmetric_reinforce(cfg: AsymmetricConfig) -> Dataflow:
    flow = Dataflow()
    flow.rollout("policy", samples_per_prompt=cfg.group_size)
    flow.reward()
    flow.compute(leave_one_out, per="group", reads=["reward"], writes=["advantage"])
    flow.train("policy", loss=partial(asymmetric_loss, negative_weight=cfg.negative_weight))
    return flow
