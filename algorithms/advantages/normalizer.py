"""Outcome rewards to advantages: subtract a centre, divide by a scale, each of the group or of the batch.

`normalized` is the whole space that GRPO, Dr. GRPO, RLOO and REINFORCE++ are points of; `outcome.py` has their names.

Legend: N samples with their groups' ids; G samples of one group (the same prompt).
"""

import torch
from torch import Tensor

from penstock.algorithms.checks import describe, has_axes, non_negative, same_shape
from penstock.conf.checks import one_of
from penstock.conf.errors import ShapeError

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
