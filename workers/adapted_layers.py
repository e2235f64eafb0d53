"""The layers of a model that get an adapter, by its configuration: the same answer for the trainer, which makes
adapters (`trainer/engines/lora.py`), and for engines, which expect them (`rollout/engine_vllm_adapter.py`)."""

from typing import Any

import torch
from torch import nn

from penstock.conf.errors import ConfigError
from penstock.conf.trainer import ALL_LINEAR, LoraConfig


def target_layers(lm: Any, targets: list[str]) -> list[str]:
    """Full names of the linear layers below the head that `targets` name, by the ends of their names. Raises
    `ConfigError`."""
    body = set(lm.base_model.modules())
    linear = [name for name, module in lm.named_modules() if isinstance(module, nn.Linear) and module in body]
    if targets == [ALL_LINEAR] and linear:
        return linear
    for target in targets:
        if not any(_names(target, name) for name in linear):
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"trainer.lora.target_modules={targets}: no linear layer of {type(lm).__name__} is called {target!r}. "
                f"There are {', '.join(known) or 'none'}; [{ALL_LINEAR}] takes them all."
            )
    return [name for name in linear if any(_names(target, name) for target in targets)]


def adapted_layers(model_path: str, config: LoraConfig) -> dict[str, tuple[int, int]]:
    """Shapes `(out, in)` of each layer of a model on disk that gets an adapter, in the model's order. Loads no weights.
    Raises as `target_layers` does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path))
    layers = {name: lm.get_submodule(name) for name in target_layers(lm, config.target_modules)}
    return {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}


def _names(target: str, layer: str) -> bool:
    return layer == target or layer.endswith(f".{target}")
