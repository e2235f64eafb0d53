"""An adapter as a publication of its own: A and B under the names that PEFT and vLLM give them, instead of the model.

    base_model.model.<layer>.lora_A.weight  [rank, in]      W of the layer stands for W + alpha / rank * B @ A
    base_model.model.<layer>.lora_B.weight  [out, rank]

Several policies are as many adapters in one publication, of the same layers, whose names begin with the policy's:
`solver/base_model.model.…`.

The trainer makes adapters (`trainer/engines/lora.py`) of the layers that `find_targets` names, and engines expect them
(`rollout/engine_vllm_adapters.py`). File, manifest, checksums and slots are those of any publication
(`publication.py`). Rank and alpha are not in it: they are the run's configuration, which engines are started with, and
the shapes are held against it here, before an engine changes.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.conf.errors import ConfigError, WeightError
from penstock.conf.trainer import ALL_LINEAR, LoraConfig
from penstock.workers.weights.publication.layout import Layout, TensorPlace, compute_layout
from penstock.workers.weights.publication.publication_files import Manifest, MappedWeights

LETTERS = ("A", "B")
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_[AB]\.weight")
FILE_NAME, CONFIG_NAME = "adapter_model.safetensors", "adapter_config.json"
"""Names of the files that PEFT and vLLM look for in an adapter's directory."""


@dataclass(frozen=True)
class AdapterTargets:
    """The parts of a model that get an adapter, by full names in the model's order."""

    layers: list[str]
    """Linear layers."""
    experts: list[str]
    """Parameters: the stacked experts of a mixture, each with an adapter of its own."""


def find_targets(lm: Any, config: LoraConfig) -> AdapterTargets:
    """The linear layers below the head and the stacked experts that `config` names, by the ends of their names. Raises
    `ConfigError`."""
    from torch import nn

    from penstock.workers.models.routed_experts import router_kind
    from penstock.workers.weights.checkpoint_form import stacked_experts

    reads = getattr(lm.base_model, "language_model", lm.base_model)  # of a vision model, whose tower gets none
    body, router, named = set(reads.modules()), router_kind(lm), config.target_modules
    linear = [
        name
        for name, module in lm.named_modules()
        if isinstance(module, nn.Linear) and module in body and type(module) is not router
    ]
    experts = [name for name in stacked_experts(lm) if not _is_transposed(lm, name)]
    for target in named:
        if not (linear if target == ALL_LINEAR else any(_names(target, name) for name in (*linear, *experts))):
            known, stacked = last_parts(linear), last_parts(experts)
            also = f", and of experts {', '.join(stacked)}" if stacked else ""
            raise ConfigError(
                f"trainer.lora.target_modules={named}: no linear layer of {type(lm).__name__} is called {target!r}. "
                f"There are {', '.join(known) or 'none'}{also}; [{ALL_LINEAR}] takes all linear layers."
            )
    every = ALL_LINEAR in named
    found = AdapterTargets(
        [name for name in linear if every or any(_names(target, name) for target in named)],
        [name for name in experts if any(_names(target, name) for target in named)],
    )
    if found.experts and config.publishes_adapter:
        raise ConfigError(
            f"trainer.lora.publish=adapter: engines are sent adapters of linear layers only, and trainer.lora."
            f"target_modules={named} names experts ({found.experts[0]}). Set trainer.lora.publish=merged."
        )
    return found


def last_parts(names: Iterable[str]) -> list[str]:
    """The last parts of names, each once, in alphabetical order."""
    return sorted({name.rpartition(".")[2] for name in names})


def adapted_layers(model_path: str, config: LoraConfig, *, serves_mixtures: bool = True) -> dict[str, tuple[int, int]]:
    """Shapes `(out, in)` of each layer of a model on disk that gets an adapter, in the model's order. Loads no weights.
    `serves_mixtures`: whether the engine has kernels for experts beside adapters. Raises as `find_targets` does, and
    for a mixture where it has none."""
    from penstock.workers.weights.checkpoint_form import empty_model, stacked_experts

    lm = empty_model(model_path)
    if not serves_mixtures and stacked_experts(lm):
        raise ConfigError(
            f"trainer.lora.publish=adapter: {type(lm).__name__} has experts, and vLLM's CPU build has no kernel for "
            "them where adapters are served. Set trainer.lora.publish=merged or rollout.engine=hf."
        )
    layers = {name: lm.get_submodule(name) for name in find_targets(lm, config).layers}
    return {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}


