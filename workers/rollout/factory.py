"""Makes the engine that `rollout.engine` names. The heavy imports happen here, and only for the engine that is made."""

from importlib import import_module
from typing import cast

from penstock.conf.capabilities import ROLLOUT_ENGINES
from penstock.conf.checks import one_of
from penstock.metering.meters import Meters
from penstock.workers.machine.cpu import prepare_for_torch
from penstock.workers.protocols import EngineSpec, RolloutEngine


def make_engine(spec: EngineSpec, meters: Meters | None = None) -> RolloutEngine:
    """Make an engine that is not started yet. `meters`: for the engine's own statistics (vLLM). Raises `ConfigError`
    for an unknown name."""
    config = spec.config
    one_of("rollout.engine", config.engine, ROLLOUT_ENGINES)
    if config.capabilities.computes_in_actor and not config.num_gpus_per_worker:
        prepare_for_torch()
    module, _, function = config.capabilities.implementation.partition(":")
    return cast(RolloutEngine, getattr(import_module(module), function)(spec, meters))
