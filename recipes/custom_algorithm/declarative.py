"""A user's own algorithm: REINFORCE with a leave-one-out baseline that pushes harder towards good samples than away
from bad ones. Run it: `penstock run recipe=custom_algorithm algorithm.negative_weight=0.25`."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock import AlgorithmConfig, Dataflow, LossInputs, LossOutput, algorithm, truncated_importance_weight


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


def asymmetric_loss(inputs: LossInputs, *, negative_weight: float = 0.5) -> LossOutput:
    """The loss `-w A log π` of each token, negative A scaled down; `w` makes up for the engine's slightly different
    probabilities."""
    push = torch.where(inputs.advantage > 0, inputs.advantage, negative_weight * inputs.advantage)
    weight = truncated_importance_weight(inputs.logprobs, inputs.behavior_logprobs, cap=2.0)
    loss = -weight * push * inputs.logprobs
    return LossOutput(loss, {"pg_loss": loss})


@algorithm("asymmetric_reinforce")
def asymmetric_reinforce(cfg: AsymmetricConfig) -> Dataflow:
    flow = Dataflow()
    flow.rollout("policy", samples_per_prompt=cfg.group_size)
    flow.reward()
    flow.compute(leave_one_out, per="group", reads=["reward"], writes=["advantage"])
    flow.train("policy", loss=partial(asymmetric_loss, negative_weight=cfg.negative_weight))
    return flow
