"""Seconds of all that one run does on given kinds of GPUs, from the sizes of its models. Pure: no torch.

An engine's steps: kernels from measured tables where there are any, else by a roofline.

    decode   weights that the batch touches, keys and values of all contexts, read once      or the products, if longer
             + two all-reduces a layer between the engine's GPUs + the scheduler
    prefill  products of all tokens

A token of a mixture goes through k of its E experts, so that a batch of n touches E (1 - (1 - k/E)^n) of them. Without
the scheduler's time the roofline is within 13% of 23 of 24 kernel times of vLLM on H100, and 21% low for one batch of 1
(aiconfigurator-core 0.12.0: Llama-3.1-8B and 70B, Qwen3-32B, Qwen3-30B-A3B; docs/planning.md).

The tables are those of aiconfigurator-core, the extra `penstock[planner]`, for some kinds of GPUs in bfloat16:

    sizes of a model ─▶ config.json ─▶ EngineHandle ─▶ points of a grid, once an engine ─▶ KernelTables

Their times fall here and there where a batch grows, as kernels change with its size: by 5% at most for half of the
engines, by 13% at most on H100, and by up to 39% for a small model over eight A100. Plans would hang on such dents, so
that times only rise here: halfway between what is higher before and what is lower after.

An update by one rank:

    products      forward 2 P a token, backward twice that, forward again where layers are recomputed, and attention,
                  which grows with the square of a row. LoRA saves the weights' gradients, and loses as much to small
                  products
    adapters      read and write what goes into and out of each linear layer
    collectives   weights gathered for each micro-batch and gradients reduced (FSDP2), hidden states (tensor parallel),
                  q, k, v and results (Ulysses)
    offload       copies a rank's shard to the GPU for each pass over a micro-batch, and its gradients back
    optimizer     reads and writes master weights, gradients and moments once
    launches      a layer of a micro-batch takes some time however small it is, more of it a mixture of experts
"""

import json
import logging
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.conf.rollout import Precision
from penstock.conf.trainer import KEEP_WHOLE_BYTES, TrainerConfig
from penstock.conf.weights import replaces_members
from penstock.orchestrator.configuration.model_shape import ModelShape
from penstock.orchestrator.configuration.run_memory import RunMemory, keeps_weights_asleep
from penstock.planner.durations import SyncSeconds
from penstock.planner.hardware import KINDS, GpuKind
from penstock.workers.weights.publication.costs import BUSES, DEVICE_RATE, MOVED, PublicationTimes

PACKAGE = "aiconfigurator-core"
SYSTEMS = {
    "a100": "a100_sxm", "b200": "b200_sxm", "gb200": "gb200", "h100": "h100_sxm", "h200": "h200_sxm", "l40s": "l40s",
}  # fmt: skip
"""Names of kinds in the tables, those that were measured with vLLM."""
CLIFFS = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896)
"""Batches beyond which another row of tiles begins: one sequence more takes visibly longer."""
BATCHES: list[int] = sorted({round(2**octave * (1 + part / 8)) for octave in range(10) for part in range(8)}.union(
    (batch + 1 for batch in CLIFFS), [1024, 1536, 2048, 4096]
))  # fmt: skip
"""Sequences of a decode step at the grid's points."""
CONTEXTS: tuple[int, ...] = (1, *(2**power for power in range(7, 18)))
"""Tokens before the new one at the grid's points."""
PROMPTS: tuple[int, ...] = (1, *(2**power for power in range(6, 14)))
"""Tokens of a prompt at the grid's points. Longer ones are read in pieces, as vLLM does."""
FP8_RATE = 2.0
"""Products of 8 bits a second over those of bfloat16."""
MASTER_BYTES = 4
OPTIMIZER_BYTES = 28
"""Bytes that an optimizer step reads and writes of each parameter: weight, gradient and two moments read, three of them
written."""

ADAPTER_PASSES = 4
"""Times that adapters read or write a linear layer's input and output: forward, and backward."""
REWARD_S = 2e-3
"""Seconds of a reward for a row, by one actor: math-verify on a short answer. Judges and sandboxes take longer, and
wait beside engines rather than before them."""


