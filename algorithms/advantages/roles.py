"""The advantage of self-play: what a player gets beyond what its role mostly gets.

Who moves first in a game wins more often. Against one baseline for both sides, the first player's moves look good and
the second's bad whatever they were; against a baseline for each role, moves are compared with moves from that side.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.algorithms.advantages.outcome import advantage, finite_rewards
from penstock.algorithms.graph.columns import field_of
from penstock.conf.checks import within
from penstock.conf.errors import ShapeError


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
