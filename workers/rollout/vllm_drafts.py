"""A kernel of vLLM's rejection sampler, for its CPU build. Imports vLLM; a worker process of an engine imports it after
vLLM has registered its own.

The rejection sampler repeats the temperature, top-k and top-p of a request for its drafted tokens. The kernel for this
in the CPU build of vLLM 0.32.0 fills a copy (vLLM issue 55005), so tokens would be drawn at whatever is in memory.
"""

from typing import Any

import torch
from vllm.triton_utils.dispatcher import register_kernels

from penstock.workers.weights.vllm.backends import WorkerCalls

KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def repeat_for_tokens(
    output: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, replace_from: float, replace_to: float, *_: Any
) -> None:
    """Fill `output`, `[tokens]`, with each request's value, once for each of its tokens. `values`: `[requests]`; those
    that equal `replace_from` count as `replace_to`. `ends`: of each request's tokens, `[requests]`."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))


register_kernels({KERNEL: repeat_for_tokens})


class WorkerWithDrafts(WorkerCalls):
    """The extension of vLLM's worker, whose import registers the kernel."""
