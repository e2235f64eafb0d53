"""Tensors that several ranks hold in parts, where the engine that splits them makes them DTensors."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

TENSOR = "tensor"
"""Name of the mesh's dim along which tensor parallelism splits layers. FSDP2 works over the others (`mesh.py`)."""


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


def _dims(tensor: DTensor) -> tuple[str, ...]:
    mesh = tensor.device_mesh
    return mesh.mesh_dim_names or ("",) * mesh.ndim
