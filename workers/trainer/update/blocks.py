"""Sequences of a micro-batch one after the other, without padding: where each lies, what its tokens attend to. Pure.

    padded  a a a a     packed     a a a a b b c     a attends to a, b to b, c to c
            b b . .     positions  0 1 2 3 0 1 0
            c . . .

A block is what attends to itself and to nothing else: one sequence. Attention is computed block by block, so that it
costs what it costs the sequences alone; everything else in a layer looks at one token at a time, and costs what their
tokens do.

Legend: T tokens of all blocks, L tokens of one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Lengths and positions of the blocks of a row `[1, T]`.

    blocks = Blocks.of([4, 2, 1])
    list(blocks.runs(7))    # [(1, 4), (1, 2), (1, 1)]
    """

    lengths: tuple[int, ...]
    """Tokens of each block, in their order; those of one length next to each other are computed together."""
    position_ids_1T: Tensor
    """Position of each token in its block, int64."""
    bounds: Tensor
    """Bounds of the blocks: 0, the end of the first, …, T; int32, as flash-attention's kernels take them."""

    @classmethod
    def of(cls, lengths: "np.ndarray | list[int]") -> "Blocks":
        lengths = np.asarray(lengths, np.int64)
        ends = np.cumsum(lengths)
        positions = np.arange(int(lengths.sum())) - np.repeat(ends - lengths, lengths)
        bounds = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
        return cls(tuple(lengths.tolist()), torch.from_numpy(positions).unsqueeze(0), bounds)

    def to(self, device: torch.device) -> "Blocks":
        position_ids, bounds = (one.to(device, non_blocking=True) for one in (self.position_ids_1T, self.bounds))
        return Blocks(self.lengths, position_ids, bounds)

    def runs(self, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Number and length of the blocks next to each other that are alike, which attention can compute at once. What
        is left of `num_tokens` is padding, and a block of its own."""
        rest = num_tokens - sum(self.lengths)
        for length, alike in groupby((*self.lengths, rest) if rest else self.lengths):
            yield sum(1 for _ in alike), length


def mask_of(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """What each token of a block attends to, `[L, L]` bool, queries first. None: to all before it and itself, which
    needs no mask.

    `window`: attend to so many tokens at most, the token itself among them; None: to all.
    """
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    behind = places.unsqueeze(1) - places
    return (behind >= 0) & (behind < window)
