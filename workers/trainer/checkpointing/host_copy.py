"""The host's copy of what a save writes: one buffer as large as the pieces, kept and used again, since fresh memory
costs more than the copying.

    CPU   pieces ─▶ buffer                                        by one thread: torch's own would take training's cores
    GPU   pieces ─▶ pinned block ─▶ buffer                        while the next piece fills the other block
                    two of 64 MiB

The buffer itself is not pinned: torch rounds pinned memory up to a power of two, which for 33 GB is 64 GiB a rank.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.workers.weights.piece import Piece

BLOCK_BYTES = 64 * 2**20
"""Bytes of a pinned block, a power of two: enough for the bus's full rate, and little beside a state."""
ALIGNMENT = 16
"""Divisor of the place of each piece in the buffer, in bytes: any dtype's size divides it."""


def num_copy_bytes(pieces: Iterable[Piece]) -> int:
    """Bytes of the buffer for these pieces."""
    return sum(_room(piece) for piece in pieces)


class HostCopy:
    """Lifecycle: `take` for each save, once the copy of the one before is not needed any more. Any thread, one at a
    time."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self.memory = torch.empty(0, dtype=torch.uint8)
        """The buffer; empty before the first copy."""

    @torch.no_grad()
    def take(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copy the pieces, of any device; return them with values in the host's memory, which the next call
        overwrites."""
        num_bytes = num_copy_bytes(pieces)
        if len(self.memory) != num_bytes:
            self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        copies, start = [], 0
        for piece in pieces:
            values = self.memory[start : start + piece.values.nbytes].view(piece.values.dtype)
            copies.append(replace(piece, values=values.view(piece.values.shape)))
            start += _room(piece)
        from_gpu = []
        for piece, copy in zip(pieces, copies, strict=True):
            source, target = _bytes_of(piece), _bytes_of(copy)
            if source.device.type == "cpu":
                np.copyto(target.numpy(), source.numpy())
            else:
                from_gpu.append((source, target))
        if from_gpu:
            self._from_gpu(from_gpu)
        return copies

    def _from_gpu(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        """Copy in a stream beside the computing, from the point that it has reached."""
        self._blocks = self._blocks or [torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        with torch.cuda.device(pairs[0][0].device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.default_stream())
            with torch.cuda.stream(stream):
                through_blocks(pairs, self._blocks, stream.synchronize)


def through_blocks(pairs: Iterable[tuple[Tensor, Tensor]], blocks: Sequence[Tensor], wait: Callable[[], None]) -> None:
    """Copy each source, `[n]` uint8, into its target by way of two blocks in turn: one is filled while the other is
    emptied. `wait`: returns when what was begun before is in its block."""
    before: tuple[Tensor, Tensor] | None = None
    for number, (source, target) in enumerate(_cut(pairs, len(blocks[0]))):
        block = blocks[number % 2][: len(source)]
        wait()
        block.copy_(source, non_blocking=True)
        if before is not None:
            np.copyto(before[1].numpy(), before[0].numpy())
        before = block, target
    wait()
    if before is not None:
        np.copyto(before[1].numpy(), before[0].numpy())


def _cut(pairs: Iterable[tuple[Tensor, Tensor]], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for source, target in pairs:
        if len(source):
            yield from zip(source.split(size), target.split(size), strict=True)


def _bytes_of(piece: Piece) -> Tensor:
    return piece.values.detach().view(-1).view(torch.uint8)


def _room(piece: Piece) -> int:
    return -(-piece.values.nbytes // ALIGNMENT) * ALIGNMENT
