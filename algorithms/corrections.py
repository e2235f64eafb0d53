"""What sampled the data is not quite what is trained: importance weights between the two.

The engine's log-probabilities (other kernels, other precision, perhaps weights a few updates old) differ from the
trainer's. A truncated importance weight corrects the expectation and bounds the variance (Ionides 2008, "Truncated
importance sampling"; for language models 2505.24298 separates the two ratios in this way). Called by `losses.py`.

Legend: B rows of the micro-batch, T response tokens, padded.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.algorithms.checks import non_negative, same_shape
from penstock.algorithms.kl import log_ratio

Mean = Callable[[Tensor], Tensor]
"""A token value `[B, T]` to this micro-batch's contribution to its mean."""


def truncated_importance_weight(trainer_logprobs: Tensor, behavior_logprobs: Tensor, cap: float) -> Tensor:
    """`min(π_trainer / π_behavior, cap)` a token: float32, detached, within [exp(-20), cap].

    `trainer_logprobs`: the trainer's own, at the start of the batch. `behavior_logprobs`: the engine's, when it
    sampled. Both of the same shape, natural logarithm. Raises `ShapeError`, `ConfigError`.
    """
    non_negative("correction_cap", cap)
    same_shape(trainer_logprobs, "old_logprobs", behavior_logprobs=behavior_logprobs)
    return log_ratio(trainer_logprobs, behavior_logprobs).detach().exp().clamp(max=cap)


def correction_metrics(weight_BT: Tensor, cap: float, mean: Mean) -> dict[str, Tensor]:
    """`correction_weight_mean`, and the share of tokens whose weight the cap cut."""
    capped_BT = torch.eq(weight_BT, cap).float()
    return {"correction_weight_mean": mean(weight_BT), "correction_capped_fraction": mean(capped_BT)}
