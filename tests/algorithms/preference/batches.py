"""Random preference data as the trainer would hand it over, and calls of a loss on parts of it, for the tests beside.

Legend: B rows, T response tokens, padded.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from penstock.algorithms.aggregation import BatchTotals

SEED, NUM_GROUPS, WIDTH = st.integers(0, 2**16), st.integers(1, 5), st.integers(0, 5)
close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)


@dataclass
class Batch:
    """Rows of several groups in random order. `columns` has all that any loss here reads."""

    logprobs: Tensor
    mask: Tensor
    columns: dict[str, Tensor]
    totals: BatchTotals

    def take(self, rows: Tensor) -> "Batch":
        """Some of the rows, with the totals of all."""
        columns = {name: value[rows] for name, value in self.columns.items()}
        return replace(self, logprobs=self.logprobs[rows], mask=self.mask[rows], columns=columns)

    def cut_in_groups(self, num_parts: int) -> "list[Batch]":
        ids = self.columns["group_ids"]
        parts = torch.unique(ids).tensor_split(num_parts)
        return [self.take(torch.isin(ids, part).nonzero().squeeze(-1)) for part in parts if len(part)]

    def with_columns(self, **columns: Tensor) -> "Batch":
        return replace(self, columns=self.columns | columns)

    def with_garbage_in_padding(self, garbage: float) -> "Batch":
        """Two more columns of padding, and the value under all of it."""

        def soiled(values: Tensor) -> Tensor:
            return torch.nn.functional.pad(torch.where(self.mask, values, garbage), (0, 2), value=garbage)

        columns = {name: soiled(value) if value.dim() == 2 else value for name, value in self.columns.items()}
        mask = torch.nn.functional.pad(self.mask, (0, 2))
        return replace(self, logprobs=soiled(self.logprobs), mask=mask, columns=columns)


def random_batch(seed: int, num_groups: int, width: int, dtype: torch.dtype = torch.float64) -> Batch:
    """Groups of 2 to 4 rows with one pair each, but about every fourth without; some rows have no token."""
    generator = torch.Generator().manual_seed(seed)
    ids, preferred = [], []
    for group in range(num_groups):
        size = int(torch.randint(2, 5, (), generator=generator))
        has_pair = bool(torch.rand((), generator=generator) > 0.25)
        ids += [100 - 7 * group] * size
        preferred += [1.0, -1.0, *[0.0] * (size - 2)] if has_pair else [0.0] * size
    order = torch.randperm(len(ids), generator=generator)

    def logprobs() -> Tensor:
        return -2 * torch.rand(len(ids), width, generator=generator, dtype=dtype)

    lengths = torch.randint(0, width + 1, (len(ids), 1), generator=generator)
    mask = torch.arange(width) < lengths
    columns = {
        "group_ids": torch.tensor(ids, dtype=torch.int64)[order],
        "preferred": torch.tensor(preferred)[order],
        "desirable": torch.randint(-1, 2, (len(ids),), generator=generator).float(),
        "reference_logprobs": logprobs(),
    }
    totals = BatchTotals(int(mask.sum()), int(mask.any(dim=-1).sum()), num_groups)
    return Batch(logprobs(), mask, columns, totals)


def one_pair(chosen: Sequence[float], rejected: Sequence[float], **reference: Sequence[Sequence[float]]) -> Batch:
    """Row 0 chosen, row 1 rejected, of these token log-probabilities; further token columns as two rows each."""

    def padded(rows: Sequence[Sequence[float]]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.float64) for row in rows], True)

    mask = padded([[1] * len(chosen), [1] * len(rejected)]).bool()
    columns = {name: padded(rows) for name, rows in reference.items()}
    columns |= {"preferred": torch.tensor([1.0, -1.0]), "group_ids": torch.tensor([5, 5])}
    return Batch(padded([chosen, rejected]), mask, columns, BatchTotals(int(mask.sum()), 2, 1))


def run(loss, batch: Batch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Value, gradient in the log-probabilities `[B, T]`, and metrics."""
    logprobs = batch.logprobs.clone().requires_grad_()
    available = {"logprobs": logprobs, "mask": batch.mask, "totals": batch.totals} | batch.columns
    value, metrics = loss(**{name: available[name] for name in inspect.signature(loss).parameters if name in available})
    value.backward()
    assert logprobs.grad is not None
    return value.detach(), logprobs.grad, metrics


def assert_same_however_cut(loss, batch: Batch, num_parts: int) -> None:
    """Value, gradient and metrics of whole groups in parts sum up to those of the batch."""
    whole, gradient, metrics = run(loss, batch)
    parts = batch.with_columns(row=torch.arange(len(batch.mask))).cut_in_groups(num_parts)
    results = [run(loss, part) for part in parts]
    close(sum(result[0] for result in results), whole)
    order = torch.cat([part.columns["row"] for part in parts])
    close(torch.cat([result[1] for result in results]), gradient[order])
    for name, value in metrics.items():
        close(sum(result[2][name] for result in results), value)