@dataclass(frozen=True)
class Efficiencies:
    """Factors of the cost model."""

    bandwidth: float = 0.82
    """Share of a GPU's bandwidth at which decoding reads weights, keys and values."""
    prefill: float = 0.63
    """Share of a GPU's FLOPs at which prompts are read."""
    training: float = 0.49
    """Share of a GPU's FLOPs in forward and backward of long micro-batches."""
    training_mixture: float = 0.22
    """The same of a mixture's experts, whose products are many and small."""
    link: float = 0.75
    """Share of a link's rate in collectives."""
    collective_s: float = 15e-6
    """Seconds of a collective of few bytes between GPUs of a node."""
    decode_s: float = 0.35e-3
    """Seconds of a decode step beside its layers: the head's kernels and sampling on the GPU."""
    schedule_s: float = 2.0e-3
    """Seconds of a decode step in which the engine's scheduler prepares it."""
    sequence_s: float = 8e-6
    """Seconds of a decode step for each of its sequences: their records in Python."""
    layer_s: float = 1.2e-3
    """Seconds of one layer's forward and backward beside its products: kernels' launches, hooks of FSDP."""
    layer_mixture_s: float = 13.3e-3
    """The same of a layer with experts: tokens are sorted, exchanged, and put back."""
    update_s: float = 1.05
    """Seconds of an update beside all this: collating, metrics, the optimizer's launches."""
    host_optimizer: float = 25e9
    """Bytes a second at which an optimizer on the host reads and writes its states, a rank."""
    decode_factor: float = 1.36
    """Seconds of an engine in steps of RL over those of its kernels, by measured tables where there are any, and its
    scheduler; serving alone says 1.0, and a run says its own (`calibration.py`)."""
    update_factor: float = 1.0
    """Measured seconds of ranks over these, where a run says so."""
    overlap: float = 0.7
    """Share of FSDP's collectives that computation hides, where there is enough of it."""


def colocated_bytes(memory: RunMemory) -> float:
    """Bytes that a colocated step copies over the bus of one GPU, beside a publication: what a rank keeps of its state,
    which serves while it is away (FSDP2); what it leaves and takes besides; scorers that come back; and weights of
    engines that keep them asleep. What is frozen was copied to the host once."""
    config, state = memory.config, memory.trained_bytes
    is_offloaded = config.trainer.offload
    keeps = config.faults.keep_state is not False and replaces_members(config) and not is_offloaded
    moved = sum(one.resident for one in memory.scorers.values()) + (state if keeps else 0.0)
    if not config.trainer.stays_on_device:
        is_copied = not is_offloaded and (config.trainer.zero_stage > 0 or not keeps)
        moved += memory.resident_bytes + (state if is_copied else 0.0)
    asleep = memory.engine is not None and keeps_weights_asleep(config)
    return moved + (2 * memory.engine.weights if memory.engine is not None and asleep else 0.0)


@dataclass(frozen=True)
class KernelTables:
    """Kernel times of one engine in seconds, at the grid's points; even between them."""

    decode: Sequence[Sequence[float]]
    """Seconds of a decode step, by `BATCHES` and `CONTEXTS`."""
    prefill: Sequence[float]
    """Seconds in which a prompt is read, by `PROMPTS`."""

    def decode_s(self, num_sequences: float, context: float) -> float:
        """Seconds of a decode step's kernels. `context`: mean tokens before the new one."""
        row = min(max(bisect_right(BATCHES, num_sequences) - 1, 0), len(BATCHES) - 2)
        column = min(max(bisect_right(CONTEXTS, context) - 1, 0), len(CONTEXTS) - 2)
        lower, upper = self.decode[row], self.decode[row + 1]
        across = (context - CONTEXTS[column]) / (CONTEXTS[column + 1] - CONTEXTS[column])
        first = lower[column] + across * (lower[column + 1] - lower[column])
        second = upper[column] + across * (upper[column + 1] - upper[column])
        return first + (num_sequences - BATCHES[row]) / (BATCHES[row + 1] - BATCHES[row]) * (second - first)

    def prefill_s(self, tokens: int) -> float:
        """Seconds of reading prompts of `tokens` tokens in all."""
        pieces, rest = divmod(tokens, PROMPTS[-1])
        if not rest:
            return pieces * self.prefill[-1]
        at = min(bisect_right(PROMPTS, rest) - 1, len(PROMPTS) - 2)
        part = (rest - PROMPTS[at]) / (PROMPTS[at + 1] - PROMPTS[at])
        return pieces * self.prefill[-1] + self.prefill[at] + part * (self.prefill[at + 1] - self.prefill[at])


