"""Tensor parallelism: the linear layers of each decoder layer split over ranks that compute the same rows together
(1909.08053, by DTensor plans).

    q, k, v, gate, up: columns of the product, rows of the weight   ─▶ each rank some heads, some neurons
    o, down:           rows of the product, columns of the weight   ─▶ partial sums ─▶ all-reduce
    experts:           each rank some of them whole                ─▶ partial sums ─▶ all-reduce

Embeddings, norms, routers, the output layer and a vision tower are whole on every rank. The model itself says which
layers are split how (`base_model_tp_plan` of its configuration). FSDP2 then splits what is left along the other dims of
the mesh (`mesh.py`).

Legend: T ranks that split the layers of one model.

The experts of a mixture over ranks that compute the same tokens (tensor parallelism): each has some of them, whole.

    every rank: router ─▶ experts and weights of each token, the same everywhere
    each rank:  its own experts on all tokens ─▶ partial sums ─▶ all-reduce

So a rank's part of stacked experts is consecutive rows, as everything that engines, checkpoints and publications know.
How much a rank computes depends on the routing; what it keeps does not.

Legend: N tokens, K experts of each, H width of the hidden states.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from penstock.conf.errors import ConfigError
from penstock.workers.trainer.engines.mesh import RankMesh, local, tensor_placement
from penstock.workers.trainer.models import packed_attention


class ExpertsSplit(ParallelStyle):
    """The style of a module of stacked experts, for torch's `parallelize_module`.

    parallelize_module(lm, mesh, {"model.layers.0.mlp.experts": ExpertsSplit()})
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        """Leave this rank its experts; the others' tokens pass it by. `module`: as transformers makes it, called with
        hidden states `[N, H]`, expert ids `[N, K]` and weights `[N, K]`."""
        for name, parameter in list(module.named_parameters()):
            part = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        peers, whole = device_mesh.get_group(), module.forward
        count = module.num_experts // device_mesh.size()
        first = count * device_mesh.get_local_rank()
        # Transformers skips tokens of an expert `num_experts` where this is set.
        module.num_experts, module._is_expert_parallel = count, True

        def forward(hidden_NH: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
            hidden_NH, weights_NK = (_SumOfGradients.apply(tensor, peers) for tensor in (hidden_NH, weights_NK))
            own_NK = experts_NK - first
            is_own_NK = (own_NK >= 0) & (own_NK < count)
            with _local_parameters(module):
                partial_NH = whole(hidden_NH, own_NK.where(is_own_NK, count), weights_NK.masked_fill(~is_own_NK, 0.0))
            return _SumOfValues.apply(partial_NH, peers)

        module.forward = forward
        return module


@contextmanager
def _local_parameters(module: nn.Module) -> Iterator[None]:
    """Have a module compute with this rank's parts of its DTensors, which take the gradients there."""
    whole = dict(module._parameters)
    for name, parameter in whole.items():
        if parameter is not None:
            module._parameters[name] = local(parameter)  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters.update(whole)


class _SumOfGradients(torch.autograd.Function):
    """A value that all ranks have, and whose gradient is the sum of what each computes with it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, peers: dist.ProcessGroup) -> Tensor:
        ctx.peers = peers
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.peers)
        return gradient, None


class _SumOfValues(torch.autograd.Function):
    """The sum of what each rank has. Every rank computes the same with it, so that its gradient is that of each."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, peers: dist.ProcessGroup) -> Tensor:
        total = value.contiguous().clone()
        dist.all_reduce(total, group=peers)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


KEY = "trainer.tensor_parallel_size"
COLWISE, ROWWISE, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
EXPERTS = "moe_tp_experts"
"""Names of transformers. SUMMED: whole on every rank, and each sees only its own heads: gradients add up. EXPERTS: a
mixture's, stacked. Transformers splits each of them, which here go to the ranks as they are."""


class TensorParallel:
    """Splits a model, and knows which part of each parameter this rank has.

    tensor = TensorParallel(model.lm, mesh)    # before fully_shard(..., mesh=mesh.fsdp)
    """

    def __init__(self, lm: Any, mesh: RankMesh) -> None:
        """`lm`: without weights, adapters already in it. Raises `ConfigError` for a model that cannot be split so."""
        self.size, self.rank, self.peers = mesh.num_parts, mesh.part, mesh.parts
        styles = split_plan(lm, self.size)
        parallelize_module(lm, mesh.tensor, module_styles(lm, styles), src_data_rank=None)
        self._summed = [lm.get_submodule(name) for name, style in styles.items() if style == SUMMED]

    def split_dim(self, parameter: Tensor) -> int | None:
        """The dim along which T ranks split a parameter; None where each has all of it."""
        placement = tensor_placement(parameter)
        return placement.dim if isinstance(placement, Shard) else None

    def add_up_gradients(self) -> None:
        """Add up gradients of parameters whose every rank saw only its own heads. Called once an optimizer step, before
        its norm."""
        for parameter in (parameter for module in self._summed for parameter in module.parameters()):
            if parameter.grad is not None:
                dist.all_reduce(local(parameter.grad), group=self.peers)

    def whole_columns(self, part: Tensor) -> Tensor:
        """Join `[rows, columns / T]` of each rank to `[rows, columns]`. Collective over the T ranks."""
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.peers)
        return torch.cat(parts, dim=1)

    def columns(self, num_columns: int) -> slice:
        """Columns of this rank of a parameter that is split along them."""
        width = num_columns // self.size
        return slice(self.rank * width, (self.rank + 1) * width)

    def broadcast_first(self, tensor: Tensor) -> None:
        """Broadcast the tensor of the first of the T ranks to the others. Collective over them."""
        dist.broadcast(tensor, group=self.peers, group_src=0)


