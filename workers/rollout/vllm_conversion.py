"""Conversion to vLLM's terms and back: the engine arguments and environment variables that it is started with, from the
configuration; requests; and its answers.

Importing this module does not import vLLM.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from penstock.conf.capabilities import ROLLOUT_ENGINES
from penstock.conf.errors import ConfigError, DataError
from penstock.conf.rollout import RolloutConfig
from penstock.conf.secret import reveal
from penstock.conf.trainer import LoraConfig
from penstock.conf.weights import STREAMS
from penstock.workers.calls.training_calls import WHOLE
from penstock.workers.machine.cpu import SETTINGS
from penstock.workers.pictures.families import Family
from penstock.workers.protocols import AdapterLimits, Completion, EngineSpec, Sampled, Sampling
from penstock.workers.rollout.detokenizer import NO_TOKENIZER, Detokenizer
from penstock.workers.rollout.vllm_pictures import picture_arguments
from penstock.workers.routed_experts import RoutingShape
from penstock.workers.weights.publication.reading import MappedWeights
from penstock.workers.weights.transport import Info, vllm_backend

LORA_RANKS = ROLLOUT_ENGINES["vllm"].lora_ranks
CPU_BATCHED_TOKENS = 4096
"""Most prompt tokens of one step of the CPU engine; prompts beyond them wait for the next, whole."""
CPU_BLOCK_TOKENS = 32
"""Tokens in a KV block on the CPU: the smallest that its kernels like, so that short prompts are shared in a group."""

WORKER_CALLS = "penstock.workers.rollout.vllm_extensions.WorkerCalls"
WORKER_WITH_HEADS = "penstock.workers.rollout.vllm_heads.WorkerWithHeads"


def engine_arguments(spec: EngineSpec, family: Family | None = None) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`. `family`: of a model that is shown pictures. Imports vLLM. Raises
    `ConfigError` for an option that vLLM does not know."""
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig

    config = spec.config
    known = {field.name for field in fields(AsyncEngineArgs)}
    for name in config.engine_options.keys() - known:
        near = ", ".join(get_close_matches(name, known, n=3))
        hint = f" Near it: {near}." if near else ""
        raise ConfigError(f"rollout.engine_options.{name}: this vLLM has no such argument of AsyncEngineArgs.{hint}")
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_concurrent_samples,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": config.enforce_eager,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=vllm_backend(spec.transport)),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "worker_extension_cls": WORKER_CALLS,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if config.num_gpus_per_worker:
        arguments["gpu_memory_utilization"] = config.gpu_share
        arguments["enable_sleep_mode"] = shares_gpu(config)
    else:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * 2**30)
        arguments["block_size"] = CPU_BLOCK_TOKENS
        # A seeded request whose prefill is cut in two has its generator set back, which CPU generators cannot do.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(CPU_BATCHED_TOKENS, config.max_model_len)
    # By itself it would have Ray start its processes, as it finds its actor in a placement group.
    arguments["distributed_executor_backend"] = "uni" if config.tensor_parallel_size == 1 else "mp"
    if config.router_replay:
        arguments["enable_return_routed_experts"] = True
    if family is not None:
        arguments |= picture_arguments(config, family)
    if spec.by_priority:
        arguments["scheduling_policy"] = "priority"
    arguments |= reveal(config.engine_options)
    if spec.adapters is not None:
        arguments |= room_for_adapters(spec.adapters, on_gpu=bool(config.num_gpus_per_worker))
    return arguments | adapter_arguments(spec.adapter) if spec.adapter is not None else arguments


def adapter_arguments(adapter: LoraConfig) -> dict[str, Any]:
    """Further arguments, for an engine that serves one adapter at a time."""
    room = min(rank for rank in LORA_RANKS if rank >= adapter.rank)
    return {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}


def room_for_adapters(limits: AdapterLimits, *, on_gpu: bool) -> dict[str, Any]:
    """Further arguments, for an engine that serves many adapters. On a CPU the base model is served by one of zeros
    (`engine_vllm_named.py`), which takes a place of its own. Whole models need no room: one is there at a time."""
    if limits.max_rank == WHOLE:
        return {"max_logprobs": -1}
    room = min(rank for rank in LORA_RANKS if rank >= limits.max_rank)
    arguments: dict[str, Any] = {
        "enable_lora": True, "max_lora_rank": room, "max_loras": limits.max_loaded + (not on_gpu), "max_logprobs": -1,
    }  # fmt: skip
    return arguments | ({"worker_extension_cls": WORKER_WITH_HEADS} if limits.head else {})


def shares_gpu(config: RolloutConfig) -> bool:
    """Return whether the engine has a part of a GPU, and must be able to sleep while another uses it."""
    return 0 < config.num_gpus_per_worker < 1


