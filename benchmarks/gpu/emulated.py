"""Kernels for GPUs that default settings use, run on the CPU and compared with their formulas: those of vLLM's sampler
and of Liger by Triton's interpreter, FlexAttention as compiled for the CPU.

    python -m pip install --no-deps --target /tmp/triton triton==3.7.1 liger-kernel==0.8.5
    PYTHONPATH=/tmp/triton python -m benchmarks.gpu.emulated

The interpreter shows that a kernel computes its formula, not that it compiles for a GPU. A kernel that it cannot run is
named; one that differs by more than its bound ends this with code 1. Without Triton this ends with code 2.
"""

import importlib.util
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.harness import new_table, show

BOUND = 1e-4
NUM_DRAWS = 2000
SAMPLED_BOUND = 0.05
"""Bound of shares of sampled tokens against their probabilities: above four standard deviations of `NUM_DRAWS`."""


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.detach().double() - other.detach().double()).abs().max())


def token_logprobs() -> float:
    """vLLM's log-probabilities of tokens against `log_softmax`."""
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    logits, ids = torch.randn(3, 3000) * 3, torch.randint(0, 3000, (3, 5))
    return difference(compute_token_logprobs(logits, ids), logits.log_softmax(-1).gather(1, ids))


def temperature() -> float:
    """vLLM's temperatures against a division."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

    logits, temperatures = torch.randn(2, 500), torch.tensor([0.7, 1.3])
    found = logits.clone()
    apply_temperature(found, torch.arange(2, dtype=torch.int32), temperatures)
    return difference(found, logits / temperatures[:, None])


def sampling() -> float:
    """Shares of vLLM's sampled tokens against the softmax at temperature 0.7."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    logits, rows = torch.randn(1, 12), torch.zeros(NUM_DRAWS, dtype=torch.int32)
    ids = gumbel_sample(
        logits.repeat(NUM_DRAWS, 1), rows, torch.tensor([0.7]), torch.tensor([5]), torch.arange(NUM_DRAWS), True, False
    )
    shares = torch.bincount(ids, minlength=12) / NUM_DRAWS
    return difference(shares, (logits[0] / 0.7).softmax(-1)) * BOUND / SAMPLED_BOUND


def min_p() -> float:
    """Tokens that vLLM's min_p keeps against its formula."""
    from vllm.v1.worker.gpu.sample.min_p import apply_min_p

    logits = torch.randn(2, 300)
    found = logits.clone()
    apply_min_p(found, torch.zeros(2, dtype=torch.int32), torch.tensor([0.1]))
    probabilities = logits.softmax(-1)
    kept = probabilities >= 0.1 * probabilities.amax(-1, keepdim=True)
    return difference(torch.isfinite(found), kept)


def top_k_top_p() -> float:
    """Tokens that vLLM's top_k and top_p keep against sorted probabilities."""
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

    logits = torch.randn(4, 500)
    found = apply_top_k_top_p_triton(logits.clone(), torch.full((4,), 10, dtype=torch.int32), torch.ones(4))
    return difference(torch.isfinite(found).sum(-1), torch.full((4,), 10))


def liger_rotary() -> float:
    """Liger's rotary embedding against the two halves' formula."""
    from liger_kernel.ops.rope import LigerRopeFunction

    query, key, angle = torch.randn(1, 4, 7, 16), torch.randn(1, 2, 7, 16), torch.rand(1, 7, 8).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    found, _ = LigerRopeFunction.apply(query.clone(), key.clone(), cos, sin)
    first, second = query.chunk(2, -1)
    return difference(found, query * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None])


def liger_norm() -> float:
    """Liger's RMS norm against its formula."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    hidden, weight = torch.randn(5, 64), torch.randn(64)
    found = LigerRMSNormFunction.apply(hidden, weight, 1e-6, 0.0, "llama", False)
    return difference(found, weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6))


def liger_gate() -> float:
    """Liger's gated activation against its formula."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gate, up = torch.randn(6, 48), torch.randn(6, 48)
    return difference(LigerSiLUMulFunction.apply(gate, up), torch.nn.functional.silu(gate) * up)


def flex_attention() -> float:
    """FlexAttention compiled for the CPU, with a mask of trees' kind, against attention with that mask."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as attend

    query, key, value = (torch.randn(1, 2, 256, 32) for _ in range(3))
    ends = torch.tensor([256] * 64 + [160] * 96 + [256] * 96)

    def descends(batch: Any, head: Any, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        return (column <= row) & (row < ends[column])

    with torch.no_grad():
        mask = create_block_mask(descends, None, None, 256, 256, device="cpu")
        found = torch.compile(attend)(query, key, value, block_mask=mask)
        dense = descends(None, None, torch.arange(256)[:, None], torch.arange(256)[None])
        return difference(found, torch.nn.functional.scaled_dot_product_attention(query, key, value, dense))


CHECKS: tuple[Callable[[], float], ...] = (
    token_logprobs, temperature, sampling, min_p, top_k_top_p, liger_rotary, liger_norm, liger_gate, flex_attention,
)  # fmt: skip


def prepare() -> None:
    """Have Triton interpret, and vLLM's CPU build take it. Ends the process where there is none."""
    if importlib.util.find_spec("triton") is None:
        print("benchmarks.gpu.emulated: Triton is not installed here; see --help.", file=sys.stderr)
        raise SystemExit(2)
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    import vllm.triton_utils  # noqa: F401 - which asks once

    del backends["cpu"]


def main() -> None:
    prepare()
    torch.manual_seed(0)
    table, is_wrong = new_table("Kernels on the CPU", ["kernel", "compared"], ["difference"]), False
    for check in CHECKS:
        try:
            found = check()
            shown, is_wrong = f"{found:.1e}", is_wrong or not found <= BOUND
        except Exception as error:  # noqa: BLE001 - whatever keeps the interpreter from it is named
            shown = f"not run: {type(error).__name__}"
            print(f"{check.__name__}: {error}", file=sys.stderr)
        table.add_row(check.__name__, (check.__doc__ or "").rstrip("."), shown)
    show(table)
    sys.exit(is_wrong)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    else:
        main()
