"""Peaks of all that a run holds, of each role on its device and of each node in host memory; and the values of keys
that are `auto`, from what fits a GPU. Pure: no torch.

    sizes of models (`model_shape.py`), configuration ─▶ RunMemory ─▶ ranks (`rank_memory.py`), engine, peaks, check
                                                             ├▶ host_parts: host memory of a node
                                                             └▶ choose_auto: values for what is `auto`

Figures are of one rank or engine; ranks of one role are alike but for rounding.

vLLM takes `rollout.gpu_memory_utilization` of the GPU whatever it needs: weights, what a step needs, and the rest is
for keys and values. So the parts say how many tokens can be under way, and whether the engine can start at all.

Host memory is in one of four places:

    /dev/shm     publications, copies of the state after each step, the store's large batches, Ray's object store
    pinned       buffers for transfers from GPUs, offloaded states, weights of engines that keep them asleep
    memory       the copy that a checkpoint is written from, states of ranks and engines on CPUs, the processes
    page cache   the model's files, which the kernel drops where memory is short

Keys that may be `auto`:

    trainer.stay_on_device             colocated: only if the engine has keys and values for all its sequences beside
    rollout.gpu_memory_utilization     the engine's own GPU: most of it; one that it shares: what the rank leaves
    trainer.activation_checkpointing   only if a usual micro-batch does not fit without
    trainer.max_tokens_per_microbatch  the largest power of two that fits

What is chosen leaves `SPARE` of the GPU free, since figures are estimates and an allocator wastes some. On CPUs, and
where a GPU's memory is not known, nothing is chosen: keys have their defaults.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.checks import AUTO
from penstock.conf.errors import ResourceError
from penstock.conf.rollout import DRAFT, RolloutConfig
from penstock.conf.run import RunConfig
from penstock.conf.trainer import DEFAULT_TOKENS, REMEMBERED_BYTES, TrainerConfig
from penstock.conf.weights import STREAMS, choose_transport, replaces_members, scorers_share_gpus, shares_gpus
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.configuration.model_shape import ModelShape
from penstock.orchestrator.configuration.rank_memory import RankMemory, RankSetting, rank_memory
from penstock.workers.weights.publication.costs import COPIES, STATE_BYTES

POLICY = "policy"
"""Name of the policy's model, among those of a run."""
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


def engine_memory(
    shape: ModelShape, config: RolloutConfig, gpu_bytes: float, share: float, draft: ModelShape | None = None
) -> EngineMemory:
    """Parts of the share of a GPU that the engine takes. On a CPU, where `rollout.kv_cache_gib` says how large the
    cache is, `gpu_bytes` is 0. `draft`: the model that drafts tokens, which vLLM does not quantise. It has keys and
    values of the same tokens, and its steps, between those of the model, are smaller."""
    parts, precision = config.tensor_parallel_size, config.precision
    routed = shape.num_layers * shape.routed_parameters
    linear = shape.num_layers * shape.layer_parameters - routed
    others = shape.num_parameters - linear - routed
    weights = (precision.linear * linear + precision.experts * routed + precision.computed * others) / parts
    cache_token = precision.cache * shape.cache_elements / min(parts, shape.kv_heads)
    if draft is not None:
        weights += precision.computed * draft.num_parameters / parts
        cache_token += precision.cache * draft.cache_elements / min(parts, draft.kv_heads)
    step = _step(shape, config, precision.computed)
    if not gpu_bytes:
        return EngineMemory(weights, step, config.kv_cache_gib * 2**30, cache_token)
    step += 0 if config.enforce_eager else GRAPHS_BYTES
    return EngineMemory(weights, step, share * gpu_bytes - weights - step, cache_token)


