"""Every algorithm that a recipe can name: those that come with Penstock, and a user's own that were imported."""

# The modules register their algorithms when they are imported.
from penstock.algorithms.builtin import grpo, imitation, policy_gradient, ppo, preferences  # noqa: F401
from penstock.algorithms.graph.columns import PROMPT_PICTURES, ROUTED_EXPERTS
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.graph.rewrites import (
    MASKED,
    in_environment,
    with_masked,
    with_pictures,
    with_rewards,
    with_router_replay,
)
from penstock.algorithms.registry import ALGORITHMS, Algorithm
from penstock.conf.algorithms.base import AlgorithmConfig
from penstock.conf.errors import ConfigError, suggest
from penstock.conf.run import RunConfig

__all__ = ["ALGORITHMS", "build_dataflow", "dataflow_of", "find_algorithm"]


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
