"""The sampling of responses, the engines that do it, and the options of vLLM's engine that a run may set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.conf.capabilities import ROLLOUT_ENGINES, RolloutCapabilities
from penstock.conf.checks import AUTO, POSITIVE, at_least, auto_or_number, check_bounds, is_utf8, one_of, within
from penstock.conf.errors import ConfigError

LIMITS = ("length", "turns", "tokens", "context", "time")
"""Limits that truncate: a response by its longest length, and attempts in environments by any of them."""
TRUNCATED = ("train", "mask", "drop")
ON_UPDATE = ("recompute", "keep", "finish")
HIGHEST_TEMPERATURE = 2.0
"""Highest temperature that vLLM takes."""
LOWEST_TEMPERATURE = 0.01
"""Lowest temperature above greedy. vLLM raises lower ones to it, so that tokens would be drawn at another temperature
than was said."""
LARGEST_TOP_K = 2**31 - 1
"""Largest top_k: vLLM keeps it in 32 bits."""
MAX_STOPS = 64
"""Most stop strings: each is looked for after every token."""
DEFAULT_SHARE = 0.5
"""Share of a GPU that vLLM takes where its memory is not known."""
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
    "limit_mm_per_prompt": "rollout.max_pictures",
    "enable_return_routed_experts": "rollout.router_replay",
    "aux_output_config": "rollout.router_replay",
    "enable_sleep_mode": "placement=colocated",
    "enable_lora": "trainer.lora.publish=adapter",
    "max_loras": "trainer.lora.publish=adapter",
    "max_lora_rank": "trainer.lora.rank",
}
"""Options of vLLM's engine that are set by a key of Penstock's."""
BROKEN = {
    "logprobs_mode": "mismatch/* would compare log-probabilities of two different distributions",
    "load_format": "engines must begin with the weights that the trainer begins with",
    "tokenizer": "the trainer and the rewards read tokens by the model's own",
    "skip_tokenizer_init": "rewards read text",
    "trust_remote_code": "no code of a model's directory is run",
    "distributed_executor_backend": "a worker's processes live and die with its actor",
    "pipeline_parallel_size": "a publication goes to all ranks of one tensor-parallel engine",
    "hf_overrides": "the trainer goes by the model's own config.json: change that",
    "mm_processor_kwargs": "engines and trainer read pictures by the model's preprocessor_config.json: change that",
    "mm_device_do_normalize": "pictures come to vLLM with their pixels normalized",
    "mm_processor_cache_gb": "pictures come to vLLM as features, which it has nothing to keep of",
    "data_parallel_size": "each engine is an actor of its own: rollout.num_workers",
}
"""Options that would break a promise of a run, and which."""
ON_CPU = {
    "enable_chunked_prefill": "the generator of a seeded sample cannot be set back on a CPU (rollout.sampling.seeded)",
    "worker_extension_cls": "there is one, which sets how many threads compute (rollout.num_threads)",
    "speculative_config": "vLLM's CPU build draws drafted tokens at a wrong temperature, but with rollout.speculation",
}
"""Options of the CPU build that would break a promise, and which."""


@dataclass(frozen=True)
class Precision:
    """Bytes of an element of what an engine holds, scales included."""

    computed: float = 2.0
    """Bytes in hidden states, embedding and output layer."""
    linear: float = 2.0
    experts: float = 2.0
    cache: float = 2.0
    """Bytes in keys and values."""
    is_eight_bit: bool = False
    """True if products are of 8 bits, where a GPU has them."""


_FP8 = Precision(linear=1, experts=1, is_eight_bit=True)
QUANTIZED_ONLINE: Mapping[str, Precision] = {
    "fp8": _FP8,
    "fp8_per_tensor": _FP8,
    "fp8_per_block": _FP8,
    "fp8_per_channel": _FP8,
    "mxfp8": Precision(linear=33 / 32, experts=33 / 32, is_eight_bit=True),
    "mxfp4": Precision(linear=17 / 32, experts=17 / 32),
    "nvfp4_per_token": Precision(experts=9 / 16),
    "int8_per_channel_weight_only": Precision(experts=1),
    "online": Precision(),
}
"""Quantizations that vLLM makes of whole weights, whenever it loads them. What `online` makes is said by another option
and is not known here."""
CACHE_BYTES = {"fp8": 1.0, "int8": 1.0, "nvfp4": 9 / 16, "int4": 0.5}
"""Bytes of an element of keys and values, by the beginning of `kv_cache_dtype`."""
SPECULATION = ("none", "ngram", "draft")
DRAFT = "draft"
"""Name of the model in `model.paths` that drafts tokens."""


@dataclass
class SamplingConfig:
    """The sampling distribution. Log-probabilities are recorded under it, after temperature and truncation."""

    temperature: float = 1.0
    """Temperature, from 0.01 to 2, which is the range of vLLM. Evaluation is greedy in any case."""
    top_p: float = 1.0
    """Share of the nucleus. Below 1 the trainer's log-probabilities (full distribution) differ from the engine's by
    construction."""
    top_k: int = 0
    """Number of the most likely tokens that are kept; 0: all. 32 bits."""
    min_p: float = 0.0
    """Ratio to the likeliest token's probability, below which tokens are dropped."""
    max_tokens: int = 256
    """Longest response. Tokens."""
    stop: list[str] = field(default_factory=list)
    """End a response at any of these strings, 64 at most."""
    ignore_eos: bool = False
    """Sample on through the end-of-sequence token, to max_tokens. For benchmarks."""
    seeded: bool = True
    """Give each sample a seed of its own, derived from the run's, the group's and its index."""

    def __post_init__(self) -> None:
        check_bounds(
            self, "rollout.sampling",
            max_tokens=1, temperature=(LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE), top_p=(1e-06, 1.0),
            top_k=(0, LARGEST_TOP_K), min_p=(0.0, 1.0),
        )  # fmt: skip
        if wrong := wrong_stops(self.stop):
            raise ConfigError(f"rollout.sampling.stop={self.stop!r:.100}: {wrong}")


