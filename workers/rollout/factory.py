"""Makes the engine that `rollout.engine` names. The heavy imports happen here, and only for the engine that is made."""

import math
from typing import Any

from penstock.conf.errors import ConfigError, suggest
from penstock.conf.rollout import ENGINES, RolloutConfig
from penstock.conf.trainer import LoraConfig
from penstock.conf.weights import WeightsConfig
from penstock.metering.meters import Meters
from penstock.workers.cpu import prepare_for_torch
from penstock.workers.protocols import RolloutEngine


def make_engine(
    config: RolloutConfig,
    model_path: str,
    *,
    num_threads: int,
    version: int = 0,
    transport: str = "shm",
    adapter: LoraConfig | None = None,
    phase_timeout_s: float = WeightsConfig.phase_timeout_s,
    by_priority: bool = False,
    meters: Meters | None = None,
) -> RolloutEngine:
    """Make an engine that is not started yet. `version`: of the weights in `model_path`. `transport`: of other weights;
    those that stream are vLLM's alone (`conf/weights.py`). `adapter`: these will be adapters of this kind, to be served
    on top of the weights in `model_path`. `phase_timeout_s`: limit of each phase of a weight sync. `by_priority`:
    requests wait by their priority (vLLM). `meters`: for the engine's own statistics (vLLM). Raises `ConfigError` for
    an unknown name."""
    options: dict[str, Any] = {"num_threads": num_threads, "version": version, "phase_timeout_s": phase_timeout_s}
    if config.engine == "vllm" and adapter is not None:
        from penstock.workers.rollout.engine_vllm_adapter import VllmAdapterEngine

        return VllmAdapterEngine(config, model_path, adapter, by_priority=by_priority, meters=meters, **options)
    if config.engine == "vllm":
        from penstock.workers.rollout.engine_vllm import VllmEngine

        options |= {"transport": transport, "by_priority": by_priority, "meters": meters}
        return VllmEngine(config, model_path, **options)
    if config.engine == "hf":
        if not config.num_gpus_per_worker:
            prepare_for_torch()
        from penstock.workers.rollout.engine_hf import HfEngine

        return HfEngine(config, model_path, adapter=adapter, **options)
    if config.engine == "scripted":
        from penstock.workers.rollout.engine_scripted import ScriptedEngine, TimeModel

        speed = config.scripted
        times = TimeModel(speed.latency_s, speed.tokens_per_s or math.inf, speed.load_s)
        return ScriptedEngine(times, version=version)
    raise ConfigError(f"rollout.engine={config.engine}: unknown{suggest(config.engine, ENGINES)}")