def _step(shape: ModelShape, config: RolloutConfig, b: float) -> float:
    """Bytes of one step: hidden states, q, k, v and the MLP of all its tokens, and logits of the sequences."""
    tokens = config.engine_options.get("max_num_batched_tokens") or max(STEP_TOKENS, config.max_model_len)
    widths = 2 * shape.q_width + 2 * shape.kv_width + 3 * shape.mlp_width * shape.experts_per_token
    of_tokens = tokens * b * (4 * shape.hidden + widths / config.tensor_parallel_size)
    return float(of_tokens + config.max_concurrent_samples * shape.vocabulary * SAMPLING_BYTES)


GIB = 2**30
PROCESS_BYTES = 2 * GIB
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

    @property
    def policies(self) -> dict[str, ModelShape]:
        """Sizes of the models that are trained, without a critic: `policy`, or several by their names, of which one
        whose size is not known is as large as `policy`."""
        return {
            name: self.shapes.get(name, self.shapes["policy"]) for name in self.config.trainer.own_models or (POLICY,)
        }

    @property
    def largest(self) -> ModelShape:
        """The size of the largest of them."""
        return max(self.policies.values(), key=lambda shape: shape.num_parameters)

    @cached_property
    def ranks(self) -> dict[str, RankMemory]:
        """Peak of one rank of each model: policy or policies, critic, and scorers by their actors' titles."""
        setting = policy_setting(self.config, self.shapes["policy"])
        ranks: dict[str, RankMemory] = {}
        for name, shape in self.policies.items():
            alone = self._of_policy(name)
            copied_bytes = 0.0 if ranks and alone is self else alone._copied_bytes  # of all that it trains
            ranks[name] = rank_memory(replace(policy_setting(alone.config, shape), copied_bytes=copied_bytes))
        if any(stage.kind in ("values", "critic") for stage in self.flow.stages):
            ranks["critic"] = rank_memory(replace(setting, is_scalar=True))
        for stage in self.flow.scorers:
            same = self.shapes["policy"] if stage.model == "reference" else None
            scored_by = self.shapes.get(str(stage.model), same)
            if scored_by is not None:
                own = policy_setting(replace(self.config, trainer=self.config.trainer.of_scorer(stage.name)), scored_by)
                scorer = replace(own, is_trained=False, is_scalar=stage.kind == "scores")
                ranks[f"Scorer-{stage.name}"] = rank_memory(scorer)
        return ranks

    def _of_policy(self, name: str) -> "RunMemory":
        """The run of a policy that has ranks of its own, as if it was the only one; this run for others."""
        if name not in self.config.trainer.policy_ranks:
            return self
        config = replace(self.config, trainer=self.config.trainer.of_policy(name))
        return replace(self, config=config, shapes={**self.shapes, POLICY: self.policies[name]})

    @property
    def trained(self) -> list[RankMemory]:
        """The models that are trained."""
        return [self.ranks[name] for name in (*self.policies, "critic") if name in self.ranks]

    @property
    def _together(self) -> list[list[RankMemory]]:
        """Those that one rank trains together: all, or where policies have ranks of their own, one on each."""
        return [[one] for one in self.trained] if self.config.trainer.policy_ranks else [self.trained]

    @cached_property
    def engine(self) -> EngineMemory | None:
        """Peak of one of an engine's GPUs, or of its process on a CPU; None: the run has no engines of vLLM."""
        samples = bool(self.flow.of_kind("rollout") or self.config.evaluation.every_steps)
        if not samples or not self.config.rollout.capabilities.is_estimated:
            return None
        gpu_bytes = (self.gpu_bytes or 0.0) if self.config.rollout.num_gpus_per_worker else 0.0
        draft = self.shapes.get(DRAFT) if self.config.rollout.speculation.method == DRAFT else None
        return engine_memory(self.largest, self.config.rollout, gpu_bytes, self.config.rollout.gpu_share, draft)

    @property
    def rank_bytes(self) -> float:
        """Peak of a trainer's rank: one of its models is trained, and the others keep what is theirs, the policy's copy
        among it."""
        return max(
            one.total - one.parts["publication"] + models[0].parts["publication"] + _resident(models) - one.resident
            for models in self._together
            for one in models
        )

    @property
    def resident_bytes(self) -> float:
        """Bytes of a trainer's rank between two steps."""
        return max(map(_resident, self._together))

    @property
    def scorers(self) -> dict[str, RankMemory]:
        """Peak of one rank of each scorer, by their actors' titles."""
        return {name: memory for name, memory in self.ranks.items() if name.startswith("Scorer-")}

    @property
    def scorers_beside(self) -> tuple[float, float]:
        """Bytes that the scorers hold that live with a rank, and those of their processes, which stay while the rank
        trains."""
        beside = [*self.scorers.values()] if scorers_share_gpus(self.config) else []
        return sum(one.total for one in beside), PROCESS_BYTES * len(beside)

    @property
    def offloaded_bytes(self) -> float:
        """Bytes of a trainer's rank in the host's memory (`trainer.offload`)."""
        return max(sum(one.on_host for one in models) for models in self._together)

    @property
    def trained_bytes(self) -> float:
        """Bytes of a rank's master weights and moments: its part of a copy of the state."""
        if self.config.trainer.policy_ranks:
            return max(self._of_policy(name).trained_bytes for name in self.policies)
        return STATE_BYTES * sum(_trained(self)) / self.config.trainer.num_ranks

    def peaks(self) -> dict[str, float]:
        """Bytes at the peak of a GPU of each kind, by what is on it, its processes included."""
        config = self.config
        peaks: dict[str, float] = {}
        scoring, processes = self.scorers_beside
        members = "rank, engine and scorer" if processes else "rank and engine"
        own_engine = bool(self.engine and config.rollout.num_gpus_per_worker)
        together = own_engine and shares_gpus(config)
        of_rank = self.rank_bytes + PROCESS_BYTES + self._stream_bytes()
        of_engine = self.engine_bytes
        if together and config.placement == "colocated":
            weights = self.engine.weights if self.engine else 0.0
            trains = of_rank + PROCESS_BYTES + ASLEEP_BYTES
            loads = self.resident_bytes + max(weights, scoring) + 2 * PROCESS_BYTES + ASLEEP_BYTES
            generates = of_engine + PROCESS_BYTES + scoring + self.staying_bytes
            peaks[f"{members}, in turns"] = max(trains, loads, generates) + processes
        elif together:
            peaks[f"{members} together"] = of_rank + of_engine + scoring + processes
        else:
            if config.trainer.num_gpus_per_rank:
                peaks["rank"] = of_rank / _share(config.trainer.num_gpus_per_rank)
            if own_engine:
                peaks["engine"] = of_engine / _share(config.rollout.num_gpus_per_worker)
        if config.trainer.num_gpus_per_rank and not processes:
            for name, memory in self.scorers.items():
                peaks[name] = (memory.total + PROCESS_BYTES) / _share(config.trainer.num_gpus_per_rank)
        return peaks

    @property
    def staying_bytes(self) -> float:
        """Bytes of a rank that stay on its GPU while the engine generates."""
        return self.resident_bytes if self.config.trainer.stays_on_device else 0.0

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
                f"{'Set trainer.stay_on_device=false. ' if self.staying_bytes else ''}"
                "Raise rollout.gpu_memory_utilization or rollout.tensor_parallel_size, set rollout.dtype=bfloat16, "
                "lower rollout.max_model_len, or set rollout.engine_options={quantization: fp8_per_channel}."
            )

    def _advice(self, what: str) -> str:
        """The keys that make it less, those that cost least first."""
        trainer, longest = self.config.trainer, self.config.rollout.max_model_len
        rank = self.ranks.get(what, self.trained[0])
        by_tokens = rank.parts["activations"] > rank.total / 2
        is_scorer = what in self.ranks
        keys = {
            "set trainer.stay_on_device=false": self.staying_bytes > 0 and "engine" in what,
            "lower rollout.gpu_memory_utilization": "engine" in what,
            "set trainer.dtype=bfloat16": trainer.dtype == "float32",
            "set trainer.activation_checkpointing=true": by_tokens and not trainer.recomputes_layers,
            "set trainer.activation_checkpointing=stream": (
                by_tokens
                and trainer.recomputes_layers
                and not (trainer.streams_layers or trainer.compile or trainer.ranks_per_row > 1 or is_scorer)
            ),
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
            "raise trainer.sequence_parallel_size": (
                by_tokens and trainer.capabilities.splits_layers and not trainer.splits_by_length
            ),
            "raise trainer.num_ranks": not by_tokens,
            "raise trainer.shard_size": not by_tokens and trainer.shard_size > 0,
            "set trainer.deepspeed.zero_stage=3": trainer.zero_stage in (1, 2),
            "set trainer.offload=true": not (by_tokens or trainer.offload or is_scorer),
            "set trainer.lora.rank=16": (
                trainer.capabilities.has_adapters and not (by_tokens or trainer.lora.rank or is_scorer)
            ),
        }
        text = ", ".join(key for key, helps in keys.items() if helps and (what != "engine" or "rollout" in key))
        return f"{text[0].upper()}{text[1:]}."

    @property
    def publication_bytes(self) -> float:
        """Bytes of one version of the weights, of all policies, in the engines' dtype."""
        config, shape = self.config, self.shapes["policy"]
        b = 2 if config.rollout.dtype == "bfloat16" else 4
        if config.trainer.lora.publishes_adapter:
            own = shape.adapter_parameters(config.trainer.lora.rank, config.trainer.lora.target_modules)
            return b * own * config.trainer.num_policies
        return float(b * sum(one.num_parameters for one in self.policies.values()))

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


