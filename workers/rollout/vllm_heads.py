"""vLLM's models with an adapter of the output layer. Imports vLLM; a worker process of an engine imports it before it
makes its model, and so has them in vLLM's registry, under the names of the models that they extend.

vLLM's own `LogitsProcessorWithLoRA` takes row i of the logits for that of request i. That holds where tokens are
sampled. For the log-probabilities of a prompt there is a row for each of its tokens, and vLLM would fail on a CPU, and
take the adapters of other requests on a GPU. Here each row has the adapter of its own token:

    forward ─▶ hidden states of all tokens ─▶ rows of a prompt: a view of them, whose offset identifies their tokens
                                          └─▶ last tokens: a copy, a row for each request

Qwen2 and Mistral do not say that their heads may have adapters (`embedding_modules`); here they do. The embedding has
none, also where it shares its weights with the head.
"""

from typing import Any, ClassVar

import torch
from vllm import ModelRegistry
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from penstock.workers.weights.vllm.backends import WorkerCalls


class AdaptedHead:
    """Mixin of a causal model. Legend: N rows, V vocabulary, R largest rank."""

    embedding_modules: ClassVar[dict[str, str]] = {"lm_head": "output_embeddings"}
    lm_head: Any
    logits_processor: Any
    _read: torch.Tensor | None = None
    """Hidden states of the last forward pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._read = output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return output

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits `[N, V]` of hidden states of last tokens, or of the tokens of prompts."""
        adapted = self.logits_processor
        if not isinstance(adapted, LogitsProcessorWithLoRA):
            return super().compute_logits(hidden_states)  # type: ignore[misc]
        slots = self._slots_of_view(hidden_states, adapted.punica_wrapper)
        if slots is None:
            if hidden_states.is_cuda:  # for a row a request its kernels are right, and need not wait for the device
                return super().compute_logits(hidden_states)  # type: ignore[misc]
            slots = adapted.punica_wrapper.sampler_indices
        if len(slots) != len(hidden_states):
            raise RuntimeError(f"{len(hidden_states)} rows of logits are of {len(slots)} requests: whose are they?")
        logits = adapted.base_layer._get_logits(hidden_states, self.lm_head, None)
        if logits is None:  # this process is not the one that samples
            return None
        for slot in slots.unique().tolist():
            if slot >= 0:
                rows = (slots == slot).nonzero()[:, 0]
                a_RH, b_VR = adapted.lora_a_stacked[slot, 0], adapted.lora_b_stacked[slot, 0]
                delta = (hidden_states[rows].to(a_RH.dtype) @ a_RH.T) @ b_VR.T
                logits.index_add_(0, rows, delta.to(logits.dtype))
        return logits if adapted.scale == 1.0 else logits * adapted.scale

    def _slots_of_view(self, hidden_states: torch.Tensor, mapping: Any) -> torch.Tensor | None:
        """The slots of the rows' adapters, `[N]`, -1 for none, where the rows are consecutive tokens of the last
        forward pass; None where they are not."""
        read = self._read
        if read is None or read.untyped_storage().data_ptr() != hidden_states.untyped_storage().data_ptr():
            return None
        first = (hidden_states.storage_offset() - read.storage_offset()) // read.shape[-1]
        slots: torch.Tensor = mapping.token_lora_indices[first : first + len(hidden_states)]
        return slots


class Qwen2WithHead(AdaptedHead, Qwen2ForCausalLM):
    pass


class Qwen3WithHead(AdaptedHead, Qwen3ForCausalLM):
    pass


class LlamaWithHead(AdaptedHead, LlamaForCausalLM):
    pass


class MistralWithHead(AdaptedHead, MistralForCausalLM):
    pass


for _kind in (Qwen2WithHead, Qwen3WithHead, LlamaWithHead, MistralWithHead):
    ModelRegistry.register_model(_kind.__mro__[2].__name__, _kind)


class WorkerWithHeads(WorkerCalls):
    """The extension of vLLM's worker, whose import registers the models."""
