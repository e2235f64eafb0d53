"""Random adapters that matter, and what plain transformers says of a model with one."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from penstock.conf.trainer import LoraConfig
from penstock.workers.pictures.processor import auto_class
from penstock.workers.protocols import WHOLE, AdapterSpec, AdapterState
from penstock.workers.weights.publication.adapter import adapted_layers, layer_of, tensor_name


def adapter_state(model: Path, seed: int, *, rank: int = 4, alpha: int = 12, head: bool = True) -> AdapterState:
    """An adapter of all linear layers, far off the base model."""
    generator = np.random.default_rng(seed)
    shapes = adapted_layers(str(model), LoraConfig())
    if head:
        config = AutoConfig.from_pretrained(model).get_text_config()
        shapes["lm_head"] = (config.vocab_size, config.hidden_size)
    tensors = {}
    for layer, (num_out, num_in) in shapes.items():
        a = 0.3 * generator.standard_normal((rank, num_in), np.float32)
        b = 0.05 * generator.standard_normal((num_out, rank), np.float32)
        tensors |= {f"weights/{tensor_name(layer, 'A')}": a, f"weights/{tensor_name(layer, 'B')}": b}
    return AdapterState(AdapterSpec(rank, alpha=alpha, train_unembed=head), tensors)


@torch.no_grad()
def model_with(path: Path, state: AdapterState | None) -> Any:
    """The model with an adapter merged into its weights, of which a shared head is made its own first."""
    lm = auto_class(AutoConfig.from_pretrained(path)).from_pretrained(path, dtype=torch.float32).eval()
    lm.lm_head.weight = torch.nn.Parameter(lm.lm_head.weight.clone())
    weights = {} if state is None else state.weights()
    for layer in dict.fromkeys(layer_of(name) for name in weights):
        a, b = (torch.from_numpy(weights[tensor_name(layer, letter)]) for letter in "AB")
        assert state is not None
        lm.get_submodule(layer).weight += state.spec.alpha / state.spec.rank * (b @ a)
    return lm


@torch.no_grad()
def whole_state(path: Path, seed: int) -> tuple[AdapterState, Any]:
    """All weights of a model, far off the base model's, and the model that has them."""
    generator = torch.Generator().manual_seed(seed)
    lm = auto_class(AutoConfig.from_pretrained(path)).from_pretrained(path, dtype=torch.float32).eval()
    for weight in lm.parameters():
        weight.mul_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
    weights = {f"weights/{name}": weight.numpy().copy() for name, weight in lm.named_parameters()}
    return AdapterState(AdapterSpec(WHOLE), weights), lm


@torch.no_grad()
def logprobs_after(lm: Any, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the next token at each position, `[T, V]` float32."""
    return (lm(torch.tensor([token_ids])).logits[0].float() / temperature).log_softmax(-1)


def said_of(lm: Any, prompt_ids: list[int], response_ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probabilities of a response, `[T]` float32."""
    rows = logprobs_after(lm, [*prompt_ids, *response_ids], temperature)[len(prompt_ids) - 1 : -1]
    return rows.gather(-1, torch.tensor(response_ids)[:, None])[:, 0].numpy()
