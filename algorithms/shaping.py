"""Changes of rewards, and of groups, before there is an advantage: functions of `compute` and `filter` stages.

Legend: G samples of one group (the same prompt); N rows of a unit.
"""

import torch
from torch import Tensor

from penstock.algorithms.advantages import finite_rewards
from penstock.algorithms.checks import non_negative
from penstock.conf.errors import ConfigError, ShapeError


def has_signal(reward: Tensor) -> bool:
    """Return whether the rewards of a group differ. A group that agrees has advantage 0 throughout: DAPO's dynamic
    sampling keeps those with `0 < correct < G`, 2503.14476 eq. 11.

    `reward`: `[G]`, finite. Raises `ShapeError`.
    """
    reward_G = finite_rewards(reward)
    return len(reward_G) > 1 and bool((reward_G != reward_G[0]).any())


def overlong_reward(
    reward: Tensor, response_ids: list[Tensor], *, limit: int, buffer: int, penalty: float = 1.0
) -> Tensor:
    """The reward less a soft punishment of long responses, 2503.14476 eq. 13:

        0                                         up to limit - buffer tokens
        penalty · (tokens - (limit - buffer)) / buffer    up to limit
        penalty                                   beyond

    `reward`: `[N]`. `response_ids`: `[T_i]` each, of which only the length counts. `limit`, `buffer`: tokens. Returns
    `[N]` float32. Raises `ShapeError`, `ConfigError`.
    """
    if not 0 < buffer <= limit:
        raise ConfigError(
            f"algorithm.overlong_tokens={buffer} must lie above 0 and not above algorithm.overlong_limit={limit}."
        )
    non_negative("algorithm.overlong_penalty", penalty)
    reward_N = finite_rewards(reward)
    if len(response_ids) != len(reward_N):
        raise ShapeError(f"response_ids has {len(response_ids)} rows; expected {len(reward_N)}, as many as reward.")
    length_N = torch.tensor([len(tokens) for tokens in response_ids], dtype=torch.float64)
    share_N = ((length_N - (limit - buffer)) / buffer).clamp(0.0, 1.0)
    return (reward_N - penalty * share_N).float()