@dataclass(frozen=True)
class Kernels:
    """Where an engine's kernel times come from."""

    measured: KernelTables | None = None
    """None: a roofline has to do."""
    why: str = ""
    """Reason for that."""


@lru_cache(maxsize=64)
def kernels_of(shape: ModelShape, kind: GpuKind, parts: int, precision: Precision) -> Kernels:
    """The measured times of an engine that is split over `parts` GPUs, if there are any."""
    known = KINDS.get(kind.name)
    if known is None or replace(known, memory_gib=kind.memory_gib) != kind or kind.name not in SYSTEMS:
        return Kernels(why="not in the tables")
    if shape.has_own_layers:
        return Kernels(why="no tables for its layers")
    if precision != Precision():  # tables of 8 bits are further from what was served than the roofline
        return Kernels(why="not in bfloat16")
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle  # late: an extra, and it takes time
    except ImportError:
        return Kernels(why="without penstock[planner]")
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)  # it tells of tables that are not asked for
    split = {"moe_tp_size": parts} if shape.num_experts else {}
    with TemporaryDirectory() as place:
        Path(place, "config.json").write_text(json.dumps(_config_of(shape)), encoding="utf-8")
        try:
            handle = EngineHandle.compile(place, SYSTEMS[kind.name], "vllm", tp_size=parts, **split)
            return Kernels(_tabulated(handle))
        except (AssertionError, KeyError, RuntimeError, ValueError):  # all that it raises for what it has no rows of
            return Kernels(why=f"no rows for this model, TP{parts}")


def rising(values: Sequence[float]) -> list[float]:
    """The values where they rise; where they fall, the geometric mean of the highest before and the lowest after. The
    result never falls."""
    highest = accumulate(values, max)
    lowest = [*accumulate(reversed(values), min)][::-1]
    return [math.sqrt(high * low) if high > low else high for high, low in zip(highest, lowest, strict=True)]


def _tabulated(handle: Any) -> KernelTables:
    """Times at the grid's points, which the package says in milliseconds."""
    by_context = [
        rising([handle.predict_decode_latency(batch, context) / 1e3 for batch in BATCHES]) for context in CONTEXTS
    ]
    prompts = rising([handle.predict_prefill_latency(1, tokens, 0) / 1e3 for tokens in PROMPTS])
    return KernelTables([rising(row) for row in zip(*by_context, strict=True)], prompts)


def _config_of(shape: ModelShape) -> dict[str, Any]:
    """A config.json with these sizes, of an architecture that has them."""
    kind = ("llama", "LlamaForCausalLM")
    if shape.num_experts:
        kind = ("qwen3_moe", "Qwen3MoeForCausalLM")
    elif shape.has_head_norms:
        kind = ("qwen3", "Qwen3ForCausalLM")
    return {
        "model_type": kind[0], "architectures": [kind[1]], "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp_width, "moe_intermediate_size": shape.mlp_width,
        "num_experts": shape.num_experts, "num_experts_per_tok": shape.experts_per_token,
        "vocab_size": shape.vocabulary, "tie_word_embeddings": shape.is_tied, "torch_dtype": "bfloat16",
        "max_position_embeddings": CONTEXTS[-1],
    }  # fmt: skip