def _resident(models: Sequence[RankMemory]) -> float:
    return sum(one.resident for one in models)


def policy_setting(config: RunConfig, shape: ModelShape) -> RankSetting:
    """What the memory of a rank of the policy depends on. One micro-batch is as large as allowed, or as all rows of a
    rank where those are fewer."""
    trainer = config.trainer
    longest = min(config.rollout.max_model_len, shape.longest or config.rollout.max_model_len)
    num_rows = trainer.groups_per_step * config.algorithm.group_size * trainer.ranks_per_row / trainer.num_ranks
    rows_tokens = max(1, int(num_rows / trainer.num_minibatches)) * longest
    budget = max(trainer.microbatch_tokens, longest)
    if trainer.splits_by_length:  # the largest group of ranks has as much for each
        budget = max(trainer.microbatch_tokens * trainer.split_sizes((shape.heads, shape.kv_heads))[-1], longest)
    is_only = rows_tokens <= budget and config.environment.name is None and not trainer.splits_by_length
    read = max(0.0, 1 - config.rollout.sampling.max_tokens / longest)
    return RankSetting(
        shape, trainer, min(budget, rows_tokens) if is_only else budget, longest,
        is_only=is_only, attention=config.model.attention, on_gpu=trainer.num_gpus_per_rank > 0,
        picture_share=read if shape.tower is not None and config.rollout.max_pictures else 0.0,
    )  # fmt: skip


