"""The experts of a mixture over ranks that compute the same tokens (tensor parallelism): each has some of them, whole.

    every rank: router ─▶ experts and weights of each token, the same everywhere
    each rank:  its own experts on all tokens ─▶ partial sums ─▶ all-reduce

So a rank's part of stacked experts is consecutive rows, as everything that engines, checkpoints and publications know.
How much a rank computes depends on the routing; what it keeps does not.

Legend: N tokens, K experts of each, H width of the hidden states.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from penstock.workers.trainer.engines.mesh import local


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
