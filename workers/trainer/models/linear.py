"""Linear layers of a model that is trained on a CPU, multiplied by oneDNN where MKL does not know the CPU's best
instructions.

torch multiplies float32 matrices by MKL, which takes its kernels for AVX2 on every CPU that is not Intel's. oneDNN,
which torch has as well and vLLM's engines compute with, goes by what the CPU can do: on an AMD EPYC with AVX-512 one
core makes 205 instead of 92 GFLOP/s forward, and 180 on average with both gradients.

Legend: M rows of all but the last axis, K features in, N features out.
"""

from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.workers.runtime.processes import cpu_entry


def use_fast_linears(lm: nn.Module) -> None:
    """Put `OneDnnLinear` into the places of a model's own linear layers, where it is faster. Parameters stay as they
    are. Call it before `add_adapters`."""
    if not mkl_is_slow():
        return
    for module in list(lm.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, OneDnnLinear.of(child))


class AdoptedLinear(nn.Linear):
    """A linear layer that takes the place of the one it is made of, and has its parameters."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)


class OneDnnLinear(AdoptedLinear):
    """A linear layer by oneDNN. Operands that are not plain float32 matrices on a CPU are multiplied by torch as
    before."""

    def forward(self, input: Tensor) -> Tensor:
        if is_plain(input) and is_plain(self.weight) and input.numel():
            return multiplied(input, self.weight, self.bias)
        return super().forward(input)


@torch.library.custom_op("penstock::onednn_linear", mutates_args=())
def multiplied(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Multiply: left right^T + bias by oneDNN, float32, in one piece for torch.compile. Axes before the last of
    `left_MK` stay."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left_MK, right_NK, bias_N, "none", [], "")
    return product


@multiplied.register_fake
def _(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    return left_MK.new_empty((*left_MK.shape[:-1], right_NK.shape[0]))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _gradients(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients: with g the gradient of the product, that of the left is g right, that of the right is g^T left."""
    left_MK, right_NK = ctx.saved_tensors
    of_left, of_right, of_bias = ctx.needs_input_grad
    flat_MN, flat_MK = grad_MN.flatten(0, -2), left_MK.flatten(0, -2)
    return (
        multiplied(grad_MN, right_NK.t(), None) if of_left else None,
        _transposed_product(flat_MN, flat_MK) if of_right else None,
        flat_MN.sum(0) if of_bias else None,
    )


def _transposed_product(one_MN: Tensor, other_MK: Tensor) -> Tensor:
    """Multiply: one^T other. A left operand that is transposed is copied by a single thread, so the narrower one is
    the left: up to a third of the time is saved."""
    if one_MN.shape[1] <= other_MK.shape[1]:
        return multiplied(one_MN.t(), other_MK.t(), None)
    return multiplied(other_MK.t(), one_MN.t(), None).t()


multiplied.register_autograd(_gradients, setup_context=_keep)


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is a dense float32 one on the CPU, not spread over ranks or kept in another way."""
    is_dense = type(tensor) in (Tensor, nn.Parameter)
    return is_dense and tensor.device.type == "cpu" and tensor.dtype == torch.float32


@cache
def mkl_is_slow() -> bool:
    """Return whether torch multiplies by MKL, on a CPU with AVX-512 that is not Intel's."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return has_both and has_avx512 and cpu_entry("vendor_id") not in ("", "GenuineIntel")
