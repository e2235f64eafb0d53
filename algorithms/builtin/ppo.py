"""Proximal policy optimisation with a critic and, if one is named, a reward model.

    source ─▶ rollout ─▶ reward model, or reward ─▶ ppo_advantages ─ token_advantage ─▶ train (policy)
                 ├─▶ reference (with kl_coef) ──────▶ ▲    └─ returns ─▶ train_critic
                 │       └─▶ next_coefficient ─ kl_coef (with kl_target) ┤
                 └─▶ critic_values ─ old_values ──────┘

With `advantage=turn_gae`, in an environment, turns are the steps of `ppo_advantages`, and it reads their rewards.

What stands per batch runs in the trainers: the critic lives with the policy's ranks, and advantages are whitened over
the batch.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from penstock.algorithms.advantages import gae, token_rewards, turn_gae, unpadded, whitened
from penstock.algorithms.builtin.policy_gradient import KL_COEF, add_adaptive_coefficient
from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.stage import ParameterAlias
from penstock.algorithms.losses import interpolated_policy_loss, policy_loss, value_loss
from penstock.algorithms.registry import algorithm
from penstock.conf.algorithms import PpoConfig

TOKEN_ADVANTAGE, RETURNS = Column("token_advantage", "float32", "token"), Column("returns", "float32", "token")
TURN_COLUMNS = ("turn_rewards", "turn_tokens", "turn_ids")


def ppo_advantages(
    reward: Tensor,
    old_values: list[Tensor],
    behavior_logprobs: list[Tensor],
    reference_logprobs: list[Tensor] | None = None,
    kl_coef: float | Tensor = 0.0,
    turn_rewards: list[Tensor] | None = None,
    turn_tokens: list[Tensor] | None = None,
    turn_ids: list[Tensor] | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[list[Tensor], list[Tensor]]:
    """Whitened advantages and returns of every token of a batch, two lists of `[T_i]` float32.

    The reward `[N]` falls on the last token, a KL penalty on each (1909.08593 eq. 2), then GAE (1506.02438 eq. 16).
    With `turn_rewards`, `turn_tokens` and `turn_ids`, `[K_i]` each, it is `turn_gae`, and the penalties of a turn's
    tokens are part of its reward. `old_values`, `behavior_logprobs`, `reference_logprobs`: `[T_i]` each. `kl_coef`: a
    number, or one a sample `[N]`. Raises `ShapeError`, `ConfigError`.
    """
    lengths = [len(values) for values in old_values]
    if not lengths:
        return [], []
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)
    logprobs = _padded(behavior_logprobs), _padded(reference_logprobs)
    if turn_rewards is None or turn_tokens is None or turn_ids is None:
        rewards = token_rewards(reward, mask, *logprobs, kl_coef=kl_coef)
        values = pad_sequence(list(old_values), batch_first=True)
        advantage, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
        return unpadded(whitened(advantage, mask), lengths), unpadded(returns, lengths)
    penalties = unpadded(token_rewards(torch.zeros_like(reward), mask, *logprobs, kl_coef=kl_coef), lengths)
    turn_rewards = [
        rewards + torch.stack([part.sum() for part in torch.split(penalty, tokens.tolist())])
        for rewards, penalty, tokens in zip(turn_rewards, penalties, turn_tokens, strict=True)
    ]
    reward = reward + torch.stack([penalty.sum() for penalty in penalties])
    of_turns = turn_gae(reward, old_values, turn_rewards, turn_tokens, turn_ids, gamma=gamma, lam=lam)
    return unpadded(whitened(pad_sequence(of_turns[0], batch_first=True), mask), lengths), of_turns[1]


def _padded(column: list[Tensor] | None) -> Tensor | None:
    return None if column is None else pad_sequence(list(column), batch_first=True)


@algorithm("ppo")
def ppo(cfg: PpoConfig) -> Dataflow:
    """PPO with GAE, a clipped value loss, and the KL penalty in the reward: 1707.06347, 2203.02155."""
    flow = Dataflow()
    flow.rollout("policy", samples_per_prompt=cfg.group_size)
    flow.scores("reward_model") if cfg.reward_model else flow.reward()
    reads = ["reward", "old_values", "behavior_logprobs"]
    reads += TURN_COLUMNS if cfg.advantage == "turn_gae" else ()
    advantages = partial(ppo_advantages, gamma=cfg.gamma, lam=cfg.lam)
    if cfg.kl_coef:
        flow.logprobs("reference")
        reads.append("reference_logprobs")
    if cfg.kl_target:
        add_adaptive_coefficient(flow, coef=cfg.kl_coef, target=cfg.kl_target, gain=cfg.kl_gain)
        reads.append(KL_COEF.name)
    else:
        advantages = partial(advantages, kl_coef=cfg.kl_coef)
    flow.values("critic")
    flow.compute(advantages, per="batch", reads=reads, writes=[TOKEN_ADVANTAGE, RETURNS])
    flow.train_critic("critic", loss=partial(value_loss, clip=cfg.value_clip))
    decoupled = cfg.proximal == "interpolated"
    if decoupled:
        flow.staleness()
    options = {"clip_low": cfg.clip_low, "clip_high": cfg.clip_high}
    loss: Any = partial(interpolated_policy_loss if decoupled else policy_loss, surrogate_options=options)
    return flow.train("policy", loss=ParameterAlias(loss, "advantage", TOKEN_ADVANTAGE.name))