def discards_weights(spec: EngineSpec) -> bool:
    """Return whether the engine's weights are brought again after a sleep, and need not be kept meanwhile. Adapters
    are published without the base that they change, and streams come with a step of the trainer alone."""
    return spec.adapter is None and spec.adapters is None and spec.transport not in STREAMS


@contextmanager
def vllm_environment(spec: EngineSpec) -> Iterator[None]:
    """Set environment variables for the import of vLLM and for the processes that it starts; put them back afterwards.

    What the user has set stays as it is, but for the number of threads.
    """
    defaults = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    if Path(spec.model_path).is_dir():
        defaults["HF_HUB_OFFLINE"] = "1"
    values = {name: os.environ.get(name, value) for name, value in defaults.items()}
    if spec.config.router_replay:
        values["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that records experts
    if not spec.config.num_gpus_per_worker:
        values |= _cpu_environment(spec)
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _cpu_environment(spec: EngineSpec) -> dict[str, str]:
    """The environment of the CPU build: threads as asked for and bound nowhere, since trainer and engine share the
    cores; waiting threads sleep at once: ones that spin make two processes on the same cores several times slower.

    With one rank the model runs in the engine's own process, as on a GPU. vLLM's CPU build otherwise puts it into
    another one to pin its threads, and the two then wait for each other by spinning. `VLLM_ENABLE_V1_MULTIPROCESSING=0`
    satisfies vLLM's check; `AsyncLLM` starts its engine process all the same.
    """
    values = {
        "OMP_NUM_THREADS": str(max(1, spec.num_threads)),
        "OMP_WAIT_POLICY": SETTINGS["OMP_WAIT_POLICY"],
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if spec.config.tensor_parallel_size == 1:
        values["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return values


def sampling_params(
    num_samples: int, sampling: Sampling, banned: Sequence[int] = (), detokenizer: Detokenizer = NO_TOKENIZER
) -> Any:
    """vLLM's parameters for a request. Without stop strings the text is decoded once at the end (`completion_of`), not
    token by token. `banned`: tokens that are never sampled, also where it is greedy. `detokenizer`: knows which stop
    strings are tokens. Raises `DataError` for a structure that vLLM does not know."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    try:
        structure = StructuredOutputsParams(**sampling.structure) if sampling.structure else None
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise DataError(f"structure={sampling.structure!r:.200}: {error}") from None
    return SamplingParams(
        n=1 if sampling.temperature == 0 else num_samples,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop) or None,
        stop_token_ids=sorted(detokenizer.stop_ids(sampling.stop)),
        ignore_eos=sampling.ignore_eos,
        seed=sampling.seed,
        structured_outputs=structure,
        logit_bias=dict.fromkeys(banned, -math.inf) or None,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def outputs_of(output: Any, num_samples: int) -> list[Any]:
    """The samples of a request. vLLM makes one greedy sample alone: it counts as often as it was asked for."""
    return list(output.outputs) * (num_samples // len(output.outputs))


def completion_of(
    sample: Any, detokenizer: Detokenizer, *, detokenized: bool, routing: RoutingShape | None = None
) -> Completion:
    """The completion of one sample of a request. `detokenized`: vLLM has decoded its text already. `routing`: of the
    model, where the experts are recorded: vLLM has them of each token but the last one, `[L - 1, all layers, K]`."""
    token_ids = list(sample.token_ids)
    flat = sample.logprobs
    logprobs = [flat.logprobs[start] for start in flat.start_indices]
    versions = [int(span.version) for span in sample.weight_versions for _ in range(span.start, span.end)]
    text = detokenizer.cut(token_ids, sample.text) if detokenized else detokenizer.text(token_ids)
    experts = b""
    if routing is not None:
        experts = routing.records(sample.routed_experts[:, list(routing.layers)]).tobytes()
    return Completion(token_ids, logprobs, versions, text, sample.finish_reason, experts)


def sampled_so_far(processor: Any) -> Sampled:
    """Counts of the requests that vLLM's `OutputProcessor` has, without asking for their outputs before the end.
    Samples of a group that are done wait for the others with the group."""
    samples = processor.request_states.values()
    done = [sample for group in processor.parent_requests.values() for sample in group.output_aggregator if sample]
    num_tokens = sum(sample.detokenizer.num_output_tokens() for sample in samples)
    return Sampled(num_tokens + sum(len(sample.token_ids) for sample in done), len(samples))


@dataclass(frozen=True)
class Opened:
    """A publication that is mapped and verified. `mapped`: keeps its file locked; `info`: vLLM's arguments for it."""

    mapped: MappedWeights
    info: Info


def init_request(info: Info) -> Any:
    """vLLM's request that announces weights to a weight-transfer engine."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    return WeightTransferInitRequest(init_info=info)


def update_request(info: Info) -> Any:
    """vLLM's request to a weight-transfer engine to load."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    return WeightTransferUpdateRequest(update_info=info)
