"""The sampling distribution as pure functions of logits: temperature, min-p, top-k, top-p, in vLLM's order.

Shapes: B sequences, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch

from penstock.workers.protocols import Sampling


def sampling_logprobs(logits_BV: torch.Tensor, sampling: Sampling, banned: Sequence[int] = ()) -> torch.Tensor:
    """The log-probabilities, `[B, V]` float32, of the distribution that is sampled from; -inf where truncated away.
    `banned`: tokens that are never sampled, whose probability goes to the others before anything else is done.

    At `temperature=0` (greedy) these are the model's own, as if the temperature were 1: the distribution itself would
    be a point.
    """
    logits_BV = logits_BV.float()
    if banned:
        logits_BV = logits_BV.index_fill(-1, torch.tensor(banned, device=logits_BV.device), -torch.inf)
    if sampling.temperature == 0:
        return logits_BV.log_softmax(-1)
    logits_BV = logits_BV / sampling.temperature
    if sampling.min_p > 0:
        logits_BV = _keep(logits_BV, logits_BV >= logits_BV.amax(-1, keepdim=True) + math.log(sampling.min_p))
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        logits_BV = _keep(logits_BV, logits_BV >= logits_BV.topk(sampling.top_k, -1).values[:, -1:])
    if sampling.top_p < 1:
        logits_BV = _nucleus(logits_BV, sampling.top_p)
    return logits_BV.log_softmax(-1)


def choose_tokens(logprobs_BV: torch.Tensor, uniforms_B: torch.Tensor | None) -> torch.Tensor:
    """Choose token ids, `[B]` int64: by inverse distribution function from float64 uniforms in [0, 1), or the likeliest
    for None."""
    if uniforms_B is None:
        return logprobs_BV.argmax(-1)
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    total_B1 = cumulative_BV[:, -1:]
    below_total_B1 = torch.nextafter(total_B1, torch.zeros_like(total_B1))
    targets_B1 = torch.minimum(uniforms_B[:, None] * total_B1, below_total_B1)
    last = logprobs_BV.shape[-1] - 1  # beyond it is only what has no numbers, which is told where it is written
    return torch.searchsorted(cumulative_BV, targets_B1, right=True)[:, 0].clamp(max=last)


def draw_uniforms(num_samples: int, num_draws: int, seed: int | None) -> torch.Tensor:
    """Draw `[num_samples, num_draws]` float64 in [0, 1). Row i comes from a generator of its own, seeded `seed + i`
    (None: entropy)."""
    rows = []
    for index in range(num_samples):
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed + index)
        rows.append(torch.rand(num_draws, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def _keep(logits_BV: torch.Tensor, mask_BV: torch.Tensor) -> torch.Tensor:
    return logits_BV.masked_fill(~mask_BV, -torch.inf)


def _nucleus(logits_BV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of likeliest tokens whose probabilities sum to at least top_p; always one."""
    ascending_BV, order_BV = logits_BV.sort(-1)
    dropped_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - top_p
    dropped_BV[:, -1] = False
    return logits_BV.masked_fill(torch.zeros_like(dropped_BV).scatter(-1, order_BV, dropped_BV), -torch.inf)
