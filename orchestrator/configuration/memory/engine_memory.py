"""Device memory of a vLLM engine, part by part. Pure: no torch.

vLLM takes `rollout.gpu_memory_utilization` of the GPU whatever it needs: weights, what a step needs, and the rest is
for keys and values. So the parts say how many tokens can be under way, and whether the engine can start at all.
"""

from dataclasses import dataclass

from penstock.conf.rollout import RolloutConfig
from penstock.orchestrator.configuration.memory.model_shape import ModelShape

STEP_TOKENS = 8192
"""Most tokens of one step, unless rollout.engine_options.max_num_batched_tokens says it: vLLM's default on an H100."""
GRAPHS_BYTES = 2**30
"""Estimate of what captured graphs take (rollout.enforce_eager=false)."""
SAMPLING_BYTES = 16
"""Bytes of a logit while tokens are drawn: logits, log-probabilities, probabilities, and a copy to sort, float32."""


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one of an engine's GPUs, or of its process on a CPU."""

    weights: float
    step: float
    """Bytes of activations and logits of the largest step, and of captured graphs."""
    cache: float
    """Bytes of keys and values; negative where the engine cannot start."""
    cache_token: float
    """Bytes of keys and values of one token."""

    @property
    def total(self) -> float:
        return self.weights + self.step + max(0.0, self.cache)

    @property
    def cache_tokens(self) -> int:
        """Tokens that keys and values have room for."""
        return max(0, int(self.cache // self.cache_token))


def engine_memory(shape: ModelShape, config: RolloutConfig, gpu_bytes: float, share: float) -> EngineMemory:
    """Parts of the share of a GPU that the engine takes. On a CPU, where `rollout.kv_cache_gib` says how large the
    cache is, `gpu_bytes` is 0."""
    b = 2 if config.dtype == "bfloat16" else 4
    parts = config.tensor_parallel_size
    weights = b * shape.num_parameters / parts
    cache_token = _cache_bytes(config, b) * shape.cache_elements / min(parts, shape.kv_width // shape.head_dim)
    step = _step(shape, config, b)
    if not gpu_bytes:
        return EngineMemory(weights, step, config.kv_cache_gib * 2**30, cache_token)
    step += 0 if config.enforce_eager else GRAPHS_BYTES
    return EngineMemory(weights, step, share * gpu_bytes - weights - step, cache_token)


def _step(shape: ModelShape, config: RolloutConfig, b: int) -> float:
    """Bytes of one step: hidden states, q, k, v and the MLP of all its tokens, and logits of the sequences."""
    tokens = config.engine_options.get("max_num_batched_tokens") or max(STEP_TOKENS, config.max_model_len)
    widths = 2 * shape.q_width + 2 * shape.kv_width + 3 * shape.mlp_width * shape.experts_per_token
    of_tokens = tokens * b * (4 * shape.hidden + widths / config.tensor_parallel_size)
    return float(of_tokens + config.max_concurrent_samples * shape.vocabulary * SAMPLING_BYTES)


def _cache_bytes(config: RolloutConfig, b: int) -> int:
    return 1 if str(config.engine_options.get("kv_cache_dtype", "auto")).startswith("fp8") else b
