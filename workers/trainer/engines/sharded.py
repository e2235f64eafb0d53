"""Tensors that several ranks hold in parts, where the engine that splits them makes them DTensors."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; shares memory with it. Another tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
