"""Every algorithm that a recipe can name, those that come with Penstock and a user's own that were imported; and the
dataflow of a run: the algorithm's graph, rewritten for several rewards, an environment, pictures. What the algorithm
says of advantages and losses stays as it is.

Several rewards are a stage and a metric each, and their weighted sum is the reward:

    rollout ─▶ reward_math_verify ─┐
       └─────▶ reward_brevity ─────┴─▶ weighted_sum ─ reward ─▶ compute ─ advantage ─▶ train

In an environment the same graph is over trajectories. A token column has one value for each sampled token of the whole
trajectory, a sample column one for each trajectory:

    source ─ task ─▶ rollout ─ response_ids, context_ids, spans, …, reward ─▶ compute ─ advantage ─▶ train

With `rollout.truncated` samples that a limit has cut can leave once the others have been compared with them:

    compute ─ advantage ─▶ masked ─▶ train

With `rollout.router_replay` the experts that the engine chose go from the rollout to the trainers as a column. With
`rollout.max_pictures` pictures go wherever the tokens go that have places for them:

    source ─ prompt_ids, pictures, picture_ranges ─▶ rollout, logprobs, train
    source ─ task, pictures ─▶ rollout ─ context_ids, spans, seen_pictures, seen_ranges ─▶ logprobs, train
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.algorithms.builtin import grpo, imitation, policy_gradient, ppo, preferences  # noqa: F401 - they register themselves
from penstock.algorithms.graph.columns import (
    HINTED,
    PROMPT_PICTURES,
    ROUTED_EXPERTS,
    SEEN_PICTURES,
    SEQUENCE_COLUMNS,
    STANDARD_COLUMNS,
    TRAJECTORY_COLUMNS,
    TURN_STATES,
    Column,
)
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.policies import with_policies
from penstock.algorithms.graph.stage import Stage
from penstock.algorithms.registry import ALGORITHMS as ALGORITHMS
from penstock.algorithms.registry import Algorithm
from penstock.conf.algorithms import AlgorithmConfig
from penstock.conf.errors import ConfigError, DataflowError, suggest
from penstock.conf.reward import ENVIRONMENT_REWARD, WeightedRewardConfig
from penstock.conf.run import RunConfig

FINISH, MASKED = "finish_reason", "masked_kept"
"""Column that says which limit has truncated a sample, and that of the filter which masks some of them."""


def find_algorithm(name: str) -> Algorithm:
    """The algorithm of that name. Raises `ConfigError` with the nearest known name."""
    if name == AlgorithmConfig.name:
        raise ConfigError("no algorithm is named: RunConfig(algorithm=GrpoConfig()), for instance, of penstock.conf.")
    if name not in ALGORITHMS:
        raise ConfigError(f"algorithm={name}: unknown{suggest(name, ALGORITHMS)}")
    return ALGORITHMS[name]


def build_dataflow(config: AlgorithmConfig) -> Dataflow:
    """The checked dataflow of a configuration."""
    return find_algorithm(config.name).build(config).check()


def dataflow_of(config: RunConfig, flow: Dataflow | None = None) -> Dataflow:
    """The checked dataflow of a run: the one given, or its algorithm's, with its rewards, in its environment and with
    its pictures if it has any."""
    flow = flow if flow is not None else find_algorithm(config.algorithm.name).build(config.algorithm_of_run)
    if config.rewards:
        flow = with_rewards(flow, config.rewards)
    if config.environment.name is not None and not flow.has_environment:
        flow = in_environment(flow)
    flow = with_policies(flow)
    masked = config.rollout.truncated_to("mask")
    if masked and MASKED not in flow.columns:
        flow = with_masked(flow.check(), masked)
    if config.rollout.router_replay and ROUTED_EXPERTS not in flow.columns:
        flow = with_router_replay(flow.check())
    if config.rollout.max_pictures and PROMPT_PICTURES[0] not in flow.columns:
        flow = with_pictures(flow.check())
    flow.check()
    if config.trainer.replay.share:
        _check_replays(flow, f"trainer.replay.share={config.trainer.replay.share:g}")
    return flow


def _check_replays(flow: Dataflow, key: str) -> None:
    """Raise `ConfigError` for a dataflow whose rows cannot be trained again alone, in a later step."""
    (train,), reads = flow.of_kind("train"), flow.batch_reads()
    if train.takes_groups:
        problem = "the loss compares the samples of a group, and rows are trained again without the others"
    elif "behavior_logprobs" not in reads or "reward" not in flow.stored_columns:
        problem = "the algorithm samples and rewards nothing, or does not correct for stale tokens"
    elif flow.of_kind("critic"):
        problem = "the critic's values of earlier steps are out of date"
    else:
        return
    raise ConfigError(f"{key}: {problem}. Set it to 0, or take another algorithm, such as grpo.")


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
    columns = [Column(reward.column, "float32", nan_ok=True) for reward in rewards]
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
    """The sum `Σ w_k r_k`: `[N]` float32 of `[N]` each. NaN, a reward that a sample does not count for, adds nothing.

    >>> weighted_sum([torch.tensor([1.0, 0.0]), torch.tensor([4.0, 4.0])], [1.0, 0.5])
    tensor([3., 2.])
    >>> weighted_sum([torch.tensor([1.0, torch.nan]), torch.tensor([4.0, 4.0])], [1.0, 0.5])
    tensor([3., 2.])
    """
    total = sum(weight * value.double().nan_to_num() for weight, value in zip(weights, values, strict=True))
    return torch.as_tensor(total).float()


class WeightedSum:
    """The function `weighted_sum` with a keyword for each column, as stages call functions."""

    def __init__(self, columns: Sequence[str], add: "partial[Tensor]") -> None:
        self._columns, self._add = columns, add
        self.__name__ = "weighted_sum"

    def __call__(self, **values: Tensor) -> Tensor:
        return self._add([values[name] for name in self._columns])


def in_environment(flow: Dataflow) -> Dataflow:
    """The graph of `flow` where an environment makes the rows and their rewards. Raises `DataflowError` for one whose
    rows are not sampled, or need more than an environment does."""
    if not flow.of_kind("rollout"):
        raise DataflowError("environment.name is set, and the algorithm samples nothing: it has no flow.rollout(...).")
    if flow.of_kind("greedy_rollout"):
        raise DataflowError(
            "environment.name is set, and the algorithm compares with a greedy response to each prompt, which an "
            "environment has none of. Take another algorithm, such as grpo or rloo."
        )
    _check_has_no_hint(flow, "environment.name is set, and an environment makes prompts of its own")
    rewards = [stage for stage in flow.of_kind("reward") if stage.function is None and stage.rewarded is None]
    if len(rewards) > 1:
        names = ", ".join(stage.name for stage in rewards)
        raise DataflowError(f"environment.name is set: it gives one reward, and stages {names} each ask for it.")
    given = [column for stage in rewards for column in stage.writes]
    if any(TURN_STATES in stage.reads for stage in flow.stages):
        given.append(STANDARD_COLUMNS[TURN_STATES])
    stages = [_in_environment(stage, given) for stage in flow.stages if stage not in rewards]
    return Dataflow(stages, flow.samples_per_prompt)


def with_masked(flow: Dataflow, limits: Collection[str]) -> Dataflow:
    """The graph of `flow` where samples that one of these limits has truncated are compared with the others of their
    group, and are not trained. Raises `DataflowError` for one that samples nothing, or in which what the loss reads of
    them is not there before the step's batch is, or depends on all of the group."""
    (train,), key = flow.of_kind("train"), "rollout.truncated: mask"
    deciding = (*flow.of_kind("compute"), *flow.of_kind("filter"))  # a group is judged whole before a sample leaves it
    written = {column.name: stage for stage in deciding for column in stage.writes}
    made = [name for name in flow.reads_of(train) if name in written]
    if not flow.of_kind("rollout"):
        raise DataflowError(f"{key}, and the algorithm samples nothing. Leave it out.")
    if late := [name for name in made if written[name].is_in_trainer]:
        raise DataflowError(f"{key}: the algorithm makes {late[0]!r} of the step's whole batch. Take drop or train.")
    if train.takes_groups:
        raise DataflowError(f"{key}: the algorithm's loss compares the samples of a group. Take drop or train.")
    kept = Column(MASKED, "bool")
    masked = Stage(
        "masked", "filter", "sample", (FINISH, *made), (kept,), function=TruncationFilter(limits), reason="masked"
    )
    stages = [one for stage in flow.stages for one in ((masked, stage) if stage is train else (stage,))]
    return Dataflow(stages, flow.samples_per_prompt)