def _share(num_gpus: float) -> float:
    """The part of a GPU that is an actor's."""
    return min(1.0, num_gpus)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


SHARED, PINNED, MEMORY, CACHE = "/dev/shm", "pinned", "memory", "page cache"
KEPT, KEPT_OF_OTHERS = "copies of the state", "copies of another node's state"
"""Names of parts, by faults.keep_state."""
BUFFERS = 2 * 64 * 2**20
"""Bytes of a rank's two buffers, through which weights come from its GPU."""
PROCESS = GIB
"""Estimate of a process that has imported torch or vLLM."""
WITH_TORCH = ("trainer", "scorer", "rollout")


@dataclass(frozen=True)
class HostPart:
    """Something that lies in host memory."""

    name: str
    place: str
    num_bytes: float
    key: str = ""
    """Key that makes it less."""
    is_optional: bool = False
    """True if the run can do without, or if it is an estimate or a bound: nothing is refused because of it."""


def host_parts(
    memory: RunMemory, actors: Sequence[ActorPlan], num_nodes: int = 1, is_own: bool = True
) -> list[HostPart]:
    """The parts of one node, largest first. `actors`: those on it; `num_nodes`: of the run; `is_own`: the run starts
    Ray there."""
    config = memory.config
    counts = {role: sum(actor.role == role for actor in actors) for role in (*WITH_TORCH, "store")}
    parts = [*_of_ranks(memory, counts["trainer"], num_nodes), *_of_engines(memory, counts["rollout"])]
    if choose_transport(config) == "shm" and counts["trainer"] + counts["rollout"]:
        published = config.num_publications * memory.publication_bytes
        parts.append(HostPart("publications of the weights", SHARED, published))
    for name, one in memory.ranks.items():
        scorers = sum(actor.role == "scorer" and f"Scorer-{actor.stage}" == name for actor in actors)
        if not config.trainer.num_gpus_per_rank:
            number = scorers if name.startswith("Scorer") else _num_ranks(config.trainer, name, actors)
            parts.append(HostPart(f"{name}: all of its ranks", MEMORY, number * one.total, "trainer.num_ranks"))
        elif config.placement == "colocated":
            away = scorers * one.resident
            parts.append(HostPart(f"{name}, while ranks have the GPUs", MEMORY, away, "placement=disaggregated"))
    parts += [
        HostPart("the store's large batches, at most", SHARED, config.store.shared_memory_mib * 2**20,
                 "store.shared_memory_mib", True),
        HostPart("pictures that ranks have read, at most", MEMORY,
                 bool(config.rollout.max_pictures) * REMEMBERED_BYTES * (counts["trainer"] + counts["scorer"]),
                 is_optional=True),
        HostPart("the store's columns, at most", MEMORY, bool(counts["store"]) * config.store.max_bytes,
                 "store.max_bytes", True),
        HostPart("Ray's object store", SHARED, is_own * config.cluster.object_store_mib * 2**20,
                 "cluster.object_store_mib"),
        HostPart("processes of ranks and engines", MEMORY, PROCESS * sum(counts[role] for role in WITH_TORCH),
                 is_optional=True),
        HostPart("the model's files, while they are read", CACHE,
                 2 * sum(shape.num_parameters for shape in memory.policies.values())),
    ]  # fmt: skip
    return sorted((part for part in parts if part.num_bytes), key=lambda part: -part.num_bytes)


