"""How much better a sample is than the others: rewards of a unit of rows to advantages of the same rows.

Pure functions, called by the `compute` stages of a dataflow with one tensor a column read.

Legend: G samples of one group (the same prompt).
"""

import torch
from torch import Tensor

from penstock.algorithms.checks import describe, has_axes, non_negative
from penstock.conf.errors import ShapeError


def group_advantage(reward: Tensor, *, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """GRPO's outcome advantage, `A_i = (r_i - mean(r)) / (std(r) + eps)`: 2402.03300, section 4.1.2.

    `normalize_std=False`: `A_i = r_i - mean(r)`, Dr. GRPO, 2503.20783, section 3.2, which does not favour groups that
    nearly agree.

    `reward`: `[G]`, any real dtype, finite. Returns `[G]` float32. The statistics are taken in float64.
    The standard deviation is that of a sample (divided by G - 1), as `torch.std` and the common trainers have it; the
    paper leaves it open. A group of one has nothing to be compared with and gets 0; a group whose rewards are all equal
    gets exactly 0.

    >>> group_advantage(torch.tensor([1.0, 0.0]), normalize_std=False)
    tensor([ 0.5000, -0.5000])

    Raises `ShapeError` if the rewards are not `[G]` or not finite.
    """
    reward_G = finite_rewards(reward)
    non_negative("eps", eps)
    if len(reward_G) < 2 or bool((reward_G == reward_G[0]).all()):
        return torch.zeros(len(reward_G), dtype=torch.float32, device=reward.device)
    centred_G = reward_G - reward_G.mean()
    if normalize_std:
        centred_G = centred_G / (reward_G.std() + eps)
    return centred_G.float()


def finite_rewards(reward: Tensor) -> Tensor:
    """The rewards `[G]` as float64. Raises `ShapeError` for another shape, or naming the first reward that is not
    finite."""
    has_axes("reward", reward, "G")
    reward_G = reward.detach().double()
    bad = (~reward_G.isfinite()).nonzero()
    if len(bad):
        where = int(bad[0])
        raise ShapeError(
            f"reward is {describe(reward)} with {float(reward_G[where])} at position {where}; expected finite rewards."
        )
    return reward_G
