"""Advantages of tokens: the amount by which the rest of a response went better than the critic expected.

`compute` stages pass the columns of the critic (`values`) and of `token_rewards`.

Legend: B rows, T response tokens, padded: what lies under `mask == 0` may be anything, NaN included. T_i tokens of
response i.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from penstock.algorithms.aggregation import masked
from penstock.algorithms.checks import as_mask, has_axes, non_negative, same_shape
from penstock.conf.errors import ConfigError, ShapeError


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation, 1506.02438 eq. 16, backwards in time:

        δ_t = r_t + γ V_{t+1} - V_t,   A_t = δ_t + γ λ A_{t+1},   return_t = A_t + V_t

    After the last token of a response both V and A are 0: the episode is over. A gap in the mask (what a tool said, not
    the policy) is stepped over as if it were not there.

    `rewards`, `values`, `mask`: `[B, T]`. `gamma`, `lam`: within [0, 1]. Returns the advantages and the returns, each
    `[B, T]` float32 without gradient, zero in padding. With values 0 and lam 1 the returns are the discounted sums of
    rewards to come. Raises `ShapeError`, `ConfigError`.
    """
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0 <= factor <= 1:
            raise ConfigError(f"algorithm.{name}={factor}: must lie between 0 and 1.")
    has_axes("rewards", rewards, "BT")
    same_shape(rewards, "rewards", values=values, mask=mask)
    valid = as_mask(mask)
    reward, value = masked(rewards, valid).detach(), masked(values, valid).detach()
    advantage = torch.zeros_like(reward)
    next_value = next_advantage = reward.new_zeros(len(reward))
    for t in reversed(range(reward.shape[1])):
        here = valid[:, t]
        delta = reward[:, t] + gamma * next_value - value[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, value[:, t], next_value)
        advantage[:, t] = torch.where(here, next_advantage, 0.0)
    return advantage, advantage + value


def gae_ragged(
    rewards: Sequence[Tensor], values: Sequence[Tensor], *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[list[Tensor], list[Tensor]]:
    """Compute `gae` of responses as lists of `[T_i]`, as stages have token columns; returns two such lists.

    Raises `ShapeError` if the lists or two tensors of the same response differ in length.
    """
    if len(rewards) != len(values):
        raise ShapeError(f"values has {len(values)} responses; expected {len(rewards)}, as many as rewards.")
    for i, (reward, value) in enumerate(zip(rewards, values, strict=True)):
        same_shape(reward, f"rewards[{i}]", **{f"values[{i}]": value})
    if not rewards:
        return [], []
    lengths = [len(reward) for reward in rewards]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)
    pad = [pad_sequence(list(column), batch_first=True) for column in (rewards, values)]
    advantage, returns = gae(pad[0], pad[1], mask.to(pad[0].device), gamma=gamma, lam=lam)
    return unpadded(advantage, lengths), unpadded(returns, lengths)


def unpadded(values_BT: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The first `T_i` entries of each row, as stages have token columns."""
    return [row[:length] for row, length in zip(values_BT, lengths, strict=True)]


def whitened(advantage: Tensor, mask: Tensor, *, centre: bool = True, eps: float = 1e-8) -> Tensor:
    """Whiten advantages, `(A_t - mean(A)) / (std(A) + eps)` over all tokens of the mask, as PPO's code does a batch;
    `[B, T]` float32.

    `advantage`, `mask`: `[B, T]`. `centre=False` keeps the mean: signs stay. Statistics are in float64, the deviation
    that of a sample. Zero in padding; where all tokens agree, or there is one, nothing is divided. Raises `ShapeError`,
    `ConfigError`.
    """
    non_negative("eps", eps)
    has_axes("advantage", advantage, "BT")
    same_shape(advantage, "advantage", mask=mask)
    valid = as_mask(mask)
    tokens = advantage.detach()[valid].double()
    if len(tokens) == 0:
        return masked(advantage.detach(), valid).float()
    agree = bool((tokens == tokens[0]).all())
    mean = tokens[0] if agree else tokens.mean()
    deviation = 1.0 if agree else float(tokens.std()) + eps
    result = torch.zeros(advantage.shape, dtype=torch.float32, device=advantage.device)
    result[valid] = ((tokens - mean if centre else tokens) / deviation).float()
    return result
