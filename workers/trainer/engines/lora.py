"""LoRA (2106.09685) around a model: PEFT's layers in place of linear ones, and its wrappers around stacked experts, of
which only A and B are trained.

    open ─▶ add_adapters ─▶ engine shards it ─▶ updates change A, B ─┬▶ pieces: W + scale * B @ A under W's own name
                                                                      └▶ adapter_pieces: A and B

`pieces` make a publication that is a whole model, of which engines need not know that adapters made it;
`adapter_pieces`, with `trainer.lora.publish=adapter`, one of A and B alone.

Several policies (`trainer.policies`) are as many adapters of one model, of which one at a time is in use: passes go
through it, and an optimizer step changes it alone.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.conf.errors import ConfigError
from penstock.conf.trainer import ALL_LINEAR, LoraConfig
from penstock.workers.trainer.engines.mesh import gathered, local
from penstock.workers.trainer.models.starting_weights import replace_parameters, take_weights
from penstock.workers.weights.checkpoint_form import stacked_experts
from penstock.workers.weights.publication.adapter import (
    FILE_NAME,
    AdapterTargets,
    find_targets,
    last_parts,
    tensor_name,
)

ADAPTER = "default"
"""PEFT's name of an adapter that is the only one; of several each has its policy's."""
INITIAL_SEED = 0
"""Seed of A's initial values. The same in every rank, or their shards would be of different tensors."""
_LOG = logging.getLogger("penstock")


@dataclass(frozen=True)
class Adapter:
    """The adapter of one linear layer, whose weight `[out, in]` is `W + scale * B @ A`; or of the stacked experts of a
    layer, whose weight `[E, out, in]` is that for each of E experts, with an A and a B of its own."""

    name: str
    """HF name of the weight, e.g. `model.layers.0.self_attn.q_proj.weight`."""
    path: str
    """Name of the module that has A and B, under which PEFT looks for them."""
    a: Tensor
    """Weight of shape `[rank, in]`, maybe a DTensor; of experts `[E * rank, in]`, expert after expert."""
    b: Tensor
    """Weight of shape `[out, rank]`, maybe a DTensor, split along dim 0 as W is; of experts `[out, rank * E]`, the
    columns of one rank after the other."""
    scale: float
    num_experts: int = 0
    """E; 0: of a linear layer."""

    def delta(self, rows: slice) -> Tensor:
        """The sum that is added to this rank's part of W, with its shape. `rows`: of W that it has, along dim 0.
        Collective: A's rows are gathered, and B's where they are of experts."""
        if not self.num_experts:
            return (local(self.b) @ _whole_rows(self.a)) * self.scale
        a_ERI = _whole_rows(self.a).unflatten(0, (self.num_experts, -1))
        b_EOR = _whole_rows(self.b).unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
        return torch.bmm(b_EOR[rows], a_ERI[rows]) * self.scale

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """A and B with the names that PEFT and vLLM give them in a file."""
        yield tensor_name(self.path, "A"), self.a
        yield tensor_name(self.path, "B"), self.b


def add_adapters(lm: Any, config: LoraConfig, names: Sequence[str] = (ADAPTER,)) -> dict[str, Tensor]:
    """Put adapters around the linear layers and experts that `config` names, in place; everything else stops requiring
    gradients, but for a scalar head, which is small and new. `lm`: without weights. `names`: of as many adapters, which
    start alike; the first is in use. Returns the values of A and B, which have none in it either.

    B starts at zero, so that the model starts as it was. Without dropout: what is trained must be what sampled. Raises
    `ConfigError` for a target that names nothing that can have one, and for a name that modules have no room for.
    """
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    if taken := next((name for name in names if hasattr(nn.ModuleDict, name)), None):
        raise ConfigError(f"flow.train({taken!r}): torch's modules have a method of this name. Choose another one.")
    targets = find_targets(lm, config)
    _log_left_out(lm, config, targets)
    peft_config = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets.layers,
        target_parameters=targets.experts or None,
        lora_dropout=0.0,
        bias="none",
        base_model_name_or_path=lm.name_or_path,
    )
    owners = dict.fromkeys([*targets.layers, *(name.rpartition(".")[0] for name in targets.experts)])
    without = [(module, dict(module.named_parameters())) for module in map(lm.get_submodule, owners)]
    for module, weights in without:
        # PEFT makes A and B where W is: one element many times is on the CPU, and takes no memory.
        for name, weight in weights.items():
            setattr(module, name, nn.Parameter(torch.zeros((), dtype=weight.dtype).expand(weight.shape)))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        for adapter in names:
            torch.manual_seed(INITIAL_SEED)
            inject_adapter_in_model(peft_config, lm, adapter)
    use_adapter(lm, names[0])
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for module, weights in without:
        for name, weight in weights.items():
            setattr(module, name, weight.requires_grad_(False))
    values = take_weights(lm, is_adapter)
    head = getattr(lm, "score", None)
    if isinstance(head, nn.Module):
        head.requires_grad_(True)
    return values