def _num_ranks(trainer: TrainerConfig, model: str, actors: Sequence[ActorPlan]) -> int:
    """Number of the ranks among actors that train a model."""
    own = trainer.policy_ranks.get(model, range(trainer.num_ranks))
    return sum(actor.role == "trainer" and actor.rank in own for actor in actors)


def reserved_bytes(memory: RunMemory, actor: ActorPlan) -> float:
    """Bytes of host memory that an actor holds at its peak for sure, and shares with no other."""
    parts = host_parts(memory, [actor], is_own=False)
    return sum(part.num_bytes for part in parts if part.place in (PINNED, MEMORY) and not part.is_optional)


def _of_ranks(memory: RunMemory, num_ranks: int, num_nodes: int) -> list[HostPart]:
    config = memory.config
    state = STATE_BYTES * sum(_trained(memory)) / config.trainer.num_ranks * num_ranks
    on_gpus = config.trainer.num_gpus_per_rank > 0
    parts = []
    if config.faults.keep_state and replaces_members(config):
        is_optional = config.faults.keep_state == AUTO
        parts.append(HostPart(KEPT, SHARED, COPIES * state, "faults.keep_state=false", is_optional))
        if num_nodes > 1 and config.faults.partner_share:
            parts.append(HostPart(KEPT_OF_OTHERS, SHARED, COPIES * state, "faults.partner_share=0", True))
    if on_gpus and choose_transport(config) == "shm":
        parts.append(HostPart("buffers for weights from GPUs", PINNED, num_ranks * BUFFERS))
    if config.checkpoint.every_steps:
        parts.append(HostPart("copy that a checkpoint is written from", MEMORY, state, "checkpoint.every_steps=0"))
    offloaded = num_ranks * memory.offloaded_bytes
    parts.append(HostPart("weights and optimizer (trainer.offload)", PINNED, offloaded))
    waiting = num_ranks * max((one.activations_on_host for one in memory.trained), default=0.0)
    name, key = "activations (trainer.activation_offload), at most", "trainer.activation_offload=false"
    parts.append(HostPart(name, PINNED, waiting, key, True))
    if config.placement == "colocated" and on_gpus and not config.trainer.stays_on_device:
        left, place = num_ranks * memory.resident_bytes, MEMORY if config.trainer.zero_stage else PINNED
        parts.append(HostPart("ranks, while engines have the GPUs", place, left, "placement=disaggregated"))
    return parts


