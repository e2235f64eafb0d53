"""Page-locked host memory of exactly the size that is asked for, which is kept and used again.

torch's own (`pin_memory=True`) is rounded up to a power of two, up to twice the bytes; its option to round less
(`pinned_max_round_threshold_mb`) hands out freed blocks without comparing their sizes in torch 2.13. Here memory is
mapped, and registered with CUDA's driver, which takes about a second for a few GiB: so it stays.

    memory = page_locked(num_bytes, device)      one tensor, for as long as something refers to it

    buffer = HostBuffer(device)                  many parts of one piece of memory
    part = buffer.take(num_bytes)                its bytes are used again once `part` is gone
"""

import logging
import mmap
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 512
"""Bytes to which a part's beginning is rounded up: what copies by CUDA are aligned to."""
BLOCK_BYTES = 64 * 2**20
"""Fewest bytes that are registered at once, while it is not known how many will be needed: each takes a call."""
_LOG = logging.getLogger("penstock")


def page_locked(num_bytes: int, device: torch.device) -> Tensor:
    """Memory for copies from and to a device: uint8 `[num_bytes]`, zeros, at a page's beginning. Page-locked for a CUDA
    device; plain for others, and where the driver refuses, which is logged. Once nothing refers to it the device's work
    is waited for, and it is given back."""
    if not num_bytes:
        return torch.zeros(0, dtype=torch.uint8)
    mapping = _Mapping(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a kernel that has none
        mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    if device.type == "cuda":
        mapping.register(memory.data_ptr(), num_bytes, device)
    return memory


def page_locked_file(descriptor: int, num_bytes: int, device: torch.device) -> mmap.mmap:
    """A mapping of a whole file, shared and writable. Page-locked for a CUDA device for as long as something refers to
    it; plain for others, and where the driver refuses, which is logged."""
    mapping = _Mapping(descriptor, num_bytes)
    if device.type == "cuda":
        mapping.register(torch.frombuffer(mapping, dtype=torch.uint8).data_ptr(), num_bytes, device)
    return mapping


class _Mapping(mmap.mmap):
    """Mapped memory that is taken from the driver before it is unmapped."""

    pointer = 0
    """Its address; 0: it is not registered."""

    def register(self, pointer: int, num_bytes: int, device: torch.device) -> None:
        cudart = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(pointer, num_bytes, 0))
        if code == 0:
            self.pointer = pointer
            return
        _LOG.warning(
            "%.1f GiB of host memory cannot be page-locked (CUDA error %d): copies from and to the GPU take longer. "
            "Raise ulimit -l or the container's memory; or set trainer.activation_offload=false, trainer.offload=false",
            num_bytes / 2**30, code,
        )  # fmt: skip
        forget_error(device)

    def __del__(self) -> None:
        if self.pointer and not sys.is_finalizing():
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.pointer)


def forget_error(device: torch.device) -> None:
    """Have CUDA forget an error of a call that has returned it: the next kernel would report it once more."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


@dataclass(eq=False)
class _Block:
    memory: Tensor
    end: int = 0
    """Bytes that were given out since it was empty."""
    num_parts: int = 0


def padded(num_bytes: int) -> int:
    """Bytes that a part takes."""
    return num_bytes + -num_bytes % ALIGNMENT


class HostPart:
    """Bytes of a buffer: `memory`, uint8. They are given back when this object is gone, not when `memory` is."""

    def __init__(self, buffer: "HostBuffer", block: _Block, memory: Tensor) -> None:
        self.memory = memory
        self._buffer, self._block = buffer, block

    def __del__(self) -> None:
        self._buffer.release(self._block)


class HostBuffer:
    """Host memory for copies from and to a device, by parts of any size. It grows to the most bytes that were out at
    once, and is then one piece of exactly that size. All copies must be of one stream, whose order lets bytes be used
    again while a copy from them is under way. Thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.RLock()  # parts may be collected within `take`
        self._blocks: list[_Block] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that it has."""
        return sum(len(block.memory) for block in self._blocks)

    @property
    def is_free(self) -> bool:
        """True if none of its parts is out."""
        return not any(block.num_parts for block in self._blocks)

    def reserve(self, num_bytes: int) -> None:
        """Have room for parts of so many bytes in all, each rounded up to `ALIGNMENT`, in one piece. Raises
        `RuntimeError` while parts are out."""
        with self._lock:
            if not self.is_free:
                raise RuntimeError("host memory is enlarged while parts of it are in use")
            if len(self._blocks) != 1 or len(self._blocks[0].memory) < num_bytes:
                self._blocks = []  # given back first
                self._blocks = [_Block(page_locked(num_bytes, self.device))]

    def take(self, num_bytes: int) -> HostPart:
        """A part of so many bytes. Their values are not defined."""
        size = padded(num_bytes)
        with self._lock:
            if len(self._blocks) > 1 and self.is_free:
                self.reserve(sum(block.end for block in self._blocks))
            for block in self._blocks:
                if not block.num_parts:
                    block.end = 0
            block = next((one for one in self._blocks if one.end + size <= len(one.memory)), None) or self._enlarged(
                size
            )
            start, block.end, block.num_parts = block.end, block.end + size, block.num_parts + 1
        return HostPart(self, block, block.memory[start : start + num_bytes])

    def release(self, block: _Block) -> None:
        """Take a part back."""
        with self._lock:
            block.num_parts -= 1

    def _enlarged(self, size: int) -> _Block:
        block = _Block(page_locked(max(size, BLOCK_BYTES), self.device))
        self._blocks.append(block)
        return block
