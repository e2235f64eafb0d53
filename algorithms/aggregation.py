"""Aggregation of token values to one number a batch, exactly the same however the batch is cut.

A loss is computed on one micro-batch of one rank at a time, but its mean is over the whole batch of the optimizer step.
The normaliser is therefore an argument, `BatchTotals`, which the trainer sums over all ranks and micro-batches before
the first backward; each call returns a *contribution*, and contributions add up to the mean. No call knows or needs to
know how many others there are. A user's own losses call it as `losses/policy.py` and its like do.

Legend: B rows of the micro-batch, T response tokens, padded.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.algorithms.checks import as_mask, checked_mask, describe, non_negative, positive
from penstock.conf.algorithms import AGGREGATIONS
from penstock.conf.checks import one_of
from penstock.conf.errors import ShapeError


@dataclass(frozen=True)
class BatchTotals:
    """Totals of one optimizer step, over all ranks and micro-batches.

    >>> BatchTotals(10, 2) + BatchTotals(4, 1)
    BatchTotals(num_tokens=14, num_sequences=3, num_groups=0)
    """

    num_tokens: float
    """Response tokens: ones in the mask."""
    num_sequences: float
    """Responses with at least one token. Rows that are padding altogether do not count, so adding some changes
    nothing."""
    num_groups: float = 0
    """Groups of the optimizer step, for losses whose unit is a group (pairs of preferences). A mask does not tell how
    many groups there are, so `of` leaves 0 and the trainer fills it in."""

    def __post_init__(self) -> None:
        non_negative("totals.num_tokens", self.num_tokens)
        non_negative("totals.num_sequences", self.num_sequences)
        non_negative("totals.num_groups", self.num_groups)

    def __add__(self, other: "BatchTotals") -> "BatchTotals":
        return BatchTotals(
            self.num_tokens + other.num_tokens,
            self.num_sequences + other.num_sequences,
            self.num_groups + other.num_groups,
        )

    @classmethod
    def of(cls, mask_BT: Tensor) -> "BatchTotals":
        """Totals of one micro-batch `[B, T]`; the sum of all of them is what `aggregate` wants."""
        mask = as_mask(mask_BT)
        return cls(int(mask.sum()), int(mask.any(dim=-1).sum()))


def in_float32(values: Tensor) -> Tensor:
    """Half precision and integers as float32; float64 as it is. Statistics are never taken in less."""
    return values if values.dtype == torch.float64 else values.float()


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """The values in float32, zero where the mask is. Done *before* any arithmetic: NaN in padding then reaches neither
    the value nor the gradient (0 · NaN is NaN, so multiplying by the mask afterwards would not do)."""
    return torch.where(mask, in_float32(values), 0.0)


def per_token(advantage: Tensor, mask: Tensor) -> Tensor:
    """Advantages `[B]` or `[B, T]` as `[B, T]` float32 without gradient, 0 in padding. Raises `ShapeError`."""
    if advantage.shape == mask.shape[:1]:
        return torch.where(mask, in_float32(advantage.detach()).unsqueeze(-1), 0.0)
    if advantage.shape == mask.shape:
        return masked(advantage.detach(), mask)
    raise ShapeError(
        f"advantage is {describe(advantage)}; expected {list(mask.shape[:1])} (a row) or {list(mask.shape)} (a token)."
    )


def aggregate(values_BT: Tensor, mask_BT: Tensor, totals: BatchTotals, how: str, *, constant: float = 1.0) -> Tensor:
    """This micro-batch's contribution to the mean over the batch, float32 `[]`.

    `values_BT`: float `[B, T]`; what is under padding is ignored, NaN included. `mask_BT`: bool or 0/1 `[B, T]`.
    `how`:

    - "token_mean": Σ values·mask / num_tokens. Every token weighs the same: DAPO, 2503.14476, section 3.3.
    - "sequence_mean": Σ over rows of the row's masked mean / num_sequences. Every response weighs the same: GRPO,
      2402.03300 eq. 3.
    - "sequence_sum": Σ values·mask / num_sequences, the mean of the responses' sums.
    - "constant": Σ values·mask / (num_sequences · `constant`), where `constant` is a length, such as the longest
      response allowed: Dr. GRPO, 2503.20783 section 3.2. With 1 it is "sequence_sum".

    `constant` is read by "constant" alone. Rows without a token add 0. Raises `ShapeError` for shapes that differ,
    `ConfigError` for an unknown `how` or a `constant` that is not above 0.
    """
    one_of("aggregation", how, AGGREGATIONS)
    positive("constant", constant)
    mask = checked_mask("values", values_BT, mask_BT)
    values = masked(values_BT, mask)
    if how == "token_mean":
        return _divide(values.sum(), totals.num_tokens)
    if how == "sequence_mean":
        tokens_B = mask.sum(dim=-1).clamp(min=1)
        return _divide((values.sum(dim=-1) / tokens_B).sum(), totals.num_sequences)
    return _divide(values.sum(), totals.num_sequences * (constant if how == "constant" else 1.0))


def _divide(total: Tensor, count: float) -> Tensor:
    """Divide, so that a batch without a token, whose sum is 0, has mean 0."""
    return total / count if count > 0 else total * 0.0
