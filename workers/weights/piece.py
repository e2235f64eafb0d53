"""The pieces of the model that a rank has. Publications, streams, exports and checkpoints are made of nothing else.

Training engines name their pieces (`trainer/engines/engine.py`).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.conf.errors import WeightError

Span = tuple[int, int]
"""First element and number of elements that one rank has of a tensor."""


@dataclass(frozen=True)
class Piece:
    """Elements of one tensor that one rank has. Over all ranks every element is in exactly one piece."""

    name: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    first: int
    """Index of `values[0]` in the flattened full tensor."""
    values: Tensor
    """Values, `[n]`, where the engine keeps them; empty where this rank has none of the tensor. The values of `state`
    share memory with the engine, so that writing into them changes its state; those of `pieces` are to be read."""


def spans_by_tensor(
    pieces: Iterable[Piece], gather: Callable[[Any], list[Any]]
) -> list[tuple[str, tuple[int, ...], list[Span]]]:
    """Name, shape and every rank's span of each tensor. `pieces`: this rank's, one a tensor. `gather`: a value of every
    rank, in order of rank. Collective. Raises `WeightError` where pieces leave a gap, overlap, or come in other orders.
    """
    own = [(piece.name, tuple(piece.shape), (piece.first, piece.values.numel())) for piece in pieces]
    by_rank = gather(own)
    names = [[name for name, _, _ in some] for some in by_rank]
    if any(other != names[0] for other in names):
        raise WeightError("the trainer's ranks list their weights in different orders; they cannot be gathered.")
    tensors = []
    for entries in zip(*by_rank, strict=True):
        name, shape, _ = entries[0]
        spans = [span for _, _, span in entries]
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
        tensors.append((name, shape, spans))
    return tensors
