"""The host's copy of a save: exactly as large as what is saved, also where it comes from a GPU by way of two blocks."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.trainer.checkpointing.host_copy import ALIGNMENT, HostCopy, num_copy_bytes, through_blocks
from penstock.workers.weights.piece import Piece

BLOCK = 8


class Device:
    """A device whose copies to the host are made when they are waited for, and no sooner."""

    def __init__(self) -> None:
        self.late: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.blocks = [LateBlock(self, torch.zeros(BLOCK, dtype=torch.uint8)) for _ in range(2)]
        self.most = 0

    def wait(self) -> None:
        self.most = max(self.most, len(self.late))
        for target, source in self.late:
            target.copy_(source)
        self.late.clear()


class LateBlock:
    def __init__(self, device: Device, memory: torch.Tensor) -> None:
        self.device, self.memory = device, memory

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, some: slice) -> "LateBlock":
        return LateBlock(self.device, self.memory[some])

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.device.late.append((self.memory, source))

    def numpy(self) -> np.ndarray:
        return self.memory.numpy()


@given(st.lists(st.integers(0, 5 * BLOCK), max_size=6))
def test_what_goes_through_two_blocks_arrives_and_one_is_filled_at_a_time(sizes: list[int]) -> None:
    sources = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    targets = [torch.zeros_like(source) for source in sources]
    device = Device()
    blocks: Any = device.blocks
    through_blocks(zip(sources, targets, strict=True), blocks, device.wait)
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))
    assert device.most <= 1


def test_the_buffer_is_as_large_as_the_pieces_and_not_a_power_of_two() -> None:
    pieces = [Piece("w", (5, 7), 0, torch.rand(5, 7)), Piece("n", (3,), 0, torch.tensor([1, 2, 3], dtype=torch.uint8))]
    pieces += [Piece("none", (4,), 4, torch.zeros(0)), Piece("counters", (2,), 0, torch.tensor([4, 2**40]))]
    copy = HostCopy()
    copies = copy.take(pieces)
    assert len(copy.memory) == num_copy_bytes(pieces) == 144 + 16 + 16
    for piece, other in zip(pieces, copies, strict=True):
        assert torch.equal(piece.values, other.values)
        assert piece.values.shape == other.values.shape
        assert (other.values.data_ptr() - copy.memory.data_ptr()) % ALIGNMENT == 0
    before = copy.memory.data_ptr()
    pieces[0].values.fill_(2)
    assert torch.equal(copy.take(pieces)[0].values, pieces[0].values)
    assert copy.memory.data_ptr() == before