class TruncationFilter:
    """True for samples that no limit has truncated whose samples are masked. A filter; what it reads beside the reason
    of the end is what has to be there before a sample may leave."""

    def __init__(self, limits: Collection[str]) -> None:
        self._limits = limits
        self.__name__ = "masked"

    def __call__(self, **columns: Any) -> Tensor:
        return torch.tensor([reason not in self._limits for reason in columns[FINISH]])


def with_router_replay(flow: Dataflow) -> Dataflow:
    """The graph of `flow` where the rollout writes the experts that it chose for each token, and the trainers read
    them. Raises `DataflowError` for one that samples nothing."""
    if not flow.of_kind("rollout"):
        raise DataflowError("rollout.router_replay=true, and the algorithm samples nothing. Leave it out.")
    column = STANDARD_COLUMNS[ROUTED_EXPERTS]
    changes = {
        "rollout": lambda stage: replace(stage, writes=(*stage.writes, column)),
        "train": lambda stage: replace(stage, reads=(*stage.reads, column.name)),
    }
    stages = [changes[stage.kind](stage) if stage.kind in changes else stage for stage in flow.stages]
    return Dataflow(stages, flow.samples_per_prompt)


def with_pictures(flow: Dataflow) -> Dataflow:
    """The graph of `flow` where whatever reads a prompt's tokens, or a trajectory's, reads its pictures, too. Raises
    `DataflowError` where a teacher reads another prompt."""
    _check_has_no_hint(flow, "rollout.max_pictures is set, and a prompt with a hint has no pictures")
    return Dataflow([_with_pictures(stage) for stage in flow.stages], flow.samples_per_prompt)


