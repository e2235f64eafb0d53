"""The sandbox that a run's code of models needs: its limits, and a check that it holds on this machine.

It has to hold where the code runs. On a cluster that was there before the run the nodes' agents try it when the run
starts (`orchestrator/cluster/fleet/fence_trial.py`).
"""

from collections.abc import Mapping
from typing import Any

from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.cluster import is_elsewhere
from penstock.workers.reward.code import limits_of
from penstock.workers.sandbox.execution import Limits
from penstock.workers.sandbox.sandbox import tried_here

SANDBOXED = ("python_tests", "sql_result")
"""Rewards that run code."""


def runs_code(config: RunConfig) -> bool:
    """Return whether the run runs code that a model wrote, as far as the configuration tells."""
    return bool(_options_of_rewards(config)) or _environment_runs_code(config)


def limits_of_code(config: RunConfig) -> list[Limits]:
    """Limits of the code that models write, each once; empty for a run that runs no code. Raises `ConfigError`."""
    found = [limits_of(options.get("limits")) for options in _options_of_rewards(config)]
    if _environment_runs_code(config):
        found.append(Limits.of(config.environment.sandbox))
    return list(dict.fromkeys(found))


def check_sandbox(config: RunConfig) -> str:
    """Try the sandbox, if it has to hold on this machine. Returns what was found. Raises `SandboxUnavailable`,
    `ConfigError`."""
    all_limits = limits_of_code(config)
    return "tried on the cluster's nodes when the run starts" if is_elsewhere() else tried_here(all_limits)


def _options_of_rewards(config: RunConfig) -> list[Mapping[str, Any]]:
    """Options of the rewards that run code."""
    of_environment = config.environment.options
    rewards = [
        (config.reward.function, config.reward.options),
        *((one.function, one.options) for one in config.rewards),
        (of_environment.get("reward"), of_environment.get("reward_options") or {}),
    ]
    return [options for function, options in rewards if function in SANDBOXED]


def _environment_runs_code(config: RunConfig) -> bool:
    """Return whether the environment runs code. A user's own does not say so, unless it requires a control group."""
    environment = config.environment
    return "python" in (environment.options.get("tools") or ()) or environment.sandbox.require_cgroup