def keep_frozen_in(lm: Any, dtype: torch.dtype) -> None:
    """Have what is not trained in this dtype, in which it is computed with: it needs no master that small steps add up
    in. `lm`: without weights. Adapters and heads stay in float32."""
    replace_parameters(
        lm,
        lambda _, parameter: not parameter.requires_grad,
        lambda _, parameter: nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=False),
    )


def check_compiles(lm: Any) -> None:
    """Raise `ConfigError` where experts have adapters: PEFT changes their module at each call, which cannot be
    compiled."""
    if any(adapter.num_experts for adapter in adapters(lm)):
        raise ConfigError(
            "trainer.compile=true: adapters that trainer.lora.target_modules asks for around experts are added to them "
            "at each call, which cannot be compiled. Set trainer.compile=false, or name linear layers only."
        )


def _log_left_out(lm: Any, config: LoraConfig, targets: AdapterTargets) -> None:
    """Say in the log which weights [all-linear] leaves out of a mixture of experts."""
    experts = stacked_experts(lm)
    if ALL_LINEAR in config.target_modules and experts and not targets.experts:
        share = sum(one.numel() for one in experts.values()) / sum(one.numel() for one in lm.parameters())
        _LOG.warning(
            "trainer.lora.target_modules=[%s]: %s get adapters; the experts, %.0f%% of the weights, are stacked and "
            "get none. Name them to train them, too: [%s,%s].",
            ALL_LINEAR, ", ".join(last_parts(targets.layers)), 100 * share, ALL_LINEAR, ",".join(last_parts(experts)),
        )  # fmt: skip


def adapter_names(lm: Any) -> list[str]:
    """Names of a model's adapters; none where `add_adapters` was not called."""
    return list(getattr(lm, "peft_config", ()))


def use_adapter(lm: Any, name: str) -> None:
    """Have passes go through this one of several adapters. PEFT's own `set_adapter` would have the others require no
    gradients, which FSDP2 asks for when it shards them."""
    for module in lm.modules():
        if hasattr(module, "_active_adapter"):
            module._active_adapter = name


def adapter_in_use(lm: Any) -> str:
    """Name of the adapter that passes go through."""
    return next((module._active_adapter for module in lm.modules() if hasattr(module, "_active_adapter")), ADAPTER)


def trained_parameters(lm: Any) -> list[nn.Parameter]:
    """What requires gradients, in the model's order; of several adapters, A and B of the one in use."""
    others = tuple(f".{name}.weight" for name in adapter_names(lm) if name != adapter_in_use(lm))
    return [one for name, one in lm.named_parameters() if one.requires_grad and not name.endswith(others)]


def adapters(lm: Any, name: str = "") -> Iterator[Adapter]:
    """The adapters of layers, in the model's order, of this name or of the one in use; none where `add_adapters` was
    not called."""
    name = name or adapter_in_use(lm)
    for path, module in lm.named_modules():
        if hasattr(module, "lora_A"):
            a, b = module.lora_A[name].weight, module.lora_B[name].weight
            weight = getattr(module, "parameter_name", "weight")  # PEFT's wrapper of a parameter says which
            num_experts = module.num_experts if weight != "weight" else 0
            yield Adapter(f"{hf_name(path)}.{weight}", path, a, b, float(module.scaling[name]), num_experts)


def is_adapter(name: str) -> bool:
    """Return whether a parameter of that name is A or B of an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def hf_name(name: str) -> str:
    """The name of a parameter or module as it was before `add_adapters`; of A or B as it is."""
    return name if is_adapter(name) else name.replace(".base_layer", "")


def save_adapter(lm: Any, directory: Path, is_writer: bool) -> None:
    """Save the adapter in use by itself, as PEFT's `PeftModel.from_pretrained` and vLLM's LoRA requests load it, in
    float32. Collective; `is_writer`: this rank writes. Nothing is written where the model has no adapters."""
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
        lm.peft_config[adapter_in_use(lm)].save_pretrained(str(directory))


def _whole_rows(tensor: Tensor) -> Tensor:
    """All rows; of columns that tensor parallelism splits, this rank's. Collective."""
    return gathered(tensor).to_local() if isinstance(tensor, DTensor) else tensor
