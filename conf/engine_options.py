"""Options of vLLM's engine in `rollout.engine_options`: those that a run may set, and those that it may not."""

from collections.abc import Mapping
from typing import Any

from penstock.conf.errors import ConfigError

OWN_KEYS = {
    "model": "model.path",
    "dtype": "rollout.dtype",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_concurrent_samples",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "enforce_eager": "rollout.enforce_eager",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "seed": "seed",
    "weight_transfer_config": "weights.transport",
    "enable_sleep_mode": "placement=colocated",
    "enable_lora": "trainer.lora.publish=adapter",
    "max_loras": "trainer.lora.publish=adapter",
    "max_lora_rank": "trainer.lora.rank",
}
"""Options that are set by a key of Penstock's."""
BROKEN = {
    "logprobs_mode": "mismatch/* would compare log-probabilities of two different distributions",
    "load_format": "engines must begin with the weights that the trainer begins with",
    "quantization": "publications are loaded as they were written, and verified by their bytes",
    "tokenizer": "the trainer and the rewards read tokens by the model's own",
    "skip_tokenizer_init": "rewards read text",
    "trust_remote_code": "no code of a model's directory is run",
    "distributed_executor_backend": "a worker's processes live and die with its actor",
    "pipeline_parallel_size": "a publication goes to all ranks of one tensor-parallel engine",
    "data_parallel_size": "each engine is an actor of its own: rollout.num_workers",
}
"""Options that would break a promise of a run, and which."""
ON_CPU = {
    "enable_chunked_prefill": "the generator of a seeded sample cannot be set back on a CPU (rollout.sampling.seeded)",
    "worker_extension_cls": "there is one, which sets how many threads compute (rollout.num_threads)",
}
"""Options of the CPU build that would break a promise, and which."""


def check_engine_options(options: Mapping[str, Any], engine: str, on_gpu: bool) -> None:
    """Raise `ConfigError` that names what is to be set instead, or why it cannot be. Whether vLLM knows an option is
    told when the engine starts."""
    if options and engine != "vllm":
        raise ConfigError(f"rollout.engine_options are vLLM's, and rollout.engine={engine}. Leave them out.")
    for name, value in options.items():
        what = f"rollout.engine_options.{name}={value}"
        if name in OWN_KEYS:
            raise ConfigError(f"{what}: set {OWN_KEYS[name]} instead.")
        if why := BROKEN.get(name) or (not on_gpu and ON_CPU.get(name)):
            raise ConfigError(f"{what}: cannot be set: {why}.")