def wrong_stops(stops: Sequence[Any]) -> str:
    """The reason why no engine can take these stop strings; empty if all can."""
    if isinstance(stops, str) or not all(isinstance(stop, str) and stop and is_utf8(stop) for stop in stops):
        return "must be texts that are not empty, as one would end every response at once, and can be encoded."
    return f"there may be {MAX_STOPS} of them." if len(stops) > MAX_STOPS else ""


@dataclass
class SpeculationConfig:
    """Speculative decoding by vLLM (2211.17192): several drafted tokens are checked in one decode step, and kept or
    drawn again, so that each token is distributed as without. Not yet seen on a GPU."""

    method: str = "none"
    """Where drafts come from. ngram: what followed the same two or more tokens earlier in prompt or response, for
    responses that repeat text, such as code. draft: a smaller model with the same vocabulary (model.paths.draft), which
    is not trained. none: no drafts, as they cost time where few are accepted. An engine measures at its start which
    share is to be accepted for them to pay, which takes a second start, and begins again without them once fewer are
    (`rollout/speculation_acceptance`)."""
    num_tokens: int = 4
    """Most tokens drafted at a time, from 1 to 32. More pay where most are accepted."""
    max_sequences: int = 32
    """Most sequences that are decoded together with drafts; with more, vLLM makes none. Many sequences keep the device
    busy without, which the few long ones at the end of a batch do not."""

    def __post_init__(self) -> None:
        one_of("rollout.speculation.method", self.method, SPECULATION)
        check_bounds(self, "rollout.speculation", num_tokens=(1, 32), max_sequences=1)

    @property
    def is_on(self) -> bool:
        """True if tokens are drafted."""
        return self.method != SPECULATION[0]


@dataclass
class ScriptedConfig:
    """Times that the fake engine takes, for simulations of runs."""

    latency_s: float = 0.0
    """Seconds from a request to its first token."""
    tokens_per_s: float = 0.0
    """Speed of one sequence, in tokens a second. 0: all at once."""
    load_s: float = 0.0
    """Seconds to load a version of the weights."""

    def __post_init__(self) -> None:
        check_bounds(self, "rollout.scripted", latency_s=0, tokens_per_s=0, load_s=0)


