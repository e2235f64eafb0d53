"""Any algorithm in an environment: the same graph, over trajectories in the place of prompts with one response each.

    source ─ task ─▶ rollout ─ response_ids, context_ids, spans, …, reward ─▶ compute ─ advantage ─▶ train

What an algorithm says of rewards, advantages and losses stays as it is: a token column has one value for each sampled
token of the whole trajectory, a sample column one for each trajectory. It serves runs that have an environment.
"""

from dataclasses import replace

from penstock.algorithms.graph.columns import SEQUENCE_COLUMNS, STANDARD_COLUMNS, TRAJECTORY_COLUMNS, Column
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.stage import Stage
from penstock.conf.errors import DataflowError


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
    rewards = [stage for stage in flow.of_kind("reward") if stage.function is None and stage.rewarded is None]
    if len(rewards) > 1:
        names = ", ".join(stage.name for stage in rewards)
        raise DataflowError(f"environment.name is set: it gives one reward, and stages {names} each ask for it.")
    given = [column for stage in rewards for column in stage.writes]
    stages = [_in_environment(stage, given) for stage in flow.stages if stage not in rewards]
    return Dataflow(stages, flow.samples_per_prompt)


def _in_environment(stage: Stage, given: list[Column]) -> Stage:
    """Put one stage into the environment. `given`: the columns of the environment's reward."""
    if stage.kind == "source":
        return replace(stage, writes=(STANDARD_COLUMNS["task"],))
    if stage.kind == "rollout":
        columns = tuple(STANDARD_COLUMNS[name] for name in TRAJECTORY_COLUMNS)
        return replace(stage, reads=("task",), writes=(*columns, *given), in_environment=True)
    return replace(stage, reads=_reads(stage.reads))


def _reads(names: tuple[str, ...]) -> tuple[str, ...]:
    found = (one for name in names for one in (SEQUENCE_COLUMNS if name == "prompt_ids" else (name,)))
    return tuple(dict.fromkeys(found))
