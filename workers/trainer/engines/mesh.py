"""The layout of FSDP2's ranks: copies of the model, shards of a copy, parts of a layer. And the tensors that several of
them hold in parts, which are DTensors then.

    R copies   each has the whole model, and gradients are summed over them (HSDP)
    F shards   split the rows of each tensor of a copy; F * T ranks hold one copy: trainer.shard_size
    T parts    split the layers before that: trainer.tensor_parallel_size

rank = (r * F + f) * T + t, so that a copy lies on consecutive ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from penstock.workers.trainer.ranks import Ranks

TENSOR = "tensor"
"""Name of the mesh's dim along which tensor parallelism splits layers. FSDP2 works over the others."""
COPIES, SHARDS = "copies", "shards"


class RankMesh:
    """The place of this rank in the mesh, and the process groups that it is in."""

    def __init__(self, ranks: Ranks, shard_size: int = 0, tensor_parallel_size: int = 1) -> None:
        """Make the process groups. `shard_size`: ranks that hold one copy; 0: all. Collective."""
        block = shard_size or ranks.num_ranks
        self.num_copies, self.copy = ranks.num_ranks // block, ranks.rank // block
        self.num_shards, self.shard = block // tensor_parallel_size, ranks.rank % block // tensor_parallel_size
        self.num_parts, self.part = tensor_parallel_size, ranks.rank % tensor_parallel_size
        self.copies: dist.ProcessGroup | None = None
        """Process group of the ranks that have the same shard and part of each copy, this one among them. None: no
        other has."""
        self.parts: dist.ProcessGroup | None = None
        """Process group of the ranks that split layers with this one. None: no other rank does."""
        self.tensor: DeviceMesh | None = None
        """The ranks of `parts` as a mesh."""
        kind = ranks.device.type
        if self.num_copies == self.num_parts == 1:
            own = ranks.group
            self.fsdp = DeviceMesh.from_group(own, kind) if own else init_device_mesh(kind, (ranks.num_ranks,))
            return
        strides = {COPIES: block, SHARDS: self.num_parts, TENSOR: 1}
        sizes = {COPIES: self.num_copies, SHARDS: self.num_shards, TENSOR: self.num_parts}
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == SHARDS}
        groups = {name: ranks.process_group(strides[name], size) for name, size in sizes.items()}
        layout = torch.arange(ranks.first, ranks.first + ranks.num_ranks).view(*sizes.values())
        mesh = DeviceMesh.from_group(list(groups.values()), kind, mesh=layout, mesh_dim_names=tuple(sizes))
        self.fsdp = mesh[COPIES, SHARDS] if COPIES in sizes else mesh[SHARDS]
        """The mesh that FSDP2 works over: shards, or copies and shards."""
        self.copies, self.parts = groups.get(COPIES), groups.get(TENSOR)
        self.tensor = mesh[TENSOR] if TENSOR in sizes else None

    def share(self, num_rows: int, *, of_parts: bool = False) -> slice:
        """This rank's share of a shard's rows, which every copy has. `of_parts`: every part has them, too."""
        if of_parts:
            return _share(num_rows, self.copy * self.num_parts + self.part, self.num_copies * self.num_parts)
        return _share(num_rows, self.copy, self.num_copies)

    def broadcast_shares(self, rows: Tensor) -> None:
        """Broadcast each copy's share of a shard's rows to the other copies. Collective over the copies."""
        for copy in range(self.num_copies) if self.copies else ():
            share = rows[_share(len(rows), copy, self.num_copies)]
            if len(share):
                dist.broadcast(share, group=self.copies, group_src=copy)


def first_row(num_rows: int, rank: int, num_ranks: int) -> int:
    """First row of a rank's shard of dim 0: shards are as large as the first one, the last may be short or empty."""
    return min(num_rows, rank * -(-num_rows // num_ranks))


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this rank has; shares memory with it. Another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensor_placement(tensor: Tensor) -> Placement | None:
    """The placement of a tensor in tensor parallelism; None where tensor parallelism does not concern it."""
    if isinstance(tensor, DTensor) and TENSOR in _dims(tensor):
        return tensor.placements[_dims(tensor).index(TENSOR)]
    return None


def gathered(tensor: DTensor) -> DTensor:
    """The tensor with all of what FSDP2 splits; what tensor parallelism splits stays so. Collective over the shards."""
    placements = zip(_dims(tensor), tensor.placements, strict=True)
    return tensor.redistribute(
        placements=[placement if name == TENSOR else Replicate() for name, placement in placements]
    )


def _share(num_rows: int, rank: int, num_ranks: int) -> slice:
    return slice(first_row(num_rows, rank, num_ranks), first_row(num_rows, rank + 1, num_ranks))


def _dims(tensor: DTensor) -> tuple[str, ...]:
    mesh = tensor.device_mesh
    return mesh.mesh_dim_names or ("",) * mesh.ndim