@dataclass(frozen=True)
class EngineCosts:
    """One engine on GPUs of one kind."""

    shape: ModelShape
    kind: GpuKind
    efficiencies: Efficiencies
    tensor_parallel_size: int = 1
    precision: Precision = field(default_factory=Precision)
    kernels: Kernels = field(default_factory=Kernels)

    def decode_s(self, num_sequences: float, context: float) -> float:
        """Seconds of one decode step with its scheduling. `context`: mean tokens before the new one."""
        of_scheduler = self.efficiencies.schedule_s + num_sequences * self.efficiencies.sequence_s
        return (self.kernels_s(num_sequences, context) + of_scheduler) * self.efficiencies.decode_factor

    def kernels_s(self, num_sequences: float, context: float) -> float:
        """Seconds of its kernels alone."""
        if self.kernels.measured is not None:
            return self.kernels.measured.decode_s(num_sequences, context)
        parts, rates = self.tensor_parallel_size, self.efficiencies
        read, bandwidth = self._read_bytes(num_sequences) / parts, self.kind.bandwidth * rates.bandwidth
        products = self._products_s(num_sequences)
        cached = num_sequences * context * self._cache_bytes_of_token()
        return max(read / bandwidth, products) + cached / bandwidth + self._reduced_s(num_sequences) + rates.decode_s

    def prefill_s(self, tokens: int) -> float:
        """Seconds of reading prompts of `tokens` tokens in all."""
        if not tokens:
            return 0.0
        if self.kernels.measured is not None:
            return self.kernels.measured.prefill_s(tokens)
        return self._products_s(tokens) + self._reduced_s(tokens)

    def _products_s(self, num_tokens: float) -> float:
        products = 2 * num_tokens * active_parameters(self.shape) / self.tensor_parallel_size
        is_faster = self.precision.is_eight_bit and self.kind.has_fp8
        return products / (self.kind.flops * self.efficiencies.prefill * (FP8_RATE if is_faster else 1))

    def _read_bytes(self, num_tokens: float) -> float:
        """Bytes of weights that a batch reads. Of the embedding it reads a row a token, which is nothing."""
        shape, own, missed = self.shape, self.precision, 0.0
        if shape.num_experts:
            missed = (1 - shape.experts_per_token / shape.num_experts) ** num_tokens
        routed = shape.routed_parameters
        layer = own.linear * (shape.layer_parameters - routed) + own.experts * routed * (1 - missed)
        return shape.num_layers * layer + own.computed * shape.head_parameters

    def _cache_bytes_of_token(self) -> float:
        return self.precision.cache * self.shape.cache_elements / min(self.tensor_parallel_size, self.shape.kv_heads)

    def _reduced_s(self, num_tokens: float) -> float:
        """Seconds of two all-reduces a layer."""
        parts = self.tensor_parallel_size
        if parts == 1:
            return 0.0
        sent = 2 * (parts - 1) / parts * num_tokens * self.shape.hidden * self.precision.computed
        one = self.efficiencies.collective_s + sent / (self.kind.link * self.efficiencies.link)
        return 2 * self.shape.num_layers * one


def describe_kernel_sources(engines: Iterable[EngineCosts]) -> str:
    """Where the kernel times of these engines come from, in one line."""
    kinds: dict[str, set[str]] = {}
    for engine in engines:
        why = f"a roofline ({engine.kernels.why})"
        source = why if engine.kernels.measured is None else f"the measured tables of {PACKAGE} {version(PACKAGE)}"
        kinds.setdefault(source, set()).add(engine.kind.name)
    sources = [f"{', '.join(sorted(names))} from {source}" for source, names in kinds.items()]
    return f"Kernel times of engines: {'; '.join(sources)}."


def active_parameters(shape: ModelShape) -> float:
    """Parameters of the products that one token takes part in: of a mixture, those of its experts and the router."""
    passed_by = shape.routed_parameters - routed_of_token(shape)
    return shape.num_layers * (shape.attention_parameters + shape.mlp_parameters - passed_by) + shape.head_parameters


def routed_of_token(shape: ModelShape) -> float:
    """Parameters of the experts of one layer that a token is routed through; 0: the layers are dense."""
    return shape.routed_parameters * shape.experts_per_token / shape.num_experts if shape.num_experts else 0.0


