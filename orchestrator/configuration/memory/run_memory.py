"""Peaks of all that a run holds: of each role on its device, and of each node's host memory. Pure: no torch.

    config.json, configuration ─▶ RunMemory ─▶ ranks, engine, peaks ─▶ check, table (`memory_view.py`)
                                          └▶ host memory of a node (`host_memory.py`)

Figures are of one rank or engine; ranks of one role are alike but for rounding.

Device memory of a vLLM engine, part by part. Pure: no torch.

vLLM takes `rollout.gpu_memory_utilization` of the GPU whatever it needs: weights, what a step needs, and the rest is
for keys and values. So the parts say how many tokens can be under way, and whether the engine can start at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import ResourceError
from penstock.conf.rollout import RolloutConfig
from penstock.conf.run import RunConfig
from penstock.conf.weights import choose_transport, shares_gpus
from penstock.orchestrator.configuration.memory.model_shape import ModelShape
from penstock.orchestrator.configuration.memory.rank_memory import RankMemory, RankSetting, rank_memory

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


GIB = 2**30
PROCESS_BYTES = GIB
"""Estimate of what each process takes on a GPU beside its tensors: CUDA's context, kernels, and buffers of NCCL and
cuBLAS."""
ASLEEP_BYTES = GIB
"""Estimate of what an engine that sleeps keeps on its GPU beside that: captured graphs and buffers."""


@dataclass(frozen=True)
class RunMemory:
    """The peaks of a run's actors."""

    config: RunConfig
    flow: Dataflow
    shapes: Mapping[str, ModelShape]
    """Sizes of the policy, and of further models of the dataflow by name. What is missing is not counted."""
    gpu_bytes: float | None = None
    """Memory of a GPU; None: not known, or there are none."""

    @cached_property
    def ranks(self) -> dict[str, RankMemory]:
        """Peak of one rank of each model: policy, critic, and scorers by their actors' titles."""
        setting = policy_setting(self.config, self.shapes["policy"])
        ranks = {"policy": rank_memory(replace(setting, copied_bytes=self._copied_bytes))}
        if any(stage.kind in ("values", "critic") for stage in self.flow.stages):
            ranks["critic"] = rank_memory(replace(setting, is_scalar=True))
        for stage in (*self.flow.of_kind("logprobs"), *self.flow.of_kind("scores")):
            same = self.shapes["policy"] if stage.model == "reference" else None
            shape = self.shapes.get(str(stage.model), same)
            if shape is not None:
                is_scalar = stage.kind == "scores"
                scorer = replace(setting, shape=shape, is_trained=False, is_scalar=is_scalar)
                ranks[f"Scorer-{stage.name}"] = rank_memory(scorer)
        return ranks

    @property
    def trained(self) -> list[RankMemory]:
        """The models that one rank trains together."""
        return [self.ranks[name] for name in ("policy", "critic") if name in self.ranks]

    @cached_property
    def engine(self) -> EngineMemory | None:
        """Peak of one of an engine's GPUs, or of its process on a CPU; None: the run has no engines of vLLM."""
        samples = bool(self.flow.of_kind("rollout") or self.config.evaluation.every_steps)
        if not samples or self.config.rollout.engine != "vllm":
            return None
        gpu_bytes = (self.gpu_bytes or 0.0) if self.config.rollout.num_gpus_per_worker else 0.0
        return engine_memory(self.shapes["policy"], self.config.rollout, gpu_bytes, self.config.rollout.gpu_share)

    @property
    def rank_bytes(self) -> float:
        """Peak of a trainer's rank: one of its models is trained, and the others keep what is theirs, the policy's copy
        among it."""
        copy = self.ranks["policy"].parts["publication"]
        return max(
            one.total - one.parts["publication"] + copy + self.resident_bytes - one.resident for one in self.trained
        )

    @property
    def resident_bytes(self) -> float:
        """Bytes of a trainer's rank between two steps."""
        return sum(one.resident for one in self.trained)

    def peaks(self) -> dict[str, float]:
        """Bytes at the peak of a GPU of each kind, by what is on it, its processes included."""
        config = self.config
        peaks: dict[str, float] = {}
        own_engine = bool(self.engine and config.rollout.num_gpus_per_worker)
        together = own_engine and shares_gpus(config)
        of_rank = self.rank_bytes + PROCESS_BYTES + self._stream_bytes()
        of_engine = self.engine_bytes
        if together and config.placement == "colocated":
            weights = self.engine.weights if self.engine else 0.0
            trains = of_rank + PROCESS_BYTES + ASLEEP_BYTES
            loads = self.resident_bytes + weights + 2 * PROCESS_BYTES + ASLEEP_BYTES
            peaks["rank and engine, in turns"] = max(trains, loads, of_engine + PROCESS_BYTES)
        elif together:
            peaks["rank and engine together"] = of_rank + of_engine
        else:
            if config.trainer.num_gpus_per_rank:
                peaks["rank"] = of_rank / _share(config.trainer.num_gpus_per_rank)
            if own_engine:
                peaks["engine"] = of_engine / _share(config.rollout.num_gpus_per_worker)
        if config.trainer.num_gpus_per_rank:
            scorers = {name: memory for name, memory in self.ranks.items() if name.startswith("Scorer-")}
            for name, memory in scorers.items():
                peaks[name] = (memory.total + PROCESS_BYTES) / _share(config.trainer.num_gpus_per_rank)
        return peaks

    @property
    def engine_bytes(self) -> float:
        """Bytes that an engine takes of a GPU: what it is given, or what it needs at least if that is more."""
        if self.engine is None:
            return 0.0
        least = self.engine.weights + self.engine.step + self.engine.cache_token * self.config.rollout.max_model_len
        return max(least, self.engine.total) + PROCESS_BYTES

    def check(self) -> None:
        """Raise `ResourceError` for what does not fit a GPU, with the keys to change. Nothing is said where a GPU's
        memory is not known."""
        if self.gpu_bytes is None:
            return
        self._check_engine(self.gpu_bytes)
        for what, peak in self.peaks().items():
            if peak > self.gpu_bytes:
                raise ResourceError(
                    f"{what}: {_gib(peak)} at the peak, and a GPU has {_gib(self.gpu_bytes)}. {self._advice(what)} "
                    "`penstock validate` shows what takes how much."
                )

    def _check_engine(self, gpu_bytes: float) -> None:
        engine, rollout = self.engine, self.config.rollout
        if engine is None or not rollout.num_gpus_per_worker:
            return
        if engine.cache < engine.cache_token * rollout.max_model_len:
            raise ResourceError(
                f"engine: {_gib(rollout.gpu_share * gpu_bytes)} of a GPU (rollout.gpu_memory_utilization="
                f"{rollout.gpu_share:g}) are for weights of {_gib(engine.weights)}, {_gib(engine.step)} of a step, and "
                f"keys and values of at least one sequence of rollout.max_model_len={rollout.max_model_len} tokens. "
                f"Raise rollout.gpu_memory_utilization or rollout.tensor_parallel_size, set rollout.dtype=bfloat16, or "
                "lower rollout.max_model_len."
            )

    def _advice(self, what: str) -> str:
        """The keys that make it less, those that cost least first."""
        trainer, longest = self.config.trainer, self.config.rollout.max_model_len
        rank = self.ranks[what if what in self.ranks else "policy"]
        by_tokens = rank.parts["activations"] > rank.total / 2
        is_scorer = what in self.ranks
        keys = {
            "lower rollout.gpu_memory_utilization": "engine" in what,
            "set trainer.dtype=bfloat16": trainer.dtype == "float32",
            "set trainer.activation_checkpointing=true": by_tokens and not trainer.recomputes_layers,
            "set trainer.activation_offload=true": (
                by_tokens
                and trainer.recomputes_layers
                and not trainer.activation_offload
                and not is_scorer
                and trainer.tensor_parallel_size == 1
            ),
            f"lower trainer.max_tokens_per_microbatch={trainer.microbatch_tokens}, to {longest} at least": (
                by_tokens and trainer.microbatch_tokens > longest
            ),
            "raise trainer.sequence_parallel_size": by_tokens and trainer.engine == "fsdp",
            "raise trainer.num_ranks": not by_tokens,
            "raise trainer.shard_size": not by_tokens and trainer.shard_size > 0,
            "set trainer.deepspeed.zero_stage=3": trainer.engine == "deepspeed" and trainer.deepspeed.zero_stage < 3,
            "set trainer.offload=true": not (by_tokens or trainer.offload or is_scorer),
            "set trainer.lora.rank=16": not (by_tokens or trainer.lora.rank or is_scorer or trainer.engine != "fsdp"),
        }
        text = ", ".join(key for key, helps in keys.items() if helps and (what != "engine" or "rollout" in key))
        return f"{text[0].upper()}{text[1:]}."

    @property
    def publication_bytes(self) -> float:
        """Bytes of one version of the weights, in the engines' dtype."""
        config, shape = self.config, self.shapes["policy"]
        b = 2 if config.rollout.dtype == "bfloat16" else 4
        if config.trainer.lora.publishes_adapter:
            return b * shape.adapter_parameters(config.trainer.lora.rank, config.trainer.lora.target_modules)
        return b * shape.num_parameters

    @property
    def _copied_bytes(self) -> float:
        """Bytes of a rank's share of a version, which stays on its GPU while the next step is made."""
        config = self.config
        on_device = config.trainer.num_gpus_per_rank > 0 and not config.trainer.offload
        is_beside = config.max_staleness > 0 and choose_transport(config) == "shm" and self.flow.of_kind("rollout")
        return self.publication_bytes / config.trainer.num_ranks if on_device and is_beside else 0.0

    def _stream_bytes(self) -> float:
        """Bytes of the buckets in which weights are streamed."""
        bucket = self.config.weights.bucket_mib * 2**20
        return {"ipc": 1, "nccl": 4, "nccl_m2n": 4}.get(choose_transport(self.config), 0) * bucket


def policy_setting(config: RunConfig, shape: ModelShape) -> RankSetting:
    """What the memory of a rank of the policy depends on. One micro-batch is as large as allowed, or as all rows of a
    rank where those are fewer."""
    trainer = config.trainer
    longest = min(config.rollout.max_model_len, shape.longest or config.rollout.max_model_len)
    num_rows = trainer.groups_per_step * config.algorithm.group_size * trainer.ranks_per_row / trainer.num_ranks
    rows_tokens = max(1, int(num_rows / trainer.num_minibatches)) * longest
    budget = max(trainer.microbatch_tokens, longest)
    is_only = rows_tokens <= budget and config.environment.name is None
    read = max(0.0, 1 - config.rollout.sampling.max_tokens / longest)
    return RankSetting(
        shape, trainer, min(budget, rows_tokens) if is_only else budget, longest,
        is_only=is_only, attention=config.model.attention, on_gpu=trainer.num_gpus_per_rank > 0,
        seen_share=read if shape.tower is not None and config.rollout.max_pictures else 0.0,
    )  # fmt: skip


def _share(num_gpus: float) -> float:
    """The part of a GPU that is an actor's."""
    return min(1.0, num_gpus)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
