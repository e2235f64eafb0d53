"""An engine's pieces as torch's distributed checkpoint (DCP) is to see them: ranges of flattened tensors.

Whoever sharded a tensor, a rank has a range of its elements. Saved as such, a checkpoint of R ranks can be read by any
other number of ranks and by another engine: DCP finds which saved ranges overlap those that are asked for. Used by
`checkpointing.py`.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from penstock.workers.trainer.engine import Piece


class FlatSavePlanner(DefaultSavePlanner):
    """Of a state dict that maps the pieces' names to their values."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = pieces

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, piece) for name, piece in self._pieces.items() if _chunks(piece)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index.fqn].values


class FlatLoadPlanner(DefaultLoadPlanner):
    """The same for reading. All names must be in the checkpoint, in the right size."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False)
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, piece in self._pieces.items():
            saved = self.metadata.state_dict_metadata[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, _chunks(piece))
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index.fqn].values


def _chunks(piece: Piece) -> list[ChunkStorageMetadata]:
    """None for a rank that has nothing of the tensor."""
    return [ChunkStorageMetadata(torch.Size([piece.first]), piece.values.shape)] if piece.values.numel() else []


def _write_item(name: str, piece: Piece) -> WriteItem:
    chunk, size = _chunks(piece)[0], torch.Size([math.prod(piece.shape)])
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(piece.values), size)
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