@dataclass(frozen=True)
class RankCosts:
    """One rank of the trainer."""

    shape: ModelShape
    kind: GpuKind
    efficiencies: Efficiencies
    config: TrainerConfig
    gpus_per_node: int = 8

    def update_s(self, lengths: Sequence[int]) -> float:
        """Seconds of an update. `lengths`: tokens of each row that the rank trains on, whole rows where several ranks
        split one."""
        num_batches = self._num_microbatches(lengths)
        computed = self._computed_s(lengths) + self._adapted_s(sum(lengths)) + num_batches * self._launched_s
        copies = 2 if self.config.lora.rank else 3  # forward, backward, gradients
        moved = num_batches * (self._gathered_s() + self._offloaded_s(copies)) + self._split_s(lengths)
        hidden = min(computed, moved) * self.efficiencies.overlap
        steps = self.config.num_minibatches * self._optimizer_s()
        seconds = computed + moved - hidden + steps + self.efficiencies.update_s
        return seconds * self.efficiencies.update_factor

    def score_s(self, lengths: Sequence[int]) -> float:
        """Seconds of a forward pass alone: a reference's, or old log-probabilities."""
        each = self._launched_s / 3 + self._offloaded_s(1)
        return self._products_s(lengths, 1) + self._num_microbatches(lengths) * each

    @property
    def _parts(self) -> int:
        return self.config.ranks_per_row

    @property
    def _launched_s(self) -> float:
        """Seconds of a micro-batch's layers, forward and backward, beside their products."""
        rates = self.efficiencies
        return self.shape.num_layers * (rates.layer_mixture_s if self.shape.num_experts else rates.layer_s)

    @property
    def _element_bytes(self) -> int:
        return 2 if self.config.dtype == "bfloat16" else 4

    @property
    def _shards(self) -> int:
        return (self.config.shard_size or self.config.num_ranks) // self.config.tensor_parallel_size

    def _num_microbatches(self, lengths: Sequence[int]) -> int:
        """Micro-batches of all optimizer steps of an update."""
        budget = self.config.microbatch_tokens * (self.config.sequence_ranks if self.config.splits_by_length else 1)
        total, budget = sum(lengths), max(budget, max(lengths, default=1))
        return max(self.config.num_minibatches, -(-total // budget))

    def _computed_s(self, lengths: Sequence[int]) -> float:
        """Seconds of an update's products: forward, backward as two, and forward again where layers are recomputed."""
        return self._products_s(lengths, 4 if self.config.recomputes_layers else 3)

    def _products_s(self, lengths: Sequence[int], passes: int) -> float:
        """Seconds of `passes` passes over rows. Experts' products attain less than dense ones."""
        shape, rates = self.shape, self.efficiencies
        experts = shape.num_layers * routed_of_token(shape)
        dense, tokens = active_parameters(shape) - experts, sum(lengths)
        scores = 2 * shape.num_layers * shape.q_width * sum(length**2 for length in lengths)  # causal: half of both
        dense_flops = (2 * dense * tokens + scores) / rates.training
        return passes * (dense_flops + 2 * experts * tokens / rates.training_mixture) / self._parts / self.kind.flops

    def _adapted_s(self, tokens: int) -> float:
        """Seconds in which adapters read and write activations of the linear layers, in float32."""
        shape = self.shape
        if not self.config.lora.rank:
            return 0.0
        widths = 4 * shape.hidden + 2 * shape.q_width + 2 * shape.kv_width
        widths += 3 * (shape.hidden + shape.mlp_width) * shape.experts_per_token
        num_bytes = 4 * ADAPTER_PASSES * tokens * shape.num_layers * widths
        return num_bytes / self._parts / (self.kind.bandwidth * self.efficiencies.bandwidth)

    def _gathered_s(self) -> float:
        """Seconds of a micro-batch's collectives of weights and gradients, at the slowest link that they cross."""
        shards = self._shards
        if shards == 1:
            return 0.0
        parameters = self.shape.num_parameters / self.config.tensor_parallel_size
        is_kept = parameters * MASTER_BYTES <= KEEP_WHOLE_BYTES and not self.config.offload
        passes = 1 if is_kept else 2  # forward, and backward again
        sent = parameters * (passes * self._element_bytes + (0 if self.config.lora.rank else MASTER_BYTES))
        within = shards * self.config.tensor_parallel_size <= self.gpus_per_node
        link = self.kind.link if within else min(self.kind.link, self.kind.network)
        return sent * (shards - 1) / shards / (link * self.efficiencies.link)

    def _offloaded_s(self, copies: int) -> float:
        """Seconds of moving `copies` copies of the rank's shard, in float32, over the bus to the host."""
        if not self.config.offload:
            return 0.0
        return copies * self._own_parameters * MASTER_BYTES / BUSES[self.kind.bus]

    @property
    def _own_parameters(self) -> float:
        """Parameters of a rank's shard."""
        return self.shape.num_parameters / self.config.tensor_parallel_size / self._shards

    def _groups(self, lengths: Sequence[int]) -> list[int]:
        """Ranks that split each row; where that is chosen by length, as many as bring it to an even share of a
        pass."""
        most = self.config.sequence_ranks
        if not self.config.splits_by_length:
            return [most] * len(lengths)
        share = self._products_s(lengths, 1) / self._num_microbatches(lengths) / most
        shares = (max(1.0, self._products_s([length], 1) / share) for length in lengths)
        return [min(most, 1 << math.ceil(math.log2(count))) for count in shares]

    def _split_s(self, lengths: Sequence[int]) -> float:
        """Seconds of the collectives of ranks that split rows: all-reduces of hidden states for tensor parallelism,
        all-to-alls of q, k, v and results for sequence parallelism; forward, backward, and once more where layers are
        recomputed."""
        shape, passes = self.shape, 3 if self.config.recomputes_layers else 2
        tensor, sequence = self.config.tensor_parallel_size, self.config.sequence_ranks
        sent = sum(lengths) * 2 * 2 * (tensor - 1) / tensor * shape.hidden
        exchanged = sum(length * (1 - 1 / size) for length, size in zip(lengths, self._groups(lengths), strict=True))
        sent += exchanged * (2 * shape.q_width + 2 * shape.kv_width) / tensor
        num_bytes = shape.num_layers * passes * sent / sequence * self._element_bytes
        within = tensor * sequence <= self.gpus_per_node
        return num_bytes / ((self.kind.link if within else self.kind.network) * self.efficiencies.link)

    def _optimizer_s(self) -> float:
        if self.config.lora.rank:
            return 0.0
        if self.config.offload:
            return self._own_parameters * OPTIMIZER_BYTES / self.efficiencies.host_optimizer
        return self._own_parameters * OPTIMIZER_BYTES / (self.kind.bandwidth * self.efficiencies.bandwidth)


@dataclass(frozen=True)
class RunDurations:
    """Durations of a run: `memory` has its configuration and its models' sizes."""

    memory: RunMemory
    engines_kind: GpuKind
    ranks_kind: GpuKind
    gpus_per_node: int
    num_nodes: int
    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    link: float | None = None
    """Bytes a second from a node to another, as a run's agents have measured them."""

    @cached_property
    def engine(self) -> EngineCosts:
        """Costs of an engine of the policy, or of the largest of several."""
        rollout = self.memory.config.rollout
        shape, kind, parts = self.memory.largest, self.engines_kind, rollout.tensor_parallel_size
        kernels = kernels_of(shape, kind, parts, rollout.precision)
        return EngineCosts(shape, kind, self.efficiencies, parts, rollout.precision, kernels)

    @cached_property
    def rank(self) -> RankCosts:
        return self._rank("policy", self.memory.config.trainer)

    @cached_property
    def _policies(self) -> dict[str, RankCosts]:
        """Costs of a rank of each of several whole models."""
        trainer = self.memory.config.trainer
        return {name: self._rank(name, trainer.of_policy(name)) for name in trainer.own_models}

    def prefill_s(self, tokens: int) -> float:
        return self.engine.prefill_s(tokens)

    def decode_s(self, num_sequences: float, context: float) -> float:
        return self.engine.decode_s(num_sequences, context)

    def update_s(self, lengths: Sequence[Sequence[int]]) -> float:
        update = max((self._updates_s(own) for own in lengths if own), default=0.0)
        return self.memory.config.algorithm.epochs_per_batch * update + self._critic_s(lengths)

    def _updates_s(self, lengths: Sequence[int]) -> float:
        """Seconds of the update of the policy by a rank's share of the rows; of several whole models, each of which has
        as many rows, one after the other, or each by ranks of its own."""
        if not self._policies:
            return self.rank.update_s(lengths)
        num_ranks, every = self.memory.config.trainer.num_ranks, len(self._policies)
        seconds = []
        for first, rank in enumerate(self._policies.values()):
            count = max(1, round(len(lengths) * num_ranks / rank.config.num_ranks / every))
            seconds.append(rank.update_s([lengths[(first + every * row) % len(lengths)] for row in range(count)]))
        return max(seconds) if self.memory.config.trainer.policy_ranks else sum(seconds)

    def stage_s(self, stage: str, num_rows: int, tokens: int) -> float:
        model = next((one.model for one in self.memory.flow.stages if one.name == stage and one.model), None)
        kind = next((one.kind for one in self.memory.flow.stages if one.name == stage), "")
        if kind in ("logprobs", "scores"):
            name = str(model) if str(model) in self.memory.shapes else "policy"
            return self._rank(name, self.memory.config.trainer.of_scorer(stage)).score_s(
                [tokens // max(1, num_rows)] * num_rows
            )
        return REWARD_S * num_rows if kind == "reward" else 0.0

    @cached_property
    def way(self) -> PublicationTimes:
        """The way of a version, on each rank's and engine's own bus."""
        config = self.memory.config
        num_bytes, parts = int(self.memory.publication_bytes), config.rollout.tensor_parallel_size
        return PublicationTimes(num_bytes, config.trainer.num_ranks, parts, link=self.link)

    def sync(self) -> SyncSeconds:
        bus = self.ranks_kind.bus
        published = self.way.on_one_node_s(bus) if self.num_nodes == 1 else self.way.between_nodes_s(bus)
        waited = self.way.written_s(bus) if self.memory.config.trainer.offload else self.way.taken_s
        return SyncSeconds(published, self.way.paused_s(self.engines_kind.bus), waited)

    def turn_s(self) -> float:
        if self.memory.config.placement != "colocated":
            return 0.0
        return colocated_bytes(self.memory) / 2 / BUSES[self.ranks_kind.bus]  # a step has two

    def ipc_gain_s(self) -> float | None:
        """Seconds of a step that weights.transport=ipc would save, negative where it costs some; None where it cannot
        be."""
        config = self.memory.config
        if config.placement != "colocated" or config.rollout.tensor_parallel_size > 1 or not replaces_members(config):
            return None
        if config.trainer.lora.publishes_adapter or not config.rollout.capabilities.receives_streams:
            return None
        streamed = replace(config, weights=replace(config.weights, transport="ipc"))
        other = replace(self, memory=replace(self.memory, config=streamed))
        sync, on_device = self.sync(), MOVED * self.memory.publication_bytes / DEVICE_RATE
        return sync.published_s + sync.paused_s - on_device + 2 * (self.turn_s() - other.turn_s())

    def _rank(self, name: str, config: TrainerConfig) -> RankCosts:
        shape = self.memory.shapes.get(name, self.memory.shapes["policy"])
        return RankCosts(shape, self.ranks_kind, self.efficiencies, config, self.gpus_per_node)

    def _critic_s(self, lengths: Sequence[Sequence[int]]) -> float:
        """Seconds of the critic's values and update, by the same ranks."""
        if "critic" not in self.memory.ranks:
            return 0.0
        epochs = self.memory.config.algorithm.epochs_per_batch
        return max((epochs * self.rank.update_s(own) + self.rank.score_s(own) for own in lengths if own), default=0.0)
