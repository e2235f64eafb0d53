"""An engine's pieces in the form that torch's distributed checkpoint (DCP) gets them: ranges of flattened tensors.

Whichever engine sharded a tensor, a rank has a range of its elements. Saved as such, a checkpoint of R ranks can be
read by any other number of ranks and by another engine: DCP finds which saved ranges overlap those that are asked for.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from penstock.workers.weights.piece import Piece


class FlatSavePlanner(DefaultSavePlanner):
    """Plans the save of a state dict that has the pieces' names."""

    def __init__(self, pieces: Iterable[Piece], check_wanted: Callable[[], None] = lambda: None) -> None:
        """`check_wanted`: called before each tensor; what it raises ends the save, on all ranks."""
        super().__init__(flatten_state_dict=False)
        self._pieces = by_place(pieces)
        self._check_wanted = check_wanted

    def create_local_plan(self) -> SavePlan:
        self._check_wanted()
        self.plan = SavePlan([_write_item(piece) for piece in self._pieces.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        self._check_wanted()
        return self._pieces[_place(index)].values


class FlatLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of the pieces. All names must be in the checkpoint, with the right size."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = by_place(pieces)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for piece in self._pieces.values():
            chunks.setdefault(piece.name, []).append(_chunk(piece))
        items = []
        for name, wanted in chunks.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, wanted)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[_place(index)].values


def by_place(pieces: Iterable[Piece]) -> dict[tuple[str, int], Piece]:
    """Pieces by name and first element: a rank may have several pieces of a tensor. Pieces without elements are left
    out."""
    return {(piece.name, piece.first): piece for piece in pieces if piece.values.numel()}


def values_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The state dict that DCP gets; the planners know where each element belongs."""
    return {piece.name: piece.values for piece in pieces}


def _place(index: MetadataIndex) -> tuple[str, int]:
    assert index.offset is not None
    return index.fqn, index.offset[0]


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([piece.first]), piece.values.shape)


def _write_item(piece: Piece) -> WriteItem:
    chunk, size = _chunk(piece), torch.Size([math.prod(piece.shape)])
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(piece.values), size)
    return WriteItem(MetadataIndex(piece.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
