"""LoRA (2106.09685) around a model: PEFT's layers in place of linear ones, of which only A and B are trained.

    open ─▶ add_adapters ─▶ engine shards it ─▶ updates change A, B ─┬▶ pieces: W + scale * B @ A under W's own name
                                                                      └▶ adapter_pieces: A and B

`pieces` make a publication that is a whole model, of which engines need not know that adapters made it;
`adapter_pieces`, with `trainer.lora.publish=adapter`, one of A and B alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.conf.trainer import LoraConfig
from penstock.workers.trainer.engines.mesh import gathered, local
from penstock.workers.trainer.models.starting_weights import take_weights
from penstock.workers.weights.publication.adapter import FILE_NAME, target_layers, tensor_name

ADAPTER = "default"
"""PEFT's name of the one adapter."""
INITIAL_SEED = 0
"""Seed of A's initial values. The same in every rank, or their shards would be of different tensors."""


@dataclass(frozen=True)
class Adapter:
    """The adapter of one linear layer, whose weight `[out, in]` is `W + scale * B @ A`."""

    name: str
    """HF name of the layer, e.g. `model.layers.0.self_attn.q_proj`."""
    a: Tensor
    """Weight of shape `[rank, in]`, maybe a DTensor."""
    b: Tensor
    """Weight of shape `[out, rank]`, maybe a DTensor, split along dim 0 as W is."""
    scale: float

    def delta(self) -> Tensor:
        """The sum that is added to this rank's part of W, with its shape. Collective: A's rows are gathered, B's are
        not."""
        return (local(self.b) @ _whole_rows(self.a)) * self.scale

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """A and B with the names that PEFT and vLLM give them in a file."""
        yield tensor_name(self.name, "A"), self.a
        yield tensor_name(self.name, "B"), self.b


def add_adapters(lm: Any, config: LoraConfig) -> dict[str, Tensor]:
    """Put adapters around the linear layers that `config` names, in place; everything else stops requiring gradients,
    but for a scalar head, which is small and new. `lm`: without weights. Returns the values of A and B, which have none
    in it either.

    B starts at zero, so that the model starts as it was. Without dropout: what is trained must be what sampled. Raises
    `ConfigError` for a target that names no linear layer.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    targets = target_layers(lm, config.target_modules)
    peft_config = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        base_model_name_or_path=lm.name_or_path,
    )
    layers = [lm.get_submodule(name) for name in targets]
    without = [layer.weight for layer in layers]
    for layer in layers:  # PEFT makes A and B where W is: one element many times is on the CPU, and takes no memory
        layer.weight = nn.Parameter(torch.zeros((), dtype=layer.weight.dtype).expand(layer.weight.shape))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(INITIAL_SEED)
        inject_adapter_in_model(peft_config, lm, ADAPTER)
    for layer, weight in zip(layers, without, strict=True):
        layer.weight = weight.requires_grad_(False)
    values = take_weights(lm, is_adapter)
    head = getattr(lm, "score", None)
    if isinstance(head, nn.Module):
        head.requires_grad_(True)
    return values


def adapters(lm: Any) -> Iterator[Adapter]:
    """Adapters in the model's order; none where `add_adapters` was not called."""
    for name, module in lm.named_modules():
        if hasattr(module, "lora_A"):
            a, b = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
            yield Adapter(name, a, b, float(module.scaling[ADAPTER]))


def is_adapter(name: str) -> bool:
    """Return whether a parameter of that name is A or B of an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def hf_name(name: str) -> str:
    """A parameter's name as it was before `add_adapters`."""
    return name.replace(".base_layer.", ".")


def save_adapter(lm: Any, directory: Path, is_writer: bool) -> None:
    """Save the adapter by itself, as PEFT's `PeftModel.from_pretrained` and vLLM's LoRA requests load it, in float32.
    Collective; `is_writer`: this rank writes. Nothing is written where the model has no adapters."""
    from safetensors.torch import save_file

    tensors = {}
    for adapter in adapters(lm):
        for name, weight in adapter.tensors():
            whole = gathered(weight).full_tensor() if isinstance(weight, DTensor) else weight
            if is_writer:
                tensors[name] = whole.detach().cpu().contiguous()
    if tensors:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / FILE_NAME, metadata={"format": "pt"})
        lm.peft_config[ADAPTER].save_pretrained(str(directory))


def _whole_rows(tensor: Tensor) -> Tensor:
    """All rows; of columns that tensor parallelism splits, this rank's. Collective."""
    return gathered(tensor).to_local() if isinstance(tensor, DTensor) else tensor
