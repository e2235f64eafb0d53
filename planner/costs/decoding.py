"""Seconds of an engine's steps: kernels from measured tables (`measured.py`) where there are any, else by a roofline.

    decode   weights that the batch touches, keys and values of all contexts, read once      or the products, if longer
             + two all-reduces a layer between the engine's GPUs + the scheduler
    prefill  products of all tokens

A token of a mixture goes through k of its E experts, so that a batch of n touches E (1 - (1 - k/E)^n) of them.

Without the scheduler's time the roofline is within 13% of 23 of 24 kernel times of vLLM on H100, and 21% low for one
batch of 1 (aiconfigurator-core 0.12.0: Llama-3.1-8B and 70B, Qwen3-32B, Qwen3-30B-A3B; docs/planning.md).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version

from penstock.orchestrator.configuration.model_shape import ModelShape
from penstock.planner.costs.efficiencies import Efficiencies
from penstock.planner.costs.measured import PACKAGE, Kernels
from penstock.planner.hardware import GpuKind


@dataclass(frozen=True)
class Engine:
    """One engine on GPUs of one kind."""

    shape: ModelShape
    kind: GpuKind
    efficiencies: Efficiencies
    tensor_parallel_size: int = 1
    element_bytes: int = 2
    cache_bytes: int = 2
    """Bytes of an element of keys and values."""
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
        read = self.element_bytes * self._touched(num_sequences) / parts
        bandwidth = self.kind.bandwidth * rates.bandwidth
        products = 2 * num_sequences * active_parameters(self.shape) / parts / (self.kind.flops * rates.prefill)
        cached = num_sequences * context * self._cache_bytes_of_token()
        return max(read / bandwidth, products) + cached / bandwidth + self._reduced_s(num_sequences) + rates.decode_s

    def prefill_s(self, tokens: int) -> float:
        """Seconds in which prompts of so many tokens in all are read."""
        if not tokens:
            return 0.0
        if self.kernels.measured is not None:
            return self.kernels.measured.prefill_s(tokens)
        products = 2 * tokens * active_parameters(self.shape) / self.tensor_parallel_size
        return products / (self.kind.flops * self.efficiencies.prefill) + self._reduced_s(tokens)

    def _touched(self, num_tokens: float) -> float:
        """Parameters that a batch reads. Of the embedding it reads a row a token, which is nothing."""
        shape = self.shape
        layer: float = shape.attention_parameters + shape.norm_parameters
        if shape.num_experts:
            missed = (1 - shape.experts_per_token / shape.num_experts) ** num_tokens
            layer += shape.mlp_parameters * (1 - missed)
        else:
            layer += shape.mlp_parameters
        return shape.num_layers * layer + shape.head_parameters

    def _cache_bytes_of_token(self) -> float:
        heads = self.shape.kv_width // self.shape.head_dim
        return self.cache_bytes * self.shape.cache_elements / min(self.tensor_parallel_size, heads)

    def _reduced_s(self, num_tokens: float) -> float:
        """Seconds of two all-reduces a layer."""
        parts = self.tensor_parallel_size
        if parts == 1:
            return 0.0
        sent = 2 * (parts - 1) / parts * num_tokens * self.shape.hidden * self.element_bytes
        one = self.efficiencies.collective_s + sent / (self.kind.link * self.efficiencies.link)
        return 2 * self.shape.num_layers * one


def told_kernels(engines: Iterable[Engine]) -> str:
    """Where the kernel times of these engines come from, in one line."""
    kinds: dict[str, set[str]] = {}
    for engine in engines:
        why = f"a roofline ({engine.kernels.why})"
        source = why if engine.kernels.measured is None else f"the measured tables of {PACKAGE} {version(PACKAGE)}"
        kinds.setdefault(source, set()).add(engine.kind.name)
    told = [f"{', '.join(sorted(names))} from {source}" for source, names in kinds.items()]
    return f"Kernel times of engines: {'; '.join(told)}."


def active_parameters(shape: ModelShape) -> float:
    """Parameters of the products that one token takes part in: of a mixture, those of its experts and the router."""
    mlp: float = shape.mlp_parameters
    if shape.num_experts:
        mlp = shape.mlp_parameters * shape.experts_per_token / shape.num_experts
    return shape.num_layers * (shape.attention_parameters + mlp) + shape.head_parameters