def _check_has_no_hint(flow: Dataflow, why: str) -> None:
    if any(HINTED in stage.reads for stage in flow.stages):
        raise DataflowError(f"algorithm.hint: {why}. Leave one of them out.")


def _with_pictures(stage: Stage) -> Stage:
    if stage.kind == "source":
        has_tokens = any(column.name == "prompt_ids" for column in stage.writes)
        names = PROMPT_PICTURES if has_tokens else PROMPT_PICTURES[:1]
        return replace(stage, writes=(*stage.writes, *(STANDARD_COLUMNS[name] for name in names)))
    if stage.in_environment:
        columns = (STANDARD_COLUMNS[name] for name in SEEN_PICTURES)
        return replace(stage, reads=(*stage.reads, PROMPT_PICTURES[0]), writes=(*stage.writes, *columns))
    if "prompt_ids" in stage.reads:
        return replace(stage, reads=(*stage.reads, *PROMPT_PICTURES))
    if SEQUENCE_COLUMNS[0] in stage.reads:
        return replace(stage, reads=(*stage.reads, *SEEN_PICTURES))
    return stage


def _in_environment(stage: Stage, given: list[Column]) -> Stage:
    """Put one stage into the environment. `given`: columns that not every trajectory has."""
    if stage.kind == "source":
        return replace(stage, writes=(STANDARD_COLUMNS["task"],))
    if stage.kind == "rollout":
        columns = tuple(STANDARD_COLUMNS[name] for name in TRAJECTORY_COLUMNS)
        return replace(stage, reads=("task",), writes=(*columns, *given), in_environment=True)
    return replace(stage, reads=_reads(stage.reads))


def _reads(names: tuple[str, ...]) -> tuple[str, ...]:
    found = (one for name in names for one in (SEQUENCE_COLUMNS if name == "prompt_ids" else (name,)))
    return tuple(dict.fromkeys(found))
