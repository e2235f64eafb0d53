"""FSDP2 around a policy model: the process group, the sharding, sums of gradients, and which rows of a tensor a rank
has.

Every decoder layer is one unit and the rest (embedding, last norm, output layer) is the root. Parameters are DTensors
split along dim 0. Gradients are *summed* over ranks, since losses are already divided by the totals of the whole
batch. Called by `fsdp.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from penstock.conf.errors import ConfigError
from penstock.workers.trainer.policy_model import PolicyModel
from penstock.workers.trainer.scalar_model import ScalarModel

KEEP_WHOLE_BYTES = 2 * 2**30
"""A model up to this size (float32) is gathered once an optimizer step, and its gradients are reduced once: less
communication, and whole gradients and parameters on each rank meanwhile. A larger one is gathered layer by layer,
forward and backward.
"""


@dataclass
class ProcessGroup:
    """This rank's place among the ranks of one trainer. `owned`: made here, so closed here."""

    rank: int
    num_ranks: int
    device: torch.device
    owned: bool

    @classmethod
    def join(cls, rank: int, num_ranks: int, address: str | None, timeout_s: float, use_gpu: bool) -> "ProcessGroup":
        """Meet the other ranks at `address` (host:port, on rank 0's node). One rank alone needs none.

        A process has one group: a second trainer of one rank in the same process shares it. Raises `ConfigError` if
        sizes differ.
        """
        device = torch.device("cuda", torch.cuda.current_device()) if use_gpu else torch.device("cpu")
        if dist.is_initialized():
            if dist.get_world_size() != num_ranks:
                raise ConfigError(
                    f"trainer.num_ranks={num_ranks}, but this process is already one of {dist.get_world_size()} ranks. "
                    "Start each rank in a process of its own."
                )
            return cls(rank, num_ranks, device, owned=False)
        backend = "cpu:gloo,cuda:nccl" if use_gpu else "gloo"
        if num_ranks > 1 and address is None:
            raise ConfigError(f"trainer.num_ranks={num_ranks} needs the address where the ranks meet; none was given.")
        place = {"init_method": f"tcp://{address}"} if address else {"store": dist.HashStore()}
        dist.init_process_group(backend, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=timeout_s), **place)
        return cls(rank, num_ranks, device, owned=True)

    def mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, (self.num_ranks,))

    def gather(self, value: Any) -> list[Any]:
        """A small picklable value of each rank, in order of rank. Collective."""
        if self.num_ranks == 1:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        if self.num_ranks > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()
        self.owned = False


class ShardedPolicy:
    """A policy model under FSDP2. Every rank makes the same calls, since most of them communicate."""

    def __init__(self, model: "PolicyModel | ScalarModel", group: ProcessGroup, compute_dtype: str) -> None:
        num_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
        self.model = model
        self.group = group
        self.keeps_whole = num_bytes <= KEEP_WHOLE_BYTES
        policy = MixedPrecisionPolicy()
        if compute_dtype == "bfloat16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = group.mesh()
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not self.keeps_whole)
        self.root: FSDPModule = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        model.to(group.device)  # buffers
        self.units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        if group.num_ranks > 1:
            for unit in self.units:
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum

    def before_backward(self, is_last: bool) -> None:
        """Gradients of a step's micro-batches add up unreduced until the last one, where they may be kept whole."""
        if self.keeps_whole:
            self.root.set_requires_gradient_sync(is_last)
            self.root.set_reshard_after_backward(is_last)
            self.root.set_is_last_backward(is_last)

    def free(self) -> None:
        """Let go of gathered parameters, which an optimizer step outdates. Called after passes without backward."""
        for unit in self.units:
            unit.reshard()

    def local_gradients(self) -> list[Tensor]:
        """This rank's shards, in the model's order."""
        return [local(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None]

    def grad_norm(self) -> Tensor:
        """Norm of the whole gradient, `[]`, the same on every rank. Collective."""
        norm = nn.utils.get_total_norm(self.local_gradients())
        if self.group.num_ranks == 1:
            return norm
        square = norm.square()
        dist.all_reduce(square)
        return square.sqrt()

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], int, Tensor]]:
        """`(HF name, full shape, first row, this rank's rows)` of everything that a checkpoint has; tied weights
        once, buffers whole on rank 0 and without rows elsewhere.
        """
        lm = self.model.lm
        for name, parameter in lm.named_parameters():
            shard = local(parameter)
            yield (
                name,
                tuple(parameter.shape),
                first_row(parameter.shape[0], self.group.rank, self.group.num_ranks),
                shard,
            )
        persistent = lm.state_dict().keys()
        for name, buffer in lm.named_buffers():
            if name in persistent:
                yield name, tuple(buffer.shape), 0, buffer if self.group.rank == 0 else buffer.reshape(-1)[:0]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; shares memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(num_rows: int, rank: int, num_ranks: int) -> int:
    """Where a rank's shard of dim 0 starts: shards are as large as the first one, the last may be short or empty."""
    return min(num_rows, rank * -(-num_rows // num_ranks))


def decoder_layers(model: "PolicyModel | ScalarModel") -> list[nn.Module]:
    """The blocks that are sharded one by one: what the model's class calls indivisible."""
    names = set(model.lm._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]
