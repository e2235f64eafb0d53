"""Makes the engine that `rollout.engine` names. The heavy imports happen here, and only for the engine that is made."""

from penstock.conf.errors import ConfigError, suggest
from penstock.conf.rollout import ENGINES, RolloutConfig
from penstock.conf.trainer import LoraConfig
from penstock.workers.protocols import RolloutEngine


def make_engine(
    config: RolloutConfig,
    model_path: str,
    *,
    num_threads: int,
    version: int = 0,
    transport: str = "shm",
    adapter: LoraConfig | None = None,
) -> RolloutEngine:
    """An engine that is not started yet. `version`: of the weights in `model_path`. `transport`: by which others will
    come; those that stream are vLLM's alone (`conf/weights.py`). `adapter`: they will be adapters of this kind, to be
    served on top of those in `model_path`. Raises `ConfigError` for an unknown name."""
    if config.engine == "vllm" and adapter is not None:
        from penstock.workers.rollout.engine_vllm_adapter import VllmAdapterEngine

        return VllmAdapterEngine(config, model_path, adapter, num_threads=num_threads, version=version)
    if config.engine == "vllm":
        from penstock.workers.rollout.engine_vllm import VllmEngine

        return VllmEngine(config, model_path, num_threads=num_threads, version=version, transport=transport)
    if config.engine == "hf":
        from penstock.workers.rollout.engine_hf import HfEngine

        return HfEngine(config, model_path, num_threads=num_threads, version=version, adapter=adapter)
    if config.engine == "scripted":
        from penstock.workers.rollout.engine_scripted import ScriptedEngine

        return ScriptedEngine(version=version)
    raise ConfigError(f"rollout.engine={config.engine}: unknown{suggest(config.engine, ENGINES)}")
