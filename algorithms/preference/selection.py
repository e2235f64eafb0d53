"""Selection by rewards of what the losses of this folder compare: a pair of a group, or single samples, good or bad.

    rollout ─▶ reward ─ reward ─▶ best_and_worst ─ preferred ─▶ train (dpo_loss, …)
    rollout, or dataset ─▶ reward ─ reward ─▶ good_or_bad ─ desirable ─▶ train (kto_loss)

Pure functions, for `compute` stages.

Legend: G samples of one group (the same prompt).
"""

import torch
from torch import Tensor

from penstock.algorithms.advantages import finite_rewards
from penstock.algorithms.checks import non_negative


def best_and_worst(reward: Tensor, *, min_gap: float = 0.0) -> Tensor:
    """Mark the sample with the highest reward +1, the one with the lowest -1, the others 0: online DPO, 2402.04792,
    with two samples; best against worst of G is 2404.19733's choice among scored samples.

    Of several with the same reward the first counts. A group whose rewards are all equal, or whose highest and lowest
    are less than `min_gap` apart, has nothing to say: 0 for all its samples.

    `reward`: `[G]`, any real dtype, finite. Returns `[G]` float32. Raises `ShapeError`, `ConfigError`.

    >>> best_and_worst(torch.tensor([0.0, 1.0, 0.5, 1.0]))
    tensor([-1.,  1.,  0.,  0.])
    """
    non_negative("algorithm.min_gap", min_gap)
    reward_G = finite_rewards(reward)
    preferred_G = torch.zeros(len(reward_G), dtype=torch.float32, device=reward.device)
    if len(reward_G) == 0:
        return preferred_G
    highest, lowest = reward_G.max(), reward_G.min()
    if highest == lowest or highest - lowest < min_gap:
        return preferred_G
    preferred_G[_first(reward_G == highest)] = 1.0
    preferred_G[_first(reward_G == lowest)] = -1.0
    return preferred_G


def good_or_bad(reward: Tensor, *, threshold: float = 0.5) -> Tensor:
    """Mark samples +1 where the reward is above `threshold`, -1 where it is not: the two kinds of KTO, 2402.01306.

    `reward`: `[G]`, any real dtype, finite. Returns `[G]` float32. Raises `ShapeError`.

    >>> good_or_bad(torch.tensor([1.0, 0.5, 0.0]))
    tensor([ 1., -1., -1.])
    """
    return torch.where(finite_rewards(reward) > threshold, 1.0, -1.0).float()


def _first(flags_G: Tensor) -> int:
    # argmax alone does not promise which of several equal values it finds
    return int(flags_G.nonzero()[0])
