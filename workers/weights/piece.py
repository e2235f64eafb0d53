"""The pieces of the model that a rank has. Publications, streams, exports and checkpoints are made of nothing else.

Training engines name their pieces (`trainer/engines/train_engine.py`). A piece is one of two:

    run   [n]           n elements of the flattened tensor from `first` on: publications, streams, exports; ZeRO's state
    box   [rows, …]     a sub-block of the full tensor, one extent a dim: FSDP2's state, also where columns are split

    tensor [4, 6], first 8, values [2, 3]     . . . . . .
                                              . . b b b .
                                              . . b b b .
                                              . . . . . .

Checkpoints are of boxes alone: `boxes` makes them of runs, too.
"""

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from penstock.conf.errors import WeightError

Span = tuple[int, int]
"""First element and number of elements that one rank has of a tensor."""
Corner = tuple[int, ...]
"""Index of a box's first element in the full tensor, a number a dim."""
Extents = tuple[int, ...]
CHUNK = 2**24
"""Elements of a tensor on a device that are hashed at a time."""


@dataclass(frozen=True)
class Piece:
    """Elements of one tensor that one rank has. Over all ranks every element is in exactly one piece."""

    name: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    first: int
    """Index of the first value in the flattened full tensor."""
    values: Tensor
    """Values, contiguous, where the engine keeps them: `[n]`, a run, or with as many dims as `shape`, a box. Empty
    where this rank has none of the tensor. The values of `state` share memory with the engine, so that writing into
    them changes its state; those of `pieces` are runs, and to be read."""
    keeps_dtype: bool = False
    """True for a tensor whose dtype belongs to the model, whatever the engines': a buffer, or a parameter that the
    model's class keeps in float32. A router's bias in bfloat16 would choose other experts."""

    def dtype_in(self, engines: str) -> str:
        """Dtype in publications for engines of a dtype, and in exports. Integers keep theirs anyway."""
        keeps = self.keeps_dtype or not self.values.is_floating_point()
        return str(self.values.dtype).removeprefix("torch.") if keeps else engines

    @property
    def corner(self) -> Corner:
        """Place of the first value in the full tensor."""
        return corner_of(self.first, self.shape)


def boxes(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same elements in boxes alone, in order; they share memory with the pieces. A run that begins or ends within a
    row becomes several. Pieces without elements are left out."""
    for piece in pieces:
        if not piece.values.numel():
            continue
        if piece.values.ndim == len(piece.shape):
            yield piece
            continue
        start = 0
        for corner, extents in boxes_of_run(piece.shape, piece.first, len(piece.values)):
            count = math.prod(extents)
            values = piece.values[start : start + count].view(extents)
            yield replace(piece, first=place_of(corner, piece.shape), values=values)
            start += count


def boxes_of_run(shape: tuple[int, ...], first: int, count: int) -> Iterator[tuple[Corner, Extents]]:
    """Corner and extents of the boxes, in order, that elements `[first, first + count)` of a flattened tensor make up:
    at most two for each dim but the first, and one."""
    if not shape:
        yield from [((), ())] * count
        return
    stride = math.prod(shape[1:])
    row, start = divmod(first, stride) if stride else (0, 0)
    while count:
        if start or count < stride:  # a part of a row
            part = min(count, stride - start)
            for corner, extents in boxes_of_run(shape[1:], start, part):
                yield (row, *corner), (1, *extents)
            row, start, count = row + 1, 0, count - part
        else:
            num_rows = count // stride
            yield (row, *[0] * (len(shape) - 1)), (num_rows, *shape[1:])
            row, count = row + num_rows, count - num_rows * stride


def corner_of(first: int, shape: tuple[int, ...]) -> Corner:
    """Index, a number a dim, of an element of a flattened tensor."""
    corner = []
    for extent in reversed(shape):
        first, place = divmod(first, max(1, extent))
        corner.append(place)
    return tuple(reversed(corner))


def place_of(corner: Corner, shape: tuple[int, ...]) -> int:
    """Place of an element in the flattened tensor."""
    place = 0
    for index, extent in zip(corner, shape, strict=True):
        place = place * extent + index
    return place


class TensorSpans(NamedTuple):
    """The parts of a tensor that the ranks have."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Dtype in engines and exports."""
    spans: list[Span]
    """Span of each rank, in order of rank."""


def gather_spans(pieces: Iterable[Piece], dtype: str, gather: Callable[[Any], list[Any]]) -> list[TensorSpans]:
    """Every rank's span of each tensor. `pieces`: this rank's, one a tensor. `dtype`: of the engines. `gather`: a value
    of every rank, in order of rank. Collective. Raises `WeightError` where pieces leave a gap, overlap, or come in
    other orders."""
    own = [
        (piece.name, tuple(piece.shape), piece.dtype_in(dtype), (piece.first, piece.values.numel())) for piece in pieces
    ]
    by_rank = gather(own)
    names = [[name for name, *_ in some] for some in by_rank]
    if any(other != names[0] for other in names):
        raise WeightError("the trainer's ranks list their weights in different orders; they cannot be gathered.")
    tensors = []
    for entries in zip(*by_rank, strict=True):
        name, shape, own_dtype, _ = entries[0]
        spans = [span for *_, span in entries]
        end = 0
        for first, count in sorted(span for span in spans if span[1]):
            if first != end:
                break
            end = first + count
        if end != math.prod(shape) or sum(count for _, count in spans) != end:
            raise WeightError(
                f"tensor {name!r} of shape {list(shape)}: the ranks' pieces {spans} (first, count) are not every "
                "element once."
            )
        tensors.append(TensorSpans(name, shape, own_dtype, spans))
    return tensors


def hash_of_pieces(pieces: Iterable[Piece]) -> int:
    """The sum of the hashes of a rank's pieces of the weights, for runs that write no publication. Values on a device
    are multiplied by odd numbers that depend on their places and summed there, modulo 2^64."""
    total, on_device = 0, []
    for piece in pieces:
        place = f"{piece.name} {piece.first} {piece.values.numel()} ".encode()
        values = piece.values.detach().contiguous().reshape(-1)
        if values.device.type == "cpu":
            digest = xxhash.xxh3_128(place)
            digest.update(values.view(torch.uint8).numpy().data)
            total += digest.intdigest()
        elif len(values):
            on_device.append((place, mixed_sum(values)))
    if on_device:
        sums = torch.stack([found for _, found in on_device]).cpu().tolist()  # one transfer
        for (place, _), found in zip(on_device, sums, strict=True):
            total += xxhash.xxh3_128_intdigest(place + struct.pack("<q", found))
    return int(total % 2**128)


def mixed_sum(values: Tensor) -> Tensor:
    """The sum of all elements' bits, each multiplied by an odd number of its place, `[]` int64 on the values' device.
    Integer sums wrap, so that their order does not matter. `values`: `[n]`."""
    bits = values.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, len(bits), CHUNK):
        part = bits[start : start + CHUNK].long()
        places = torch.arange(start, start + len(part), device=values.device)
        total += ((part + 1) * (places * 0x9E3779B97F4A7C1 | 1)).sum()
    return total
