"""This rank's place among the ranks of one trainer, and what they tell each other. Used by everything in this folder
that is collective.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.conf.errors import ConfigError


@dataclass
class ProcessGroup:
    """Lifecycle: `join`, then any collective, then `leave`. `owned`: made here, so closed here."""

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
