"""Advantages from rewards: the amount by which a sample, a token or a turn is better than was to be expected, by the
names of their papers. `algorithm.advantage=rloo` finds what `@advantage("rloo")` has registered.

    @advantage("mine")
    def mine(reward: Tensor, novelty: Tensor, *, weight: float = 1.0) -> Tensor: ...

Parameters without a default are columns, as of a loss: `reward` `[G]`, `response_ids` a list of `[T_i]`. Settings are
keyword-only.

**Outcomes**: one reward a sample in, one advantage a sample out. `normalized` is the whole space that GRPO, Dr. GRPO,
RLOO and REINFORCE++ are points of: subtract a centre, divide by a scale, each of the group or of the batch. Each
advantage takes the rewards of one group, as a stage sees them, or those of many with their `group_ids`. The two
"reinforce_plus_plus" take statistics of the batch: give them the whole batch's rewards. Advantages are `[N]` float32;
corner cases are those of `normalized`. Every function raises `ShapeError` for rewards that are not `[N]` or not finite,
`ConfigError` for a setting out of range.

**Tokens and turns**: the amount by which the rest of a response goes better than was expected.

    reward ─ token_rewards: all of it at the last token, a KL penalty at each ─┐
    critic ─ values ───────────────────────────────────────────────────────────┴─▶ gae ─▶ advantages, returns ─ whitened

    turn_rewards ─▶ turn_rloo  what an attempt still gets after a turn, compared with that of others after theirs
                 ├▶ gigpo      the same, compared with that of turns in the same state; and the whole attempts
                 ├▶ mt_grpo    the turn's own reward, compared with that of others' turns; and the outcomes
         values ─┴▶ turn_gae   gae, of which each turn is a step

**Sides of a game** (`rae`): what a player gets beyond what its role mostly gets. Who moves first wins more often:
against one baseline for both sides, the first player's moves look good and the second's bad whatever they were.

Legend: N samples, with their groups' ids; G samples of one group (the same prompt), or attempts at one task; B rows, T
response tokens, padded: what lies under `mask == 0` may be anything, NaN included; T_i tokens of response i; K_i turns
of attempt i.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from penstock.algorithms.aggregation import masked
from penstock.algorithms.checks import as_mask, checked_mask, describe, has_axes, non_negative, positive, same_shape
from penstock.algorithms.graph.columns import field_of
from penstock.algorithms.kl import kl_penalty
from penstock.algorithms.registry import FormulaRegistry
from penstock.conf.checks import one_of, within
from penstock.conf.errors import ConfigError, ShapeError

ADVANTAGES = FormulaRegistry("algorithm.advantage")
advantage = ADVANTAGES.register
CENTRES = ("none", "group", "batch", "leave_one_out")
SCALES = ("none", "group", "batch")


def normalized(
    reward_N: Tensor,
    group_ids_N: Tensor | None = None,
    *,
    centre: str = "group",
    scale: str = "group",
    eps: float = 1e-6,
) -> Tensor:
    """Normalize rewards: `A_i = (r_i - centre) / (scale + eps)`, `[N]` float32.

    `reward_N`: any real dtype, finite. `group_ids_N`: integers, equal for samples of the same prompt, in any order;
    None: all are one group.
    `centre`: "none", 0; "group", the mean of the sample's group; "batch", the mean of all; "leave_one_out", the mean
    of the *others* of the group. `scale`: "none"; "group" or "batch", the standard deviation of the centred rewards of
    the group or of all, that of a sample (divided by n - 1). Statistics are taken in float64.

    Corner cases. A sample that is alone where its centre is taken from has nothing to be compared with: 0, as are
    samples whose group (or batch) agrees altogether, exactly. Where a deviation is exactly 0 there is no scale, and
    nothing is divided.

    >>> normalized(torch.tensor([1.0, 0.0, 5.0, 3.0]), torch.tensor([7, 7, 8, 8]), scale="none")
    tensor([ 0.5000, -0.5000,  1.0000, -1.0000])

    Raises `ShapeError` if the rewards are not `[N]` or not finite, or ids of another shape; `ConfigError` for settings.
    """
    one_of("centre", centre, CENTRES)
    one_of("scale", scale, SCALES)
    non_negative("eps", eps)
    reward = finite_rewards(reward_N)
    batch = torch.zeros_like(reward, dtype=torch.long)
    group = batch if group_ids_N is None else groups_of(reward_N, group_ids_N)
    if centre != "none":
        reward = _centred(reward, batch if centre == "batch" else group, others=centre == "leave_one_out")
    if scale != "none":
        deviation = _deviation(reward, batch if scale == "batch" else group)
        reward = torch.where(deviation > 0, reward / (deviation + eps), reward)
    return reward.float()


def finite_rewards(reward: Tensor, name: str = "reward") -> Tensor:
    """The rewards `[G]` as float64. Raises `ShapeError` for another shape, or naming the first reward that is not
    finite."""
    has_axes(name, reward, "G")
    reward_G = reward.detach().double()
    bad = (~reward_G.isfinite()).nonzero()
    if len(bad):
        where = int(bad[0])
        raise ShapeError(
            f"{name} is {describe(reward)} with {float(reward_G[where])} at position {where}; expected finite rewards."
        )
    return reward_G


def groups_of(reward_N: Tensor, group_ids_N: Tensor) -> Tensor:
    """The ids as 0, 1, … `[N]` int64. Raises `ShapeError` unless they have the rewards' shape."""
    same_shape(reward_N, "reward", group_ids=group_ids_N)
    inverse: Tensor = torch.unique(group_ids_N, return_inverse=True)[1]
    return inverse