@dataclass
class RolloutConfig:
    engine: str = "vllm"
    """Name of the engine: vllm, hf (transformers; where vLLM is not to be had), scripted (a deterministic fake for
    tests)."""
    num_workers: int | str = 1
    """Rollout actors, each with an engine of its own. auto: as many as the cluster has room for, and no more than there
    are groups under way; every few seconds it is looked whether nodes have joined or left. Needs something that each
    reserves (cluster.cpus_per_worker, num_gpus_per_worker). `penstock scale` changes a number while the run goes on."""
    max_workers: int | None = None
    """Most engines with num_workers=auto. While ranks wait for samples for more than diagnosis.idle_share of a step,
    the run asks the cluster's autoscaler for nodes for so many, and takes the request back once they no longer do.
    `null`: the run takes what is free, and asks for no nodes."""
    drain_s: float = 60.0
    """Seconds within which an engine or reward actor that is asked to leave finishes what it has; it returns the rest
    for other actors to compute. Groups of a few seconds are all finished; what is returned is sampled again."""
    num_gpus_per_worker: float = 0
    """GPUs for each process of an engine, which has tensor_parallel_size of them, all on one node: an engine of
    tensor_parallel_size=4 reserves four times as much. 1, or a part of the GPU that it shares with a rank; 0: the CPU
    build."""
    tensor_parallel_size: int = 1
    """Processes that each engine is split over, by heads and by columns of its layers."""
    dtype: str = "float32"
    """Data type, float32 or bfloat16. On GPUs use bfloat16."""
    max_model_len: int = 1024
    """Longest sequence, prompt + response, in tokens. Sizes the KV cache."""
    max_pictures: int = 0
    """Most pictures of a sequence, for vision models; a prompt with more is refused, and vLLM tests at its start
    whether there is memory for so many. 0: the run is one of text, and the store has no column for pictures."""
    max_concurrent_samples: int = 256
    """Sequences that one engine decodes at a time."""
    kv_cache_gib: float = 1.0
    """Size of the KV cache on a CPU. On a GPU: see gpu_memory_utilization."""
    gpu_memory_utilization: int | float | str = AUTO
    """Share of a GPU's memory that vLLM takes. auto: where a GPU's memory is known (cluster.gpu_memory_gib), 0.9 of one
    that the engine has for itself, and of another what a rank there leaves; else 0.5."""
    num_threads: int = 0
    """CPU threads of each engine. 0: an even share of all cores among the engines when max_staleness=0, since they and
    the trainer take turns. Otherwise a short trial at the start finds the numbers by which a token is soonest through
    both (vLLM; `threads.json` in the run's directory has it), and until then engines and ranks have even shares. In
    runs of 60 steps or more on one machine's CPUs they then take turns, after all, where that makes steps faster."""
    enforce_eager: bool = True
    """True: skip graph capture, which starts faster. Set false on GPUs for speed."""
    on_update: str = AUTO
    """What becomes of sequences under way when an engine loads new weights (with max_staleness=0 there are none).
    recompute: their tokens so far are read again, so that the next ones are sampled as if the new weights had read all
    of it. keep: they keep the KV cache that older weights have made, which saves that time; tokens after the load then
    count for `lag/*`, not `mismatch/*`. finish: one engine after the other finishes its groups, and then loads, so that
    a sequence has one version; slow where answers take longer than steps. auto: recompute with vLLM, as keep is hardly
    faster where prompts are read fast; keep with rollout.engine=hf, which knows nothing else."""
    router_replay: bool = False
    """True: the trainer sends each token to the experts that the engine sent it to (2510.11370). By rounding alone its
    own routers choose others for some tokens, so that `mismatch/*` of a mixture is larger than that of a dense model.
    How much each expert counts is still what the trainer's router says. Costs a byte (above 256 experts two) for each
    expert of a token in each layer, of prompts too: 384 a token for Qwen3-30B-A3B, in the store and on the way to the
    trainer. False: off, since it costs that, and since only mixtures that route by a softmax can (Qwen's, Mixtral),
    with rollout.engine=hf, or vLLM on GPUs."""
    start_timeout_s: float = 300.0
    """Deadline in seconds for members to be there, and one for them to load their models: an engine of 70B parameters
    reads them from a disk within it; a hub's model is fetched before (cluster.files_timeout_s). Bounds how long a
    member that hangs at the start goes unnoticed."""
    compile_timeout_s: float = 600.0
    """Further seconds for an engine that compiles and captures graphs (enforce_eager=false). 600: vLLM takes one to
    three minutes for large models, and far less once its cache (VLLM_CACHE_ROOT) has what it compiled."""
    generate_timeout_s: float = 1800.0
    """Deadline of one group. Bounds how long a dead engine goes unnoticed."""
    max_error_share: float = 0.2
    """Share of the last 100 samples of an engine that may have log-probabilities that are not finite. They are dropped
    as dropped/bad_logprobs; the run ends when more do, and says whether the weights are finite."""
    truncated: dict[str, str] = field(default_factory=dict)
    """What becomes of samples that a limit has truncated, by the limit: {length: mask, time: drop}. length: a response,
    or the last turn of an attempt, was cut at max_tokens; turns, tokens, context, time: the attempt was, by a limit of
    `environment`. train: as far as it went, with its reward. mask: the group is compared with it, but its tokens are
    not trained; counted as dropped/masked. drop: as if it had not been sampled; counted as dropped/truncated_by_LIMIT.
    {}: all are trained, as a length that never counts is never learned. Evaluation counts all of them."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's `AsyncEngineArgs`, such as {kv_cache_dtype: fp8, max_num_batched_tokens: 8192}.
    Those that a key here sets, or that would break a promise, are refused by name. With
    quantization, such as fp8_per_channel, each publication is quantized when it is loaded; mismatch/* then says how far
    engine and trainer are apart."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    scripted: ScriptedConfig = field(default_factory=ScriptedConfig)
    """Settings of the scripted engine alone."""

    def __post_init__(self) -> None:
        one_of("rollout.engine", self.engine, ROLLOUT_ENGINES)
        self._check_on_update()
        self._check_engine_options()
        self._check_router_replay()
        for limit, treatment in self.truncated.items():
            one_of("rollout.truncated", limit, LIMITS)
            one_of(f"rollout.truncated.{limit}", treatment, TRUNCATED)
        one_of("rollout.dtype", self.dtype, ("float32", "bfloat16"))
        if isinstance(self.num_workers, str):
            one_of("rollout.num_workers", self.num_workers, (AUTO,))
        else:
            at_least("rollout.num_workers", self.num_workers, 1)
        if self.max_workers is not None:
            at_least("rollout.max_workers", self.max_workers, 1)
            if not self.follows_cluster:
                raise ConfigError(
                    f"rollout.max_workers={self.max_workers}: rollout.num_workers={self.num_workers} is a number that "
                    "stays. Set rollout.num_workers=auto, or leave rollout.max_workers out."
                )
        check_bounds(
            self, "rollout",
            drain_s=0, tensor_parallel_size=1, max_concurrent_samples=1, max_pictures=0, num_gpus_per_worker=0,
            num_threads=0, max_model_len=2, kv_cache_gib=POSITIVE, start_timeout_s=POSITIVE, compile_timeout_s=0,
            generate_timeout_s=POSITIVE, max_error_share=(0, 1),
        )  # fmt: skip
        if not auto_or_number("rollout.gpu_memory_utilization", self.gpu_memory_utilization):
            within("rollout.gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)

    def _check_on_update(self) -> None:
        """Refuse what the engine cannot do with sequences under way."""
        wanted, can = self.on_update, self.capabilities.on_update
        one_of("rollout.on_update", wanted, (AUTO, *ON_UPDATE))
        if wanted in ON_UPDATE and wanted not in can:
            engines = " or ".join(name for name, one in ROLLOUT_ENGINES.items() if wanted in one.on_update)
            raise ConfigError(
                f"rollout.on_update={wanted}: sequences of rollout.engine={self.engine} know only {' and '.join(can)}. "
                f"Set rollout.on_update={can[0]}, or rollout.engine={engines}."
            )

    def _check_router_replay(self) -> None:
        """Refuse engines that cannot say which experts they chose."""
        devices = self.capabilities.record_experts_on
        if not self.router_replay or self.device in devices:
            return
        if devices:
            raise ConfigError(
                f"rollout.router_replay=true: rollout.engine={self.engine} records the experts of each token on GPUs "
                "only, and rollout.num_gpus_per_worker=0. Set rollout.engine=hf, give the engine a GPU, or "
                "leave it out."
            )
        raise ConfigError(f"rollout.router_replay=true: rollout.engine={self.engine} has no experts. Leave it out.")

    def _check_engine_options(self) -> None:
        """Raise `ConfigError` that names what is to be set instead of an option, or why it cannot be set. vLLM itself
        refuses options that it does not know, when the engine starts."""
        if self.engine_options and self.capabilities.structure_options is None:
            raise ConfigError(f"rollout.engine_options are vLLM's, and rollout.engine={self.engine}. Leave them out.")
        for name, value in self.engine_options.items():
            what = f"rollout.engine_options.{name}={value}"
            if name in OWN_KEYS:
                raise ConfigError(f"{what}: set {OWN_KEYS[name]} instead.")
            if why := BROKEN.get(name) or (not self.num_gpus_per_worker and ON_CPU.get(name)):
                raise ConfigError(f"{what}: cannot be set: {why}.")
            if name == "quantization" and value not in (None, *QUANTIZED_ONLINE):
                raise ConfigError(
                    f"{what}: such engines cannot take publications, which are of whole weights. Use online "
                    f"quantization, one of {', '.join(QUANTIZED_ONLINE)}, of a model that is not quantized."
                )

    @property
    def precision(self) -> Precision:
        """Bytes of an element of what an engine holds."""
        own, b = self.engine_options.get("quantization"), 2.0 if self.dtype == "bfloat16" else 4.0
        found = replace(QUANTIZED_ONLINE[own], computed=b) if own else Precision(b, b, b)
        cache = str(self.engine_options.get("kv_cache_dtype"))
        return replace(found, cache=next((size for name, size in CACHE_BYTES.items() if cache.startswith(name)), b))

    @property
    def engine_start_s(self) -> float:
        """Seconds for an engine to start: to load, and to compile where it does."""
        return self.start_timeout_s + (0.0 if self.enforce_eager else self.compile_timeout_s)

    @property
    def capabilities(self) -> RolloutCapabilities:
        """Capabilities of the engine; of the default one as long as `engine` is an interpolation."""
        return ROLLOUT_ENGINES.get(self.engine, ROLLOUT_ENGINES[RolloutConfig.engine])

    @property
    def update_mode(self) -> str:
        """What becomes of sequences under way when weights change."""
        return self.capabilities.on_update[0] if self.on_update == AUTO else self.on_update

    @property
    def keeps_caches(self) -> bool:
        """True if sequences under way sample on from keys and values of older weights."""
        return self.update_mode == "keep"

    @property
    def device(self) -> str:
        """Device of the engine: gpu or cpu."""
        return "gpu" if self.num_gpus_per_worker else "cpu"

    def truncated_to(self, treatment: str) -> frozenset[str]:
        """The limits whose samples are treated so: `mask` or `drop`."""
        return frozenset(limit for limit, chosen in self.truncated.items() if chosen == treatment)

    @property
    def follows_cluster(self) -> bool:
        """True if there are as many engines as there is room for."""
        return self.num_workers == AUTO

    @property
    def gpu_share(self) -> float:
        """Share of a GPU's memory that vLLM takes; as long as nobody has chosen (`auto`), the default."""
        chosen = self.gpu_memory_utilization
        return DEFAULT_SHARE if isinstance(chosen, str) else float(chosen)

    @property
    def least_workers(self) -> int:
        """Number of engines that the run cannot begin without."""
        return self.num_workers if isinstance(self.num_workers, int) else 1
