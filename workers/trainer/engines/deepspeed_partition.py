"""The place where ZeRO keeps a parameter: which elements of it this rank has, and in which flat tensor.

    stages 1, 2   all trained parameters end to end, cut into one partition a rank: a cut goes through a parameter
    stage 3       each parameter cut into equal parts, one a rank; a rank's parts end to end

The flat tensors are float32 masters, and AdamW's moments are flat tensors of the same order. Read from DeepSpeed's
optimizers, since its public `safe_get_local_*` exist for stage 3 only and may return copies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.workers.weights.piece import Piece


@dataclass(frozen=True)
class Fragment:
    """Elements of a trained parameter that this rank has: `[first, first + count)` of the flattened parameter."""

    name: str
    shape: tuple[int, ...]
    first: int
    count: int
    """The number of elements; 0: this rank has none."""
    flat: Tensor
    """The masters of many parameters; float32."""
    offset: int
    """Place of the first element in `flat`, and in each moment."""
    shard: Tensor | None = None
    """Elements of this rank in the compute dtype, which parameters are gathered from (stage 3)."""

    def piece(self, prefix: str = "", flat: Tensor | None = None) -> Piece:
        """The piece of the master, or of another tensor in its order. Shares memory with it."""
        source = (self.flat if flat is None else flat).detach()
        return Piece(prefix + self.name, self.shape, self.first, source.narrow(0, self.offset, self.count))

    def refresh_shard(self) -> None:
        """Bring the compute dtype's elements up to date with the master (stage 3)."""
        assert self.shard is not None
        self.shard.narrow(0, 0, self.count).copy_(self.piece().values)


def fragments_of(parameters: dict[str, nn.Parameter], zero: Any, rank: int) -> Iterator[Fragment]:
    """A fragment for each trained parameter, by name, in order. `zero`: DeepSpeed's optimizer around AdamW."""
    for name, parameter in parameters.items():
        if hasattr(parameter, "ds_tensor"):
            yield _sharded(name, parameter, zero, rank)
        else:
            yield _cut(name, parameter, zero)


def frozen_piece(name: str, parameter: Any, rank: int, num_ranks: int) -> Piece:
    """The piece of a parameter without optimizer: this rank's shard in stage 3, otherwise an equal part of what all
    have."""
    sharded = hasattr(parameter, "ds_tensor")
    shape = tuple(parameter.ds_shape if sharded else parameter.shape)
    num_elements = parameter.ds_numel if sharded else parameter.numel()
    part = parameter.ds_tensor.numel() if sharded else -(-num_elements // num_ranks)
    first, count = _part(num_elements, part, rank)
    if sharded:
        return Piece(name, shape, first, parameter.ds_tensor.detach().narrow(0, 0, count))
    return Piece(name, shape, first, parameter.detach().reshape(-1).narrow(0, first, count))


def _cut(name: str, parameter: Any, zero: Any) -> Fragment:
    """The fragment of a parameter in stages 1 and 2."""
    shape = tuple(parameter.shape)
    (flat,) = zero.optimizer.param_groups[0]["params"]
    mapping = parameter._hp_mapping
    if mapping is None:
        return Fragment(name, shape, 0, 0, flat, 0)
    part, place = mapping.lp_fragment_address, mapping.hp_fragment_address
    return Fragment(name, shape, part.start, part.numel, flat, place.start)


def _sharded(name: str, parameter: Any, zero: Any, rank: int) -> Fragment:
    """The fragment of a parameter in stage 3. The last ranks' parts are padded, and may be only padding."""
    index, offset, part = zero.grad_position[zero.get_param_id(parameter)]
    first, count = _part(parameter.ds_numel, part, rank)
    flat = zero.fp32_partitioned_groups_flat[index]
    return Fragment(name, tuple(parameter.ds_shape), first, count, flat, offset, parameter.ds_tensor.detach())


def _part(num_elements: int, part: int, rank: int) -> tuple[int, int]:
    """First element and number of elements of a rank's part, where all but the last are `part` long."""
    first = min(num_elements, rank * part)
    return first, min(part, num_elements - first)