def _is_transposed(lm: Any, name: str) -> bool:
    """Return whether experts are stacked as `[E, in, out]`, as transformers says it of their module."""
    return bool(getattr(lm.get_submodule(name.rpartition(".")[0]), "is_transposed", False))


def _names(target: str, layer: str) -> bool:
    return layer == target or layer.endswith(f".{target}")


def tensor_name(layer: str, letter: str) -> str:
    """Name in the file of A or B of a linear layer, e.g. `model.layers.0.self_attn.q_proj`."""
    return f"base_model.model.{layer}.lora_{letter}.weight"


def layer_shapes(manifest: Manifest, config: LoraConfig, policies: Sequence[str] = ()) -> dict[str, tuple[int, int]]:
    """Shapes `(out, in)` of every layer that the adapter changes, or that of each of several `policies`, in the file's
    order.

    Raises `WeightError` for a publication that is not an adapter, lacks an A or B, or has another rank than `config`;
    and for other policies, and policies with different layers.
    """
    if not policies:
        return _layer_shapes(manifest, manifest.layout.by_name, config)
    parts: dict[str, dict[str, TensorPlace]] = {policy: {} for policy in policies}
    for name, place in manifest.layout.by_name.items():
        policy, _, own = name.partition("/")
        if policy not in parts:
            raise WeightError(
                f"{manifest.file}: has {name!r}, which is of none of the policies {' and '.join(policies)}, for which "
                "the engine was started. Trainer and engines must have the same dataflow."
            )
        parts[policy][own] = place
    first, *rest = (_layer_shapes(manifest, places, config) for places in parts.values())
    if any(other != first for other in rest):
        raise WeightError(f"{manifest.file}: its policies have adapters of different layers. Publish again.")
    return first


def _layer_shapes(
    manifest: Manifest, places: Mapping[str, TensorPlace], config: LoraConfig
) -> dict[str, tuple[int, int]]:
    try:
        layers = dict.fromkeys(map(layer_of, places))
    except ValueError as error:
        raise WeightError(
            f"{manifest.file}: has {error}, which is no part of an adapter, and the engine was started to serve "
            "adapters. Trainer and engines must have the same trainer.lora.publish."
        ) from None
    shapes = {}
    for layer in layers:
        a, b = (places.get(tensor_name(layer, letter)) for letter in LETTERS)
        if a is None or b is None:
            raise WeightError(f"{manifest.file}: has only one of A and B of {layer!r}. Publish again.")
        if (len(a.shape), len(b.shape)) != (2, 2) or a.shape[0] != config.rank or b.shape[1] != config.rank:
            raise WeightError(
                f"{manifest.file}: A {list(a.shape)} and B {list(b.shape)} of {layer!r} are not of rank {config.rank}, "
                "for which the engine was started. Trainer and engines must have the same trainer.lora.rank."
            )
        shapes[layer] = (b.shape[0], a.shape[1])
    return shapes


def adapter_layout(shapes: Mapping[str, tuple[int, int]], config: LoraConfig, dtype: str) -> Layout:
    """Layout of an adapter of layers of these `(out, in)`."""
    tensors = []
    for layer, (num_out, num_in) in shapes.items():
        tensors += [
            (tensor_name(layer, "A"), (config.rank, num_in), dtype),
            (tensor_name(layer, "B"), (num_out, config.rank), dtype),
        ]
    return compute_layout(tensors)


def published_factors(mapped: MappedWeights, policy: str = "") -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A `[rank, in]` and B `[out, rank]` of each layer, float32; of several policies, of this one. Of a publication
    that `layer_shapes` takes."""
    names = adapter_tensors(mapped, policy)
    return {
        layer: tuple(mapped.tensor(names[tensor_name(layer, letter)]).float().numpy() for letter in LETTERS)  # type: ignore[misc]
        for layer in dict.fromkeys(map(layer_of, names))
    }


def adapter_tensors(mapped: MappedWeights, policy: str = "") -> dict[str, str]:
    """Names in a publication of an adapter's tensors, by PEFT's names; of several policies, of this one."""
    prefix = f"{policy}/" if policy else ""
    names = mapped.manifest.layout.by_name
    return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}


def peft_config(config: LoraConfig) -> dict[str, Any]:
    """Contents of PEFT's `adapter_config.json` for such an adapter."""
    targets = config.target_modules
    return {
        "peft_type": "LORA",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        "bias": "none",
    }


def layer_of(name: str) -> str:
    """The layer of A or B, by its name in the file. Raises `ValueError` for another name."""
    if (found := _NAME.fullmatch(name)) is None:
        raise ValueError(repr(name))
    return found[1]
