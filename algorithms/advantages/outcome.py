"""Outcome advantages, of whole responses: one reward a sample in, one advantage a sample out, by the names of their
papers. `algorithm.advantage=rloo` finds what `@advantage("rloo")` has put here.

    @advantage("mine")
    def mine(reward: Tensor, novelty: Tensor, *, weight: float = 1.0) -> Tensor: ...

Parameters without a default are columns, as of a loss: `reward` `[G]`, `response_ids` a list of `[T_i]`. Settings are
keyword-only.

`normalized` is the whole space that GRPO, Dr. GRPO, RLOO and REINFORCE++ are points of: subtract a centre, divide by a
scale, each of the group or of the batch. Each advantage takes the rewards of one group, as a stage sees them, or those
of many with their `group_ids`. The two "reinforce_plus_plus" take statistics of the batch: give them the whole batch's
rewards. Advantages are `[N]` float32; corner cases are those of `normalized`. Every function raises `ShapeError` for
rewards that are not `[N]` or not finite, `ConfigError` for a setting out of range.

Legend: N samples, with their groups' ids; G samples of one group (the same prompt); T_i response tokens of sample i.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.algorithms.checks import describe, has_axes, non_negative, positive, same_shape
from penstock.algorithms.named import Named
from penstock.conf.checks import one_of
from penstock.conf.errors import ShapeError

ADVANTAGES = Named("algorithm.advantage")
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