def _of_engines(memory: RunMemory, num_engines: int) -> list[HostPart]:
    config, engine = memory.config, memory.engine
    if engine is None:
        return []
    if not config.rollout.num_gpus_per_worker:
        total = num_engines * config.rollout.tensor_parallel_size * engine.total
        return [HostPart("engines: weights, cache and step", MEMORY, total, "rollout.kv_cache_gib")]
    if config.placement != "colocated" or not keeps_weights_asleep(config):
        return []
    asleep = num_engines * config.rollout.tensor_parallel_size * engine.weights
    return [HostPart("weights of engines that sleep", PINNED, asleep, "placement=disaggregated")]


def keeps_weights_asleep(config: RunConfig) -> bool:
    """Return whether engines that sleep keep their weights in host memory: no publication brings them again."""
    comes_again = not config.trainer.lora.publishes_adapter and choose_transport(config) not in STREAMS
    return not (config.rollout.capabilities.discards_weights and comes_again)


def _trained(memory: RunMemory) -> list[float]:
    """Trained parameters of each model of a trainer, over all ranks."""
    trainer, lora = memory.config.trainer, memory.config.trainer.lora

    def trained(shape: ModelShape) -> float:
        frozen = shape.tower_parameters if trainer.freezes_tower else 0
        return shape.adapter_parameters(lora.rank, lora.target_modules) if lora.rank else shape.num_parameters - frozen

    adapters = trainer.num_policies if lora.rank else 1
    policies = [adapters * trained(shape) for shape in memory.policies.values()]
    return [*policies, trained(memory.shapes[POLICY])][: len(memory.trained)]


AUTO_KEYS = (
    "trainer.stay_on_device", "rollout.gpu_memory_utilization", "trainer.activation_checkpointing",
    "trainer.max_tokens_per_microbatch",
)  # fmt: skip
"""Keys that may be `auto`."""
SPARE, LEAST_SHARE = 0.08, 0.01
"""Share of a GPU that stays free, and the least that an engine is given."""
MOST_OF_GPU = 0.9
"""Largest share of a GPU of its own for an engine, which is vLLM's default."""
MOST_TOKENS, FEWEST_TOKENS = 32768, 1024
"""Bounds of a micro-batch's tokens: larger ones gain nothing, smaller ones leave a GPU idle."""


