"""The host's copy of what a save writes: one buffer as large as the pieces, kept and used again, since fresh memory
costs more than the copying.

    CPU   pieces ─▶ buffer                              by one thread: torch's own would take training's cores
    GPU   pieces ─▶ page-locked 64 MiB ─▶ buffer        two of them take turns (`weights/publication/device_copies.py`)

The buffer itself is not page-locked: torch rounds such memory up to a power of two, which for 33 GB is 64 GiB a rank.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.device_copies import BUFFER_BYTES, DeviceCopies, Part, stream_beside
from penstock.workers.weights.publication.layout import TensorPlace
from penstock.workers.weights.publication.publication import needs_buffers

ALIGNMENT = 16
"""Divisor of the place of each piece in the buffer, in bytes: any dtype's size divides it."""


def num_copy_bytes(pieces: Iterable[Piece]) -> int:
    """Bytes of the buffer for these pieces."""
    return sum(_room(piece) for piece in pieces)


class HostCopy:
    """Lifecycle: `take` for each save, once the copy of the one before is not needed any more. Any thread, one at a
    time."""

    def __init__(self) -> None:
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
        far: list[tuple[int, Tensor]] = []
        for piece in pieces:
            source = piece.values.detach().view(-1).view(torch.uint8)
            target = self.memory[start : start + len(source)]
            if needs_buffers(source):
                far.append((start, source))
            else:
                np.copyto(target.numpy(), source.numpy())
            copies.append(replace(piece, values=target.view(piece.values.dtype).view(piece.values.shape)))
            start += _room(piece)
        if far:
            self._take_from_device(far)
        return copies

    def _take_from_device(self, far: list[tuple[int, Tensor]]) -> None:
        """Copy `[n]` uint8 each, from the byte of the buffer on that stands with it."""
        place = TensorPlace("state", "uint8", tuple(self.memory.shape), 0)
        through = DeviceCopies(self._write)
        with stream_beside(far[0][1].device):
            for start, values in far:
                for some in values.split(BUFFER_BYTES):
                    through.add(place, start, some)
                    start += len(some)
            through.finish()

    def _write(self, parts: Sequence[Part]) -> None:
        for _, start, values in parts:
            np.copyto(self.memory[start : start + len(values)].numpy(), values.numpy())


def _room(piece: Piece) -> int:
    return -(-piece.values.nbytes // ALIGNMENT) * ALIGNMENT
