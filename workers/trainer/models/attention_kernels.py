"""Kernels for attention that only GPUs have, each tried at the start of a rank, forward and backward, before it counts.

    varlen    torch's own flash-attention over packed rows, without the package flash-attn: `packed`
    trees     FlexAttention, compiled (`packed_attention.py`)

One that fails, or computes something else than sdpa, is logged and not used. Unseen on a GPU.

Legend: T tokens, D width of a head.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.workers.trainer.update.token_layout import Blocks, mask_of

TOLERANCE = 0.03
"""Largest difference between two kernels, as a share of the largest number: bfloat16 has 0.004."""
DTYPES = (torch.bfloat16, torch.float16)
LARGEST_HEAD, MULTIPLE_OF = 256, 8
"""What flash-attention takes of D."""
LEAST_CAPABILITY = (8, 0)
"""The oldest GPUs that it runs on: Ampere."""
LENGTHS = (70, 1, 129)
"""Rows of the trial."""
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
_LOG = logging.getLogger("penstock")
WORKING: dict[tuple[str, torch.dtype, int], bool] = {}
"""What the trial of `packed` showed, by kind of device, dtype and D."""


def packed(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, window: int | None, scaling: float | None
) -> Tensor:
    """Causal attention within each row: `[1, T, heads, D]`. query, key, value: `[1, heads, T, D]`, the last two maybe
    of fewer heads. `bounds`: of the rows, int32, from 0 to T; `longest`: tokens of the longest. `window`: attend to so
    many tokens at most, the token itself among them; None: to all."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (one.squeeze(0).transpose(0, 1) for one in (query, key, value))
    window_size = (-1 if window is None else window - 1, 0)
    output: Any = varlen_attn(
        q, k, v, bounds, bounds, longest, longest,
        scale=scaling, window_size=window_size, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    result: Tensor = output.unsqueeze(0)
    return result


def takes(query: Tensor, value: Tensor) -> bool:
    """Return whether `packed` computes these: it was tried for their like, and worked."""
    width = query.shape[-1]
    return value.shape[-1] == width and WORKING.get((query.device.type, query.dtype, width), False)


def try_packed(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Try `packed` where it may work, once a process; return whether it does. `width`: D."""
    key = device.type, dtype, width
    if device.type != "cuda" or dtype not in DTYPES or width > LARGEST_HEAD or width % MULTIPLE_OF:
        return False
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return False
    if key not in WORKING:
        reason = reason_against_packed(device, dtype, width)
        WORKING[key] = reason is None
        if reason is not None:
            _LOG.warning("torch.nn.attention.varlen is not used, and trainer.packing=auto is never: %s", reason)
    return WORKING[key]


def reason_against_packed(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Why `packed` is not used for such tensors; None: it computes what sdpa does of each row, with and without a
    window."""
    bounds = Blocks.of(list(LENGTHS)).bounds.to(device)
    shapes = [(1, heads, sum(LENGTHS), width) for heads in (4, 2, 2)]
    for window in (None, 16):
        kernel = partial(packed, bounds=bounds, longest=max(LENGTHS), window=window, scaling=0.1)
        if reason := difference(kernel, partial(_by_rows, window=window), shapes, device, dtype):
            return reason
    return None


def _by_rows(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    outputs = []
    for q, k, v in zip(*(one.split(LENGTHS, dim=2) for one in (query, key, value)), strict=True):
        mask = mask_of(q.shape[2], window, query.device)
        outputs.append(
            scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=0.1, enable_gqa=True)
        )
    return torch.cat(outputs, dim=2).transpose(1, 2)


@torch.enable_grad()
def difference(
    kernel: Attention, expected: Attention, shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype
) -> str | None:
    """What is wrong with a kernel's results and gradients for random tensors of these shapes; None: nothing."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    found = []
    try:
        for attend in (kernel, expected):
            inputs = [value.clone().requires_grad_() for value in values]
            output = attend(*inputs)
            output.float().square().sum().backward()
            found.append([output.detach(), *(one.grad for one in inputs)])
        shares = [
            float((one - other).abs().max() / other.abs().max())
            for one, other in zip(*([one.float() for one in some if one is not None] for some in found), strict=True)
        ]
    except Exception as error:  # noqa: BLE001 - compilers raise what they like
        return f"{type(error).__name__}: {str(error).strip()[:300]}"
    worst = max(shares)
    return None if worst <= TOLERANCE else f"it computes what is {worst:.2g} of the largest value away from sdpa"