def choose_auto(memory: RunMemory) -> RunMemory:
    """The run with numbers in the place of what is `auto`."""
    if memory.gpu_bytes is None:
        return memory
    config = memory.config
    if config.trainer.stay_on_device == AUTO and config.placement == "colocated" and shares_gpus(config):
        stays = choose_auto(with_values(memory, "trainer", stay_on_device=True))
        return stays if _has_room(stays) else choose_auto(with_values(memory, "trainer", stay_on_device=False))
    if config.rollout.gpu_memory_utilization == AUTO and config.rollout.num_gpus_per_worker:
        if config.placement == "colocated":  # a scorer's micro-batches lie beside the engine, which has the rest
            least = choose_auto(with_values(memory, "rollout", gpu_memory_utilization=LEAST_SHARE))
            return with_values(least, "rollout", gpu_memory_utilization=_engine_share(least))
        memory = with_values(memory, "rollout", gpu_memory_utilization=_engine_share(memory))
    if not config.trainer.num_gpus_per_rank:
        return memory
    if config.trainer.activation_checkpointing == AUTO:
        kept = with_values(memory, "trainer", activation_checkpointing=False)
        usual = _with_tokens(kept, min(DEFAULT_TOKENS, kept.config.trainer.microbatch_tokens))
        keeps = _fits(usual) and not config.trainer.activation_offload  # which copies less where layers are recomputed
        memory = kept if keeps else with_values(memory, "trainer", activation_checkpointing=True)
    if config.trainer.max_tokens_per_microbatch == AUTO:
        memory = _largest(memory)
    return memory


def _has_room(memory: RunMemory) -> bool:
    """Return whether all fits, and the engine has keys and values for as many of the longest sequences as it gets at
    once: with fewer it would generate for longer than states are copied."""
    engine, config = memory.engine, memory.config
    if engine is None or not _fits(memory):
        return False
    samples = config.trainer.groups_per_step * config.algorithm.group_size / config.rollout.least_workers
    at_once = min(config.rollout.max_concurrent_samples, math.ceil(samples))
    return engine.cache_tokens >= at_once * config.rollout.max_model_len


def chosen(before: RunConfig, after: RunConfig) -> list[str]:
    """What was chosen, as on the command line."""
    values = attrgetter(*AUTO_KEYS)
    changes = zip(AUTO_KEYS, values(before), values(after), strict=True)
    return [f"{key}={str(new).lower()}" for key, old, new in changes if old != new]


def _largest(memory: RunMemory) -> RunMemory:
    """The run with the largest micro-batches that fit; with the smallest, if none does."""
    tokens = MOST_TOKENS
    while tokens > FEWEST_TOKENS and not _fits(_with_tokens(memory, tokens)):
        tokens //= 2
    return _with_tokens(memory, tokens)


def _engine_share(memory: RunMemory) -> float:
    """The engine's share, in hundredths, rounded down."""
    assert memory.gpu_bytes is not None
    config = memory.config
    free = memory.gpu_bytes - PROCESS_BYTES
    if shares_gpus(config):
        free -= SPARE * memory.gpu_bytes + PROCESS_BYTES
        scoring, processes = memory.scorers_beside
        if config.placement == "colocated":  # the rank's weights are there when the engine starts and when it loads
            weights = sum(memory.ranks[name].parts["weights"] for name in memory.policies)
            free -= max(weights, memory.staying_bytes + scoring) + processes
        else:
            free *= config.rollout.num_gpus_per_worker
    gpus = 1.0 if shares_gpus(config) else min(1.0, config.rollout.num_gpus_per_worker)
    share = min(MOST_OF_GPU * gpus, free / memory.gpu_bytes)
    return max(LEAST_SHARE, math.floor(100 * share) / 100)


def _fits(memory: RunMemory) -> bool:
    assert memory.gpu_bytes is not None
    room = (1 - SPARE) * memory.gpu_bytes
    return all(peak <= room for what, peak in memory.peaks().items() if what != "engine")


def _with_tokens(memory: RunMemory, tokens: int) -> RunMemory:
    return with_values(memory, "trainer", max_tokens_per_microbatch=tokens)


def with_values(memory: RunMemory, section: str, **values: Any) -> RunMemory:
    """The run with these values in a section."""
    changed = replace(getattr(memory.config, section), **values)
    return replace(memory, config=replace(memory.config, **{section: changed}))
