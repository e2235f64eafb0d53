"""Tensors that several ranks hold in parts, where the engine that splits them makes them DTensors."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

TENSOR = "tensor"
"""The dim of a mesh along which tensor parallelism splits layers. FSDP2 works over the others (`mesh.py`)."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; shares memory with it. Another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensor_placement(tensor: Tensor) -> Placement | None:
    """How tensor parallelism has placed it; None where it is none of its business."""
    if isinstance(tensor, DTensor) and TENSOR in _dims(tensor):
        return tensor.placements[_dims(tensor).index(TENSOR)]
    return None


def gathered(tensor: DTensor) -> DTensor:
    """All of what FSDP2 splits; what tensor parallelism splits stays so. Collective over the shards."""
    placements = zip(_dims(tensor), tensor.placements, strict=True)
    return tensor.redistribute(
        placements=[placement if name == TENSOR else Replicate() for name, placement in placements]
    )


def _dims(tensor: DTensor) -> tuple[str, ...]:
    mesh = tensor.device_mesh
    return mesh.mesh_dim_names or ("",) * mesh.ndim
