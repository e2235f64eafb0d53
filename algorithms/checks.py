"""Checks of the input of losses and advantages: each failure names the argument, what it is, and what is expected.

The public functions of this package call them first. The checks look at shapes and Python numbers only, which
costs nothing on a GPU; the one that looks at values (`as_mask`) does so only where the mask is not boolean already.
"""

import math

import torch
from torch import Tensor

from penstock.conf.errors import ConfigError, ShapeError


def describe(value: object) -> str:
    """Describe a value: `float32 [2, 7]` for a tensor, the type's name for anything else."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def same_shape(expected: Tensor, expected_name: str, **tensors: Tensor) -> None:
    """Check that every tensor has the shape of `expected`. Raises `ShapeError`."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.shape != expected.shape:
            raise ShapeError(
                f"{name} is {describe(tensor)}; expected {list(expected.shape)}, the shape of {expected_name}."
            )


def has_axes(name: str, tensor: Tensor, axes: str) -> None:
    """Check that the tensor has as many dimensions as `axes` has letters, e.g. "BT". Raises `ShapeError`."""
    if not isinstance(tensor, Tensor) or tensor.dim() != len(axes):
        raise ShapeError(f"{name} is {describe(tensor)}; expected a tensor [{', '.join(axes)}].")


def as_mask(mask: Tensor, name: str = "mask") -> Tensor:
    """The mask as booleans. Raises `ShapeError` if it holds anything but 0 and 1."""
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ShapeError(
            f"{name} is {describe(mask)} with values other than 0 and 1; expected 1 for response tokens, 0 for padding."
        )
    return mask.bool()


def checked_mask(name: str, values_BT: Tensor, mask: Tensor, /, **others: Tensor) -> Tensor:
    """Check the input of a loss: `[B, T]` values, and the mask and others of their shape. Returns the mask as booleans.
    Raises `ShapeError`."""
    has_axes(name, values_BT, "BT")
    same_shape(values_BT, name, mask=mask, **others)
    return as_mask(mask)


def non_negative(key: str, value: float) -> None:
    """Raise `ConfigError` unless the number is finite and at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{key}={value}: must be a finite number, at least 0.")


def positive(key: str, value: float) -> None:
    """Raise `ConfigError` unless the number is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{key}={value}: must be a finite number, above 0.")
