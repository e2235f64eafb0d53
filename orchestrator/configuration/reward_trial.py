"""The rewards of a run, tried on a row of its data before anything is sampled: what would be raised at 2 a.m. is seen
here.
"""

import asyncio
from collections.abc import Iterator

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import ConfigError
from penstock.conf.reward import ENVIRONMENT_REWARD, has_own_judge
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import reward_of
from penstock.workers.environments.task import MESSAGES
from penstock.workers.prompts.opening import open_rows
from penstock.workers.reward.pool import RewardPool
from penstock.workers.reward.registry import RewardSpec
from penstock.workers.reward.response import Response
from penstock.workers.reward.result import RewardError, RewardResult
from penstock.workers.reward.signatures import name_of

RESPONSES = ("", "The answer is 4.")


def try_rewards(config: RunConfig, flow: Dataflow) -> str:
    """Call each reward on the first row, with an empty response and a short one, in processes as in a run. Returns what
    they gave. Raises `ConfigError` for one that fails for both, or cannot be loaded."""
    dataset = open_rows(config)
    if dataset is None:
        return ""
    row = dataset.row(0)
    task = row.to_json(**({MESSAGES: row.messages} if row.messages else {}))
    found = []
    for name, spec in _rewards(config, flow):
        results = asyncio.run(_tried(spec, task, config.reward.timeout_s))
        if all(isinstance(result, RewardError) for result in results):
            raise ConfigError(f"{name} fails on {row.where}: {results[-1]}")
        given = ", ".join(f"{text!r} {_shown(result)}" for text, result in zip(RESPONSES, results, strict=True))
        found.append(f"{name} on {row.where}: {given}")
    return "; ".join(found)


def _rewards(config: RunConfig, flow: Dataflow) -> Iterator[tuple[str, RewardSpec]]:
    """The functions by name. What an environment or a judge of the run gives is not tried: neither is there yet."""
    functions = {stage.name: stage.function for stage in flow.of_kind("reward")} or {"": None}  # for evaluation alone
    for stage, function in functions.items():
        name, options = reward_of(flow, stage, config)
        if name != ENVIRONMENT_REWARD and not has_own_judge(name, options):
            spec = RewardSpec.of(function or name, dict(options), tuple(config.imports))
            yield (name if function is None else name_of(function)), spec


async def _tried(spec: RewardSpec, task: str, timeout_s: float) -> list[RewardResult]:
    async with RewardPool(spec, timeout_s=timeout_s) as pool:
        return await pool.score([Response(text) for text in RESPONSES], [task] * len(RESPONSES))


def _shown(result: RewardResult) -> str:
    if isinstance(result, RewardError):
        return f"fails ({result})"
    return "does not count" if result is None else f"gets {result:g}"
