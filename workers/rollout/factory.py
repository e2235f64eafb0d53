"""Makes the engine that `rollout.engine` names. The heavy imports happen here, and only for the engine that is made."""

import math

from penstock.conf.errors import ConfigError, suggest
from penstock.conf.rollout import ENGINES
from penstock.metering.meters import Meters
from penstock.workers.calls.training_calls import WHOLE
from penstock.workers.machine.cpu import prepare_for_torch
from penstock.workers.protocols import EngineSpec, RolloutEngine


def make_engine(spec: EngineSpec, meters: Meters | None = None) -> RolloutEngine:
    """Make an engine that is not started yet. `meters`: for the engine's own statistics (vLLM). Raises `ConfigError`
    for an unknown name."""
    config = spec.config
    if config.engine == "vllm" and spec.adapters is not None and spec.adapters.max_rank == WHOLE:
        from penstock.workers.rollout.engine_vllm_whole import VllmWholeEngine

        return VllmWholeEngine(spec, meters)
    if config.engine == "vllm" and spec.adapters is not None:
        from penstock.workers.rollout.engine_vllm_named import VllmNamedEngine

        return VllmNamedEngine(spec, meters)
    if config.engine == "vllm" and spec.adapter is not None:
        from penstock.workers.rollout.engine_vllm_adapter import VllmAdapterEngine

        return VllmAdapterEngine(spec, meters)
    if config.engine == "vllm":
        from penstock.workers.rollout.engine_vllm import VllmEngine

        return VllmEngine(spec, meters)
    if config.engine == "hf":
        if not config.num_gpus_per_worker:
            prepare_for_torch()
        from penstock.workers.rollout.engine_hf import HfEngine

        return HfEngine(spec)
    if config.engine == "scripted":
        from penstock.workers.rollout.engine_scripted import ScriptedEngine, TimeModel

        speed = config.scripted
        times = TimeModel(speed.latency_s, speed.tokens_per_s or math.inf, speed.load_s)
        return ScriptedEngine(times, version=spec.version)
    raise ConfigError(f"rollout.engine={config.engine}: unknown{suggest(config.engine, ENGINES)}")
