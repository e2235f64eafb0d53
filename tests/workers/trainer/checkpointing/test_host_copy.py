"""The host's copy of a save: exactly as large as what is saved, also where it comes from a GPU through two buffers."""

import pytest
import torch

from penstock.workers.trainer.checkpointing import saver
from penstock.workers.trainer.checkpointing.saver import ALIGNMENT, HostCopy, num_copy_bytes
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.publication.publication import DeviceCopies


@pytest.mark.parametrize("on_device", [False, True])
def test_the_buffer_is_as_large_as_the_pieces_and_not_a_power_of_two(
    monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    """`on_device`: by way of buffers of 64 bytes, smaller than the first piece."""
    if on_device:
        monkeypatch.setattr(saver, "needs_buffers", lambda values: True)
        monkeypatch.setattr(saver, "BUFFER_BYTES", 64)
        monkeypatch.setattr(saver, "DeviceCopies", lambda write: DeviceCopies(write, 64))
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
