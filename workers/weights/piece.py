"""What a rank has of the model. Publications, streams, exports and checkpoints are made of nothing else.

Training engines answer for theirs (`trainer/engines/engine.py`).
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Elements of one tensor that one rank has. Over all ranks every element is in exactly one piece."""

    name: str
    shape: tuple[int, ...]
    """Of the full tensor."""
    first: int
    """Index of `values[0]` in the flattened full tensor."""
    values: Tensor
    """`[n]`, where the engine keeps it; empty where this rank has nothing of it. That of `state` shares memory with
    what the engine computes with, so that writing into it changes the engine's state; that of `pieces` is to be
    read."""
