"""Advantages of whole responses by the names of their papers: one reward a sample in, one advantage a sample out.

Each takes the rewards of one group, as a stage sees them, or those of many with their `group_ids`. The two
"reinforce_plus_plus" take statistics of the batch: give them the whole batch's rewards. Advantages are `[N]` float32;
corner cases are those of `normalized`. Every function raises `ShapeError` for rewards that are not `[N]` or not finite,
`ConfigError` for a setting out of range.

Legend: N samples; G samples of one group (the same prompt); T_i response tokens of sample i.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.algorithms.advantages.normalizer import finite_rewards, group_agrees, group_sum, groups_of, normalized
from penstock.algorithms.advantages.registry import advantage
from penstock.algorithms.checks import positive, same_shape
from penstock.conf.errors import ShapeError


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
