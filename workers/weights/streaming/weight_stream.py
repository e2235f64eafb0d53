"""The trainer's weights as a stream of whole tensors, one at a time, on each rank, in the engines' dtype or, where they
keep it, in their own.

    for piece in pieces():  this rank's elements ─▶ cast ─▶ every owner broadcasts its elements into its place ─▶ whole

A tensor is whole only while the iterating caller holds it, so at most a bucket of them is ever gathered. The stream has
the two channels that vLLM's trainer-side engines read (their `WeightSource`): `metadata`, and iteration in the same
order.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.conf.errors import WeightError
from penstock.workers.weights.piece import Piece, Span, spans_by_tensor


@dataclass(frozen=True)
class TensorMeta:
    """The description of a tensor of the stream; the fields of vLLM's `ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightStream:
    """A stream that can be iterated again: each pass gathers anew. Every rank makes the same passes, since gathering is
    collective."""

    def __init__(
        self,
        pieces: Callable[[], Iterable[Piece]],
        dtype: str,
        device: torch.device,
        gather: Callable[[Any], list[Any]],
    ) -> None:
        """`pieces`: of this rank, in the same order on each and each time. `dtype`: of the engines. `device`: where
        whole tensors are made. `gather`: a small value of every rank, in order of rank. Collective, once. Raises
        `WeightError` when the ranks' pieces do not make whole tensors.
        """
        self._pieces = pieces
        self._device = device
        tensors = spans_by_tensor(pieces(), dtype, gather)
        self._spans = [tensor.spans for tensor in tensors]
        self._metadata = [TensorMeta(each.name, getattr(torch, each.dtype), each.shape) for each in tensors]
        self.num_taken = 0
        """Tensors of the current pass, or the last one, that were taken."""

    def metadata(self) -> list[TensorMeta]:
        """Description of every tensor, in the order of iteration. Costs nothing."""
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over `(name, whole tensor)`, contiguous. Collective. A rank alone gets views where no cast is
        needed."""
        self.num_taken = 0
        for piece, meta, spans in zip(self._pieces(), self._metadata, self._spans, strict=True):
            if piece.name != meta.name:
                raise WeightError(
                    f"the trainer's weights changed their order: {piece.name!r} instead of {meta.name!r}."
                )
            yield meta.name, self._whole(piece, meta, spans)
            self.num_taken += 1

    @property
    def position(self) -> str:
        """The position of the current pass, for error messages."""
        names = [meta.name for meta in self._metadata]
        where = f"at {names[self.num_taken]!r}" if self.num_taken < len(names) else "past the last"
        return f"{self.num_taken} of {len(names)} tensors taken, {where}"

    def _whole(self, piece: Piece, meta: TensorMeta, spans: list[Span]) -> Tensor:
        """Gather the whole tensor. The cast comes first, so that the data sent between ranks has the engines' size."""
        values = piece.values.detach().to(device=self._device, dtype=meta.dtype)
        if len(spans) == 1:
            return values.reshape(meta.shape)
        whole = torch.empty(math.prod(meta.shape), dtype=meta.dtype, device=self._device)
        whole[piece.first : piece.first + values.numel()] = values
        for rank, (first, count) in enumerate(spans):
            if count:
                dist.broadcast(whole[first : first + count], src=rank)
        return whole.reshape(meta.shape)
