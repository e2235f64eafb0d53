"""The stream of `nccl_m2n`: each rank's shards as they lie, in the engines' dtype. Nothing is gathered.

Imports vLLM, so it is imported where a stream is made (`trainer_side.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.m2n_source import DTensorModuleSource

from penstock.workers.weights.checkpoint_form import keeps_float32


class ShardStream(DTensorModuleSource):
    """The DTensors of FSDP2 with their placements. The cast makes one shard's copy at a time.

    vLLM reads `metadata` once, when trainer and engines connect, and checks there what its library can express: shards
    of equal size, at most three dimensions.
    """

    def __init__(self, module: nn.Module, num_ranks: int, dtype: str) -> None:
        super().__init__(module, num_ranks)
        self._keeps = keeps_float32(module)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._num = 0
        self.num_taken = 0
        """Shards of the current pass, or the last one, that were taken."""

    def metadata(self) -> list[Any]:
        found = [meta if self._keeps(meta.name) else replace(meta, dtype=self._dtype) for meta in super().metadata()]
        self._num = len(found)
        return found

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.num_taken = 0
        for name, shard in super().__iter__():
            yield name, shard.detach() if self._keeps(name) else shard.detach().to(self._dtype)
            self.num_taken += 1

    @property
    def position(self) -> str:
        """The position of the current pass, for error messages."""
        return f"{self.num_taken} of {self._num} shards taken"