def group_sum(values_N: Tensor, group_N: Tensor) -> Tensor:
    """The sum over each sample's group, `[N]`, of the values' dtype. `group_N`: 0, 1, … as of `groups_of`."""
    num_groups = int(group_N.max()) + 1 if len(group_N) else 0
    return values_N.new_zeros(num_groups).index_add(0, group_N, values_N)[group_N]


def group_agrees(values_N: Tensor, group_N: Tensor) -> Tensor:
    """True for samples of groups whose values are all the same, `[N]`; a sample alone agrees with itself."""
    num_groups = int(group_N.max()) + 1 if len(group_N) else 0
    low, high = (
        values_N.new_zeros(num_groups).scatter_reduce(0, group_N, values_N, how, include_self=False)
        for how in ("amin", "amax")
    )
    return (low == high)[group_N]


def _centred(values_N: Tensor, group_N: Tensor, *, others: bool) -> Tensor:
    """Subtract the centre. Exactly 0 where the group agrees, which the rounding of a mean would not give."""
    count = group_sum(torch.ones_like(values_N), group_N)
    centred = values_N - group_sum(values_N, group_N) / count
    if others:  # r - (S - r) / (n - 1) = (r - S / n) · n / (n - 1)
        centred = centred * count / (count - 1).clamp(min=1)
    return torch.where(group_agrees(values_N, group_N), 0.0, centred)


def _deviation(values_N: Tensor, group_N: Tensor) -> Tensor:
    """The sample standard deviation of each sample's group, `[N]`; 0 where the group agrees."""
    count = group_sum(torch.ones_like(values_N), group_N)
    squares = (values_N - group_sum(values_N, group_N) / count).square()
    deviation = (group_sum(squares, group_N) / (count - 1).clamp(min=1)).sqrt()
    return torch.where(group_agrees(values_N, group_N), 0.0, deviation)


