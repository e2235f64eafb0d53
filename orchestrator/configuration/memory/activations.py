"""Bytes of activations that one decoder layer keeps for its backward, counted operation by operation. Pure: no torch.

Attention's scores never exist as a matrix, but with `model.attention=eager`. Norms compute in float32: with bfloat16
they keep a copy of their input in it. Liger's and compiled layers keep less.

    norm       input (float32), normalised, product     head norms   the same of q and k
    attention  q, k, v, result, one sum a head          MLP          gate, its activation, up, product

Legend: b bytes of an element that is computed with; H hidden, I width of the MLP, k experts of a token.
"""

from typing import Protocol

from penstock.conf.trainer import TrainerConfig
from penstock.orchestrator.configuration.memory.model_shape import ModelShape

FLOAT32 = 4


class Computed(Protocol):
    """What activations depend on."""

    @property
    def shape(self) -> ModelShape: ...
    @property
    def config(self) -> TrainerConfig: ...
    @property
    def row_tokens(self) -> int: ...
    @property
    def attention(self) -> str: ...
    @property
    def is_trained(self) -> bool: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def local_tokens(self) -> float: ...


def layer_saved(setting: Computed) -> float:
    """Bytes that one layer keeps."""
    shape, b, parts = setting.shape, setting.element_bytes, setting.config.tensor_parallel_size
    norms = 2 * (_norm(setting) + b) * shape.hidden
    attention = b * 2 * (shape.q_width + shape.kv_width) + FLOAT32 * shape.heads
    if shape.has_head_norms:
        attention += _norm(setting) * (shape.q_width + shape.kv_width)
    if setting.attention == "eager":  # scores in float32, and as what they are multiplied with
        attention += (FLOAT32 + b) * shape.heads * setting.row_tokens
    return setting.local_tokens * (norms + (attention + _mlp(setting)) / parts) + _adapted_experts(setting)


def layer_temporaries(setting: Computed) -> float:
    """Bytes beside them in the MLP's backward: gradients of what it keeps, and of hidden states."""
    shape, b, parts = setting.shape, setting.element_bytes, setting.config.tensor_parallel_size
    of_experts = shape.hidden if shape.num_experts else 0
    of_mlp = shape.experts_per_token * (3 * shape.mlp_width + of_experts) / parts
    return setting.local_tokens * b * (of_mlp + 2 * shape.hidden) + _adapted_experts(setting)


def _adapted_experts(setting: Computed) -> float:
    """Bytes of one layer's experts with their adapters added, which are made at each call and kept for backward; and of
    the gradient of these."""
    lora = setting.config.lora
    if not (setting.is_trained and lora.rank):
        return 0.0
    return setting.element_bytes * setting.shape.adapted_experts(lora.target_modules)


def root_saved(setting: Computed) -> float:
    """Bytes that the last norm keeps, and the hidden states that the output layer reads."""
    return setting.local_tokens * setting.shape.hidden * (_norm(setting) + 2 * setting.element_bytes)


def _norm(setting: Computed) -> int:
    """Bytes a norm keeps of an element, its result aside. A norm that is not trained needs no normalised input."""
    if setting.config.liger or setting.config.compile:
        return setting.element_bytes
    is_trained = setting.is_trained and not setting.config.lora.rank
    return FLOAT32 + setting.element_bytes * is_trained


def _mlp(setting: Computed) -> float:
    """Bytes of a token in the MLP, or in all of its experts, whose inputs and results are copies."""
    shape, b = setting.shape, setting.element_bytes
    kept = 3 if setting.config.liger or setting.config.compile else 4
    of_expert = 2 * shape.hidden if shape.num_experts else 0
    return b * shape.experts_per_token * (kept * shape.mlp_width + of_expert) + 2 * FLOAT32 * shape.num_experts
