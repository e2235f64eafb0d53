"""Temporal advantages, of tokens and turns: the amount by which the rest of a response goes better than was expected.

    reward ─ token_rewards: all of it at the last token, a KL penalty at each ─┐
    critic ─ values ───────────────────────────────────────────────────────────┴─▶ gae ─▶ advantages, returns ─ whitened

    turn_rewards ─▶ turn_rloo: what an attempt still gets after a turn, compared with that of others after theirs

Legend: B rows, T response tokens, padded: what lies under `mask == 0` may be anything, NaN included. T_i tokens of
response i. Of turns: G attempts of one group (the same task); K_i turns of attempt i; T_i sampled tokens of attempt i.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.algorithms.advantages.outcome import advantage, finite_rewards
from penstock.algorithms.aggregation import masked
from penstock.algorithms.checks import as_mask, describe, has_axes, non_negative, same_shape
from penstock.algorithms.kl import kl_penalty
from penstock.conf.checks import within
from penstock.conf.errors import ConfigError, ShapeError


def token_rewards(
    reward: Tensor,
    mask: Tensor,
    logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    *,
    kl_coef: float | Tensor = 0.0,
    estimator: str = "k1",
) -> Tensor:
    """The rewards `r_t = -kl_coef · k(π || π_ref)_t`, plus the response's reward at the last token of the mask; `[B,
    T]` float32.

    The "KL in the reward" of 1909.08593 eq. 2, in the form that InstructGPT (2203.02155) gave it.

    `reward`: `[B]`, finite. `mask`, `logprobs` (of the policy that sampled), `reference_logprobs`: `[B, T]`; the latter
    two may be missing while `kl_coef` is 0. `kl_coef`: a number, or one a row `[B]`. Zero in padding; a row without a
    token is all zero, and its reward is lost, there being nothing to give it to. Raises `ShapeError`, `ConfigError`.
    """
    has_axes("mask", mask, "BT")
    valid = as_mask(mask)
    reward_B = finite_rewards(reward).float()
    if len(reward_B) != len(valid):
        raise ShapeError(f"reward is {describe(reward)}; expected {list(mask.shape[:1])}, a reward a row of the mask.")
    position_T = torch.arange(valid.shape[1], device=valid.device)
    last_B1 = torch.where(valid, position_T, -1).amax(dim=1, keepdim=True) if valid.shape[1] else None
    rewards = torch.zeros(valid.shape, dtype=torch.float32, device=valid.device)
    if last_B1 is not None:
        rewards = torch.where(valid & (position_T == last_B1), reward_B.unsqueeze(-1), rewards)
    if logprobs is not None and reference_logprobs is not None:
        return rewards - kl_penalty(logprobs, reference_logprobs, valid, coef=kl_coef, estimator=estimator)
    if isinstance(kl_coef, Tensor) or kl_coef:
        raise ConfigError(f"algorithm.kl_coef={kl_coef} in the reward needs logprobs and reference_logprobs.")
    return rewards


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

    The rewards of turns are `turn_rewards`; what the whole attempt was given beyond them falls on its last turn. Each
    token of a turn has the turn's advantage.

    An attempt that is over has `R_jt = 0`, and is in the mean. So the baseline of turn t is a function of t and of
    other attempts alone, whatever this one does: the estimate is unbiased. A mean over those attempts only that have a
    turn t, this one among them, is not: which are left at t depends on their success, and the one that is left alone
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
