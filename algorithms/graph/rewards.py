"""Several rewards in the place of one: each is a stage and a metric of its own, and their weighted sum is the reward.

    rollout ─▶ reward_math_verify ─┐
       └─────▶ reward_brevity ─────┴─▶ weighted_sum ─ reward ─▶ compute ─ advantage ─▶ train

It serves runs that list `rewards`.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.stage import Stage
from penstock.conf.errors import ConfigError, DataflowError
from penstock.conf.reward import ENVIRONMENT_REWARD, WeightedRewardConfig


def with_rewards(flow: Dataflow, rewards: Sequence[WeightedRewardConfig]) -> Dataflow:
    """The graph with these in the place of the reward that `reward.function` names. Raises `DataflowError` for one that
    asks for none, or for several, `ConfigError` for two of one name."""
    default = [stage for stage in flow.of_kind("reward") if stage.function is None]
    if len(default) != 1:
        raise DataflowError(f"rewards is set, and the algorithm asks for {len(default)} rewards; it needs exactly one.")
    names = [reward.title for reward in rewards]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"rewards: two of them are called {twice!r}. Give one another name: {{name: …}}.")
    (stage,) = default
    columns = [Column(reward.column, "float32") for reward in rewards]
    scored = [
        Stage(
            column.name, "reward", "sample", stage.reads, (column,),
            rewarded=None if reward.function == ENVIRONMENT_REWARD else reward,
        )
        for reward, column in zip(rewards, columns, strict=True)
    ]  # fmt: skip
    add = partial(weighted_sum, weights=tuple(reward.weight for reward in rewards))
    reads = tuple(column.name for column in columns)
    total = Stage("weighted_sum", "compute", "sample", reads, stage.writes, function=WeightedSum(reads, add))
    stages = [other for one in flow.stages for other in ([*scored, total] if one is stage else [one])]
    return Dataflow(stages, flow.samples_per_prompt)


def weighted_sum(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The sum `Σ w_k r_k`: `[N]` float32 of `[N]` each.

    >>> weighted_sum([torch.tensor([1.0, 0.0]), torch.tensor([4.0, 4.0])], [1.0, 0.5])
    tensor([3., 2.])
    """
    total = sum(weight * value.double() for weight, value in zip(weights, values, strict=True))
    return torch.as_tensor(total).float()


class WeightedSum:
    """The function `weighted_sum` with a keyword for each column, as stages call functions."""

    def __init__(self, columns: Sequence[str], add: "partial[Tensor]") -> None:
        self._columns, self._add = columns, add
        self.__name__ = "weighted_sum"

    def __call__(self, **values: Tensor) -> Tensor:
        return self._add([values[name] for name in self._columns])
