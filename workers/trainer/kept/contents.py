"""A rank's pieces as the bytes of a file: which tensors they are of, and where each lies.

The pieces lie back to back in the order in which they come, which is the same for every trainer that shards the same
model in the same way over as many ranks. Pieces that lie back to back in memory, too, such as the rows of a matrix
whose columns are split, are copied as one.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
import xxhash
from torch import Tensor

from penstock.workers.trainer.kept.header import Part
from penstock.workers.weights.piece import Piece


def parts_of(pieces: Iterable[Piece]) -> tuple[Part, ...]:
    """A part for each tensor."""
    return tuple(_part(list(some)) for _, some in groupby(pieces, key=lambda piece: piece.name))


def difference(wanted: Sequence[Part], found: Sequence[Part]) -> str | None:
    """The place where a copy has other pieces than a trainer, as half a sentence; None: they are the same."""
    by_name = {part.name: part for part in found}
    for part in wanted:
        other = by_name.get(part.name)
        if other != part:
            return f"{part.name!r} is {_described(part)} in this trainer, and {_described(other)} in the copy"
    if len(found) != len(wanted):
        lacking = next(part for part in found if part.name not in {part.name for part in wanted})
        return f"{lacking.name!r} is in the copy, and not in this trainer"
    return None


def runs_of(pieces: Iterable[Piece]) -> Iterator[Tensor]:
    """All bytes of the pieces in order: `[num_bytes]` uint8, on their device, each run as long as memory is
    contiguous."""
    run: Tensor | None = None
    for piece in pieces:
        values = bytes_of(piece.values)
        if not len(values):
            continue
        if run is not None and _follows(run, values):
            run = torch.as_strided(run, (len(run) + len(values),), (1,))
            continue
        if run is not None:
            yield run
        run = values
    if run is not None:
        yield run


def bytes_of(values: Tensor) -> Tensor:
    """The memory of `[n]` values, which are contiguous."""
    return values.detach().view(torch.uint8)


def _part(pieces: list[Piece]) -> Part:
    first = pieces[0]
    spans = np.array([(piece.first, piece.values.numel()) for piece in pieces], np.int64)
    dtype = str(first.values.dtype).removeprefix("torch.")
    ranges = xxhash.xxh3_64_hexdigest(spans.tobytes())
    return Part(first.name, dtype, tuple(first.shape), first.first, int(spans[:, 1].sum()), ranges)


def _described(part: Part | None) -> str:
    if part is None:
        return "nothing"
    return f"{part.num_elements:,} elements of {list(part.shape)} from {part.first:,} on, {part.dtype}"


def _follows(run: Tensor, values: Tensor) -> bool:
    return (
        run.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        and run.storage_offset() + len(run) == values.storage_offset()
    )
