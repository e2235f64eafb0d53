"""Advantages of turns: the rewards that an attempt still gets after a turn, compared with those of others after theirs.

The rewards of turns are `turn_rewards`; what the whole attempt was given beyond them falls on its last turn. Each token
of a turn has the turn's advantage.

Legend: G attempts of one group (the same task); K_i turns of attempt i; T_i sampled tokens of attempt i.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.algorithms.advantages.normalizer import finite_rewards
from penstock.algorithms.advantages.registry import advantage
from penstock.conf.checks import within
from penstock.conf.errors import ShapeError


@advantage("turn_rloo")
def turn_rloo(
    reward: Tensor,
    turn_rewards: Sequence[Tensor],
    turn_tokens: Sequence[Tensor],
    turn_ids: Sequence[Tensor],
    *,
    gamma: float = 1.0,
) -> list[Tensor]:
    """REINFORCE by turns with a leave-one-out baseline: `A_it = R_it - mean of R_jt over the other attempts j`, with
    the return `R_it = Σ_{s >= t} γ^(s - t) r_is`. One `[T_i]` float32 for each attempt.

    An attempt that is over has `R_jt = 0`, and is in the mean. So the baseline of turn t is a function of t and of
    other attempts alone, whatever this one does: the estimate is unbiased. A mean over those attempts only that have a
    turn t, this one among them, is not: which are left at t depends on how they fared, and the one that is left alone
    learns nothing. Where all attempts have as many turns, and a reward for the whole alone, this is `rloo`.

    `reward`: `[G]`, of the whole attempts, those of turns included. `turn_rewards`, `turn_tokens`, `turn_ids`: `[K_i]`
    each, in the order of the attempt's tokens; ids are in the order in which turns were played. `gamma`: per turn, in
    [0, 1]. Raises `ShapeError`, `ConfigError`.
    """
    within("gamma", gamma, 0.0, 1.0)
    reward_G = finite_rewards(reward)
    if not len(reward_G) == len(turn_rewards) == len(turn_tokens) == len(turn_ids):
        raise ShapeError(
            f"turn_rewards, turn_tokens and turn_ids have {len(turn_rewards)}, {len(turn_tokens)} and "
            f"{len(turn_ids)} rows; expected {len(reward_G)}, as many as reward."
        )
    orders = [torch.argsort(ids) for ids in turn_ids]
    most = max((len(order) for order in orders), default=0)
    returns_GK = torch.zeros(len(reward_G), most, dtype=torch.float64)
    for index, (order, rewards) in enumerate(zip(orders, turn_rewards, strict=True)):
        played = rewards.double()[order]
        if len(played):
            played[-1] += reward_G[index].double() - played.sum()
        later = 0.0
        for turn in range(len(played) - 1, -1, -1):
            later = float(played[turn]) + gamma * later
            returns_GK[index, turn] = later
    others = max(1, len(reward_G) - 1)
    baseline_GK = (returns_GK.sum(dim=0, keepdim=True) - returns_GK) / others
    advantages_GK = returns_GK - baseline_GK if len(reward_G) > 1 else torch.zeros_like(returns_GK)
    found = []
    for index, (order, lengths) in enumerate(zip(orders, turn_tokens, strict=True)):
        of_turn = torch.empty(len(order), dtype=torch.float64)
        of_turn[order] = advantages_GK[index, : len(order)]
        found.append(of_turn.repeat_interleave(lengths.long()).float())
    return found