@advantage("grpo")
def group_advantage(
    reward: Tensor, group_ids: Tensor | None = None, *, normalize_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """GRPO's outcome advantage, `A_i = (r_i - mean(r)) / (std(r) + eps)`: 2402.03300, section 4.1.2.

    `normalize_std=False`: `A_i = r_i - mean(r)`, Dr. GRPO, 2503.20783, section 3.2, which does not favour groups that
    nearly agree.

    The standard deviation is that of a sample (divided by G - 1), as `torch.std` and the common trainers have it; the
    paper leaves it open. A group of one has nothing to be compared with and gets 0; a group whose rewards are all equal
    gets exactly 0.

    >>> group_advantage(torch.tensor([1.0, 0.0]), normalize_std=False)
    tensor([ 0.5000, -0.5000])
    """
    return normalized(reward, group_ids, centre="group", scale="group" if normalize_std else "none", eps=eps)


@advantage("dr_grpo")
def dr_grpo(reward: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """Dr. GRPO, `A_i = r_i - mean(r)`: 2503.20783, section 3.2. Its loss goes with it: aggregation "constant"."""
    return normalized(reward, group_ids, centre="group", scale="none")


@advantage("rloo")
def rloo(reward: Tensor, group_ids: Tensor | None = None) -> Tensor:
    """RLOO, `A_i = r_i - mean of the others' rewards`: 2402.14740. An unbiased baseline, since it does not
    depend on the sample itself; Dr. GRPO's advantage times G / (G - 1)."""
    return normalized(reward, group_ids, centre="leave_one_out", scale="none")


@advantage("reinforce_plus_plus")
def reinforce_plus_plus(reward: Tensor, *, eps: float = 1e-6) -> Tensor:
    """REINFORCE++, `A_i = (r_i - mean(r)) / (std(r) + eps)` over the **batch**: 2501.03262. No groups are needed.

    The paper has the KL penalty in the rewards of tokens and normalises over tokens: that is `token_rewards`, then
    `gae` with values 0 and lam 1, then `whitened`. This is the same for outcome rewards, a sample counting once
    whatever its length.
    """
    return normalized(reward, centre="batch", scale="batch", eps=eps)


@advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(reward: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """REINFORCE++ with a baseline, `A_i = (r_i - mean of the group) / (std of the batch + eps)`: 2501.03262.

    The deviation is that of the centred rewards over the batch, so that one group that nearly agrees is not blown up.
    """
    return normalized(reward, group_ids, centre="group", scale="batch", eps=eps)


@advantage("opo")
def opo(reward: Tensor, response_ids: Sequence[Tensor] | Tensor, group_ids: Tensor | None = None) -> Tensor:
    """OPO, `A_i = r_i - Σ_j l_j r_j / Σ_j l_j` over the group: 2505.23585, the optimal baseline if a response's squared
    gradient grows with its length l.

    `response_ids`: the tokens `[T_i]` of each sample, of which only the number counts; or the lengths themselves,
    `[N]`. A group of one gets 0, as does one without a token.
    """
    reward_N = finite_rewards(reward)
    length_N = _lengths(response_ids, reward_N)
    group_N = torch.zeros_like(reward_N, dtype=torch.long) if group_ids is None else groups_of(reward, group_ids)
    total_N = group_sum(length_N, group_N)
    baseline_N = group_sum(length_N * reward_N, group_N) / total_N.clamp(min=1)
    nothing = group_agrees(reward_N, group_N) | (total_N == 0)
    return torch.where(nothing, 0.0, reward_N - baseline_N).float()


@advantage("remax")
def remax(reward: Tensor, greedy_reward: Tensor) -> Tensor:
    """ReMax, `A_i = r_i - r(greedy response to the same prompt)`: 2310.10505. Both `[N]`."""
    same_shape(reward, "reward", greedy_reward=greedy_reward)
    return (finite_rewards(reward) - finite_rewards(greedy_reward, "greedy_reward")).float()


@advantage("gpg")
def gpg(reward: Tensor, group_ids: Tensor | None = None, *, norm: float = 1.0) -> Tensor:
    """GPG, `A_i = α (r_i - mean(r)) / norm`: 2504.02546. `α = N / (samples in groups that do not agree)`.

    Groups that agree have no gradient but count in the mean over the batch; α takes them out. It is of whatever rewards
    it gets: of one group it is 1, so give it the batch's. `norm`: 1, or what the rewards are to be divided by; above 0.
    """
    positive("norm", norm)
    centred_N = normalized(reward, group_ids, centre="group", scale="none")
    group_N = torch.zeros_like(centred_N, dtype=torch.long) if group_ids is None else groups_of(reward, group_ids)
    useful = int((~group_agrees(finite_rewards(reward), group_N)).sum())
    return centred_N * (len(centred_N) / max(useful, 1) / norm)


def _lengths(response_ids: Sequence[Tensor] | Tensor, reward_N: Tensor) -> Tensor:
    if isinstance(response_ids, Tensor):
        lengths = response_ids.detach()
    else:
        lengths = torch.tensor([len(tokens) for tokens in response_ids], device=reward_N.device)
    same_shape(reward_N, "reward", response_ids=lengths)
    if bool((lengths < 0).any()):
        raise ShapeError(f"response_ids has a length of {int(lengths.min())}; expected lengths of at least 0.")
    return lengths.to(reward_N.dtype)


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
    valid = checked_mask("rewards", rewards, mask, values=values)
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
    valid = checked_mask("advantage", advantage, mask)
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
    orders, played = _played(reward, turn_rewards, turn_tokens, turn_ids)
    returns = _returns(played, gamma)
    if not returns:
        return []
    returns_GK = pad_sequence(returns, batch_first=True)
    others = max(1, len(returns_GK) - 1)
    baseline_GK = (returns_GK.sum(dim=0, keepdim=True) - returns_GK) / others
    advantages_GK = returns_GK - baseline_GK if len(returns_GK) > 1 else torch.zeros_like(returns_GK)
    return _spread(advantages_GK, orders, turn_tokens)


@advantage("gigpo")
def gigpo(
    reward: Tensor,
    turn_rewards: Sequence[Tensor],
    turn_tokens: Sequence[Tensor],
    turn_ids: Sequence[Tensor],
    turn_states: Sequence[Tensor],
    *,
    gamma: float = 0.95,
    omega: float = 1.0,
    normalize_std: bool = True,
) -> list[Tensor]:
    """GiGPO (2505.10978): the attempt against the group's others, and each turn against all turns of the group that
    began in the same state, its anchor. One `[T_i]` float32 for each attempt.

        A_it = (r_i - mean r) / std r + omega · (R_it - mean R) / std R,   R_it = Σ_{s >= t} gamma^(s - t) r_is

    The second mean and deviation are over the turns of that state, of this attempt too. A turn whose state no other has
    gets 0 there, so that with one turn and different states, or `omega=0`, this is `grpo`. `normalize_std=False`:
    nothing is divided.

    `turn_states`: `[K_i]` integers, equal for turns in the same state. The rest as in `turn_rloo`. Raises `ShapeError`,
    `ConfigError`.
    """
    non_negative("omega", omega)
    scale = "group" if normalize_std else "none"
    orders, played = _played(reward, turn_rewards, turn_tokens, turn_ids)
    returns = _returns(played, gamma)
    states = [of_turns[order] for of_turns, order in zip(turn_states, orders, strict=True)]
    if not played:
        return []
    attempts_G = normalized(reward, scale=scale)
    turns_N = normalized(torch.cat(returns), torch.cat(states), scale=scale)
    of_attempts = torch.split(turns_N, [len(one) for one in returns])
    values = [attempt + omega * turns for attempt, turns in zip(attempts_G, of_attempts, strict=True)]
    return _spread(values, orders, turn_tokens)


@advantage("mt_grpo")
def mt_grpo(
    reward: Tensor,
    turn_rewards: Sequence[Tensor],
    turn_tokens: Sequence[Tensor],
    turn_ids: Sequence[Tensor],
    *,
    weight: float = 1.0,
    normalize_std: bool = True,
) -> list[Tensor]:
    """MT-GRPO (2505.11821 v1): the outcome's advantage, and before the last turn that of the turn's own reward. One
    `[T_i]` float32 for each attempt.

        A_it = (o_i - mean o) / std o + weight · (r_it - mean r_t) / std r_t,   in the last turn the first term alone

    The outcome `o_i` is what falls on the last turn (`turn_rloo`), `r_t` are the rewards of the t-th turns of all
    attempts for which it is not the last; the paper has two turns. With one turn, or where turns have no rewards of
    their own, this is `grpo`. `normalize_std=False`: nothing is divided.

    Arguments as in `turn_rloo`. Raises `ShapeError`, `ConfigError`.
    """
    non_negative("weight", weight)
    scale = "group" if normalize_std else "none"
    orders, played = _played(reward, turn_rewards, turn_tokens, turn_ids)
    if not played:
        return []
    outcomes_G = normalized(torch.stack([rewards[-1] for rewards in played]), scale=scale)
    places = [torch.arange(len(rewards) - 1) for rewards in played]
    turns_N = normalized(torch.cat([rewards[:-1] for rewards in played]), torch.cat(places), scale=scale)
    of_attempts = torch.split(turns_N, [len(one) for one in places])
    values = [
        outcome + weight * torch.cat([turns, turns.new_zeros(1)])
        for outcome, turns in zip(outcomes_G, of_attempts, strict=True)
    ]
    return _spread(values, orders, turn_tokens)


def turn_gae(
    reward: Tensor,
    old_values: Sequence[Tensor],
    turn_rewards: Sequence[Tensor],
    turn_tokens: Sequence[Tensor],
    turn_ids: Sequence[Tensor],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[list[Tensor], list[Tensor]]:
    """`gae` of which each turn is one step (Turn-PPO, 2512.17008; `turn_wise_gae` of VAGEN, 2510.16907). Returns the
    advantages and the returns, `[T_i]` float32 for each attempt; all tokens of a turn have the same.

        δ_t = r_t + γ V_{t+1} - V_t,   A_t = δ_t + γ λ A_{t+1},   return_t = A_t + V_t

    `V_t` is the critic's value before the first token of turn t, which has read all that the environment said until
    then; after the last turn it is 0. A turn without tokens (`environment.old_turns=context`) is stepped over.

    `old_values`: `[T_i]`. `gamma`, `lam`: per turn, in [0, 1]. The rest as in `turn_rloo`. Raises `ShapeError`,
    `ConfigError`.
    """
    orders, played = _played(reward, turn_rewards, turn_tokens, turn_ids)
    if not played:
        return [], []
    lengths = [tokens.long()[order] for tokens, order in zip(turn_tokens, orders, strict=True)]
    values = []
    for value, tokens, order in zip(old_values, turn_tokens, orders, strict=True):
        starts = tokens.long().cumsum(0) - tokens.long()
        values.append(torch.cat([value, value.new_zeros(1)])[starts[order]])
    mask = pad_sequence([length > 0 for length in lengths], batch_first=True)
    rewards_BK, values_BK = (pad_sequence(some, batch_first=True) for some in (played, values))
    found = gae(rewards_BK, values_BK, mask, gamma=gamma, lam=lam)
    advantages, returns = (_spread(one, orders, turn_tokens) for one in found)
    return advantages, returns


def _played(
    reward: Tensor, turn_rewards: Sequence[Tensor], turn_tokens: Sequence[Tensor], turn_ids: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """For each attempt the places of its turns in the order in which they were played, and their rewards in this order,
    `[K_i]` float64, the last with what the whole was given beyond them. Raises `ShapeError`."""
    reward_G = finite_rewards(reward)
    if not len(reward_G) == len(turn_rewards) == len(turn_tokens) == len(turn_ids):
        raise ShapeError(
            f"turn_rewards, turn_tokens and turn_ids have {len(turn_rewards)}, {len(turn_tokens)} and "
            f"{len(turn_ids)} rows; expected {len(reward_G)}, as many as reward."
        )
    orders = [torch.argsort(ids) for ids in turn_ids]
    played = [rewards.double()[order] for rewards, order in zip(turn_rewards, orders, strict=True)]
    for whole, rewards in zip(reward_G, played, strict=True):
        rewards[-1:] += whole - rewards.sum()
    return orders, played


def _returns(played: Sequence[Tensor], gamma: float) -> list[Tensor]:
    """The discounted sums of the rewards from each turn on, `[K_i]` float64. Raises `ConfigError`."""
    within("gamma", gamma, 0.0, 1.0)
    found = []
    for rewards in played:
        later, returns = 0.0, torch.empty_like(rewards)
        for turn in range(len(rewards) - 1, -1, -1):
            returns[turn] = later = float(rewards[turn]) + gamma * later
        found.append(returns)
    return found


def _spread(values: Sequence[Tensor] | Tensor, orders: Sequence[Tensor], turn_tokens: Sequence[Tensor]) -> list[Tensor]:
    """The value of each turn, in the order in which they were played, for each of its tokens, `[T_i]` float32."""
    found = []
    for of_turns, order, lengths in zip(values, orders, turn_tokens, strict=True):
        of_places = torch.empty(len(order), dtype=torch.float32)
        of_places[order] = of_turns[: len(order)].float()
        found.append(of_places.repeat_interleave(lengths.long()))
    return found


@dataclass(frozen=True)
class RoleBaselines:
    """The baseline of each role. A state of `Dataflow.compute`."""

    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics `baseline/ROLE`."""
        return {f"baseline/{role}": value for role, value in self.values.items()}


@advantage("rae")
def role_advantage(
    reward: Tensor, task: list[str], *, role: str = "role", decay: float = 0.95, state: RoleBaselines
) -> tuple[Tensor, RoleBaselines]:
    """Role-conditioned advantage estimation (SPIRAL, 2506.24119), for each sample of a batch:

        b_p ← decay · b_p + (1 - decay) · mean of the rewards of role p,   A_i = r_i - b_p(i)

    A role's first batch is its first baseline. `reward`: `[N]`. `task`: the column, JSON; its field `role`, or that of
    an environment's task's data, names the role. Returns `[N]` float32, and the baselines of the next step. Wants
    `algorithm.advantage_per=batch`. Raises `ShapeError`, `ConfigError`, `DataflowError` for a task without the field.

    >>> tasks = ['{"side": "x"}', '{"side": "o"}', '{"side": "x"}']
    >>> role_advantage(torch.tensor([1.0, 0.0, 0.5]), tasks, role="side", state=RoleBaselines())[0]
    tensor([ 0.2500,  0.0000, -0.2500])
    """
    within("algorithm.advantage_options.decay", decay, 0.0, 1.0)
    reward_N = finite_rewards(reward)
    if len(task) != len(reward):
        raise ShapeError(f"task has {len(task)} rows; expected {len(reward)}, as many as reward.")
    roles = [field_of(one, role, "algorithm.advantage_options.role") for one in task]
    rewards = defaultdict(list)
    for name, value in zip(roles, reward_N.tolist(), strict=True):
        rewards[name].append(value)
    values = dict(state.values)
    for name in sorted(rewards):
        mean = sum(rewards[name]) / len(rewards[name])
        values[name] = decay * values[name] + (1.0 - decay) * mean if name in values else mean
    baselines_N = torch.tensor([values[name] for name in roles], dtype=reward_N.dtype, device=reward.device)
    return (reward_N - baselines_N).float(), RoleBaselines(values)