def split_plan(lm: Any, size: int) -> dict[str, str]:
    """The split of each module of the decoder layers, by its full name. Raises `ConfigError` where heads or widths do
    not divide, or the model asks for a way that is not known here."""
    text = packed_attention.text_model(lm).base_model
    config = text.config
    _check_divides(
        size, **{name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    )
    patterns = getattr(config, "base_model_tp_plan", None) or {}
    prefix = next(name for name, module in lm.named_modules() if module is text) + "."
    plan = {}
    for name, module in text.named_modules():
        style = next((style for pattern, style in patterns.items() if fnmatchcase(name, pattern)), None)
        if style is None or isinstance(module, nn.Embedding):
            continue
        if style not in (COLWISE, ROWWISE, SUMMED, EXPERTS):
            raise ConfigError(
                f"{KEY}={size}: {config.model_type} wants {name} split as {style!r}, which the trainer does not know. "
                f"Set {KEY}=1."
            )
        linear = getattr(module, "base_layer", module)
        if style == COLWISE:
            _check_divides(size, **{f"out_features of {name}": linear.out_features})
        elif style == ROWWISE:
            _check_divides(size, **{f"in_features of {name}": linear.in_features})
        elif style == EXPERTS:
            _check_stacked(name, module, size)
        plan[prefix + name] = style
    if ROWWISE not in plan.values():
        raise ConfigError(
            f"{KEY}={size}: transformers has no plan for splitting {type(lm).__name__} (its configuration has no "
            f"base_model_tp_plan). Set {KEY}=1."
        )
    return plan


def module_styles(lm: nn.Module, plan: dict[str, str]) -> dict[str, ParallelStyle]:
    """DTensor's styles. In a layer with an adapter, W is split as it would be without, and so is that one of B and A
    which has the split dim of W."""
    styles: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        if style == SUMMED:
            continue
        if style == EXPERTS:
            styles[name] = ExpertsSplit()
            continue
        make: type[ParallelStyle] = ColwiseParallel if style == COLWISE else RowwiseParallel
        if hasattr(lm.get_submodule(name), "base_layer"):
            styles[f"{name}.base_layer"] = make()
            letter = "B" if style == COLWISE else "A"
            for adapter in lm.get_submodule(f"{name}.lora_{letter}").named_children():
                styles[f"{name}.lora_{letter}.{adapter[0]}"] = make()
        else:
            styles[name] = make()
    return styles


def _check_stacked(name: str, module: nn.Module, size: int) -> None:
    """Raise `ConfigError` where the parameters of a module do not have experts for rows that `size` divides."""
    if hasattr(module, "lora_A"):
        raise ConfigError(
            f"{KEY}={size}: adapters of experts (trainer.lora.target_modules) are not split. Set {KEY}=1, or name "
            "linear layers only."
        )
    num_experts = getattr(module, "num_experts", None)
    parameters = dict(module.named_parameters())
    if num_experts is None or any("." in key or len(one) != num_experts for key, one in parameters.items()):
        raise ConfigError(
            f"{KEY}={size}: {name} is a {type(module).__name__}, whose parameters are not stacked by experts. Set "
            f"{KEY}=1."
        )
    _check_divides(size, num_experts=num_experts)


def _check_divides(size: int, **extents: int | None) -> None:
    for name, extent in extents.items():
        if extent is not None and extent % size:
            raise ConfigError(f"{KEY}={size} must divide the model's {name}={extent}. Set it to a divisor of that.")
