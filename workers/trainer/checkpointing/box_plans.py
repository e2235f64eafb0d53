"""An engine's pieces in the form that torch's distributed checkpoint (DCP) gets them: boxes of full tensors.

Whichever engine sharded a tensor, what a rank has of it is a few boxes. Saved as such, a checkpoint of R ranks can be
read by any other number of ranks, by other splits of a layer and by another engine: DCP finds which saved boxes overlap
those that are asked for.
"""

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

from penstock.workers.weights.piece import Corner, Piece, boxes


class BoxSavePlanner(DefaultSavePlanner):
    """Plans the save of a state dict that has the pieces' names."""

    def __init__(self, pieces: Iterable[Piece], check_wanted: Callable[[], None] = lambda: None) -> None:
        """`check_wanted`: called before each tensor; what it raises ends the save, on all ranks."""
        super().__init__(flatten_state_dict=False)
        self._boxes = by_place(pieces)
        self._check_wanted = check_wanted

    def create_local_plan(self) -> SavePlan:
        self._check_wanted()
        self.plan = SavePlan([_write_item(box) for box in self._boxes.values()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        self._check_wanted()
        return self._boxes[_place(index)].values


class BoxLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of the pieces. All names must be in the checkpoint, with the right size."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._boxes = by_place(pieces)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for box in self._boxes.values():
            chunks.setdefault(box.name, []).append(_chunk(box))
        items = []
        for name, wanted in chunks.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, wanted)
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._boxes[_place(index)].values


def by_place(pieces: Iterable[Piece]) -> dict[tuple[str, Corner], Piece]:
    """The pieces' boxes by name and corner: a rank may have several of a tensor."""
    return {(box.name, box.corner): box for box in boxes(pieces)}


def values_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """The state dict that DCP gets; the planners know where each element belongs."""
    return {piece.name: piece.values for piece in pieces}


def _place(index: MetadataIndex) -> tuple[str, Corner]:
    assert index.offset is not None
    return index.fqn, tuple(index.offset)


def _chunk(box: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.corner), box.values.shape)


def _write_item(box: Piece) -> WriteItem:
    chunk = _chunk(box)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(box.values), torch.Size(box.shape))
    return WriteItem(MetadataIndex(box.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
