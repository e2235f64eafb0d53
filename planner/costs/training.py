"""Seconds of an update by one rank.

products      forward 2 P a token, backward twice that, forward again where layers are recomputed, and attention, which
              grows with the square of a row. LoRA saves the weights' gradients, and loses as much to small products
adapters      read and write what goes into and out of each linear layer
collectives   weights gathered for each micro-batch and gradients reduced (FSDP2), hidden states (tensor parallel),
              q, k, v and results (Ulysses)
offload       copies a rank's shard to the GPU for each pass over a micro-batch, and its gradients back
optimizer     reads and writes master weights, gradients and moments once
launches      a layer of a micro-batch takes some time however small it is, more of it a mixture of experts
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.conf.trainer import KEEP_WHOLE_BYTES, TrainerConfig
from penstock.orchestrator.configuration.model_shape import ModelShape
from penstock.planner.costs.decoding import active_parameters
from penstock.planner.costs.efficiencies import Efficiencies
from penstock.planner.hardware import GpuKind
from penstock.workers.weights.publication.costs import BUSES

MASTER_BYTES = 4
OPTIMIZER_BYTES = 28
"""Bytes that an optimizer step reads and writes of each parameter: weight, gradient and two moments read, three of them
written."""

ADAPTER_PASSES = 4
"""Times that adapters read or write a linear layer's input and output: forward, and backward."""


@dataclass(frozen=True)
class Rank:
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
        moved = num_batches * (self._gathered_s() + self._offloaded_s(copies)) + self._split_s(sum(lengths))
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
        total, budget = sum(lengths), max(self.config.microbatch_tokens, max(lengths, default=1))
        return max(self.config.num_minibatches, -(-total // budget))

    def _computed_s(self, lengths: Sequence[int]) -> float:
        """Seconds of an update's products: forward, backward as two, and forward again where layers are recomputed."""
        return self._products_s(lengths, 4 if self.config.recomputes_layers else 3)

    def _products_s(self, lengths: Sequence[int], passes: int) -> float:
        """Seconds of so many passes over rows. Experts' products attain less than others."""
        shape, rates = self.shape, self.efficiencies
        experts = 0.0
        if shape.num_experts:
            experts = shape.num_layers * shape.mlp_parameters * shape.experts_per_token / shape.num_experts
        others, tokens = active_parameters(shape) - experts, sum(lengths)
        scores = 2 * shape.num_layers * shape.q_width * sum(length**2 for length in lengths)  # causal: half of both
        dense = (2 * others * tokens + scores) / rates.training
        return passes * (dense + 2 * experts * tokens / rates.training_mixture) / self._parts / self.kind.flops

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
        """Seconds in which so many copies of the rank's shard, in float32, go over the bus to the host."""
        if not self.config.offload:
            return 0.0
        return copies * self._own_parameters * MASTER_BYTES / BUSES[self.kind.bus]

    @property
    def _own_parameters(self) -> float:
        """Parameters of a rank's shard."""
        return self.shape.num_parameters / self.config.tensor_parallel_size / self._shards

    def _split_s(self, tokens: int) -> float:
        """Seconds of the collectives of ranks that split rows: all-reduces of hidden states for tensor parallelism,
        all-to-alls of q, k, v and results for sequence parallelism; forward, backward, and once more where layers are
        recomputed."""
        shape, passes = self.shape, 3 if self.config.recomputes_layers else 2
        tensor, sequence = self.config.tensor_parallel_size, self.config.sequence_parallel_size
        sent = 0.0
        if tensor > 1:
            sent += 2 * 2 * (tensor - 1) / tensor * shape.hidden / sequence
        if sequence > 1:
            sent += (sequence - 1) / sequence * (2 * shape.q_width + 2 * shape.kv_width) / sequence / tensor
        num_bytes = tokens * shape.num_layers * passes * sent * self._element_bytes
        within = tensor * sequence <= self.gpus_per_node
        return num_bytes / ((self.kind.link if within else self.kind.network) * self.efficiencies.link)

    def _optimizer_s(self) -> float:
        if self.config.lora.rank:
            return 0.0
        if self.config.offload:
            return self._own_parameters * OPTIMIZER_BYTES / self.efficiencies.host_optimizer
        return self._own_parameters * OPTIMIZER_BYTES / (self.kind.bandwidth * self.efficiencies.bandwidth)
