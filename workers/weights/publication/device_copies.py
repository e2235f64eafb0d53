"""Copies from a device into a publication, through two page-locked buffers that take turns.

    device   cast, copy ─▶ buffer 0     cast, copy ─▶ buffer 1     cast, copy ─▶ buffer 0  …
    host                        buffer 0 ─▶ file, summed    buffer 1 ─▶ file, summed       …

The cast is made on the device, so that what crosses the bus is what engines load. Only the buffers are page-locked, and
they are the same for every version: the file is never registered with the driver, which takes longer than the copy and
would have to be undone whenever the file is given away. Copies are ordered by the device's current stream.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.workers.weights.publication.layout import TensorPlace

BUFFER_BYTES = 64 * 2**20
"""Bytes of each buffer: a few ms of a bus, so that starting a copy costs little beside it."""
ALIGNMENT = 64
"""Divisor of where a range begins in a buffer: at least the size of any element."""
Part = tuple[TensorPlace, int, Tensor]
"""Place of a tensor, first element, and values in the layout's dtype, `[n]`."""


@dataclass
class _Buffer:
    memory: Tensor
    parts: list[Part] = field(default_factory=list)
    num_bytes: int = 0
    filled: torch.Event | None = None
    """Event after the last copy into it; None where copies are done when they return."""


class DeviceCopies:
    """Lifecycle: `add` each range, then `finish`: `write` has been called with all of them by then, in their order, and
    what was added may change."""

    def __init__(self, write: Callable[[Sequence[Part]], None], num_bytes: int = BUFFER_BYTES) -> None:
        """`write`: takes ranges whose values lie in host memory until it returns. `num_bytes`: of each buffer."""
        self._write, self._num_bytes = write, num_bytes
        self._device = torch.device("cpu")
        is_locked = torch.cuda.is_available()
        self._filling, self._other = (
            _Buffer(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_locked)) for _ in range(2)
        )

    def add(self, place: TensorPlace, first_element: int, values: Tensor) -> None:
        """Add a range, `[n]` on any device, of at most the bytes of a buffer."""
        size = len(values) * place.element_bytes
        if self._filling.num_bytes + size > self._num_bytes:
            self._turn()
        buffer = self._filling
        target = buffer.memory[buffer.num_bytes : buffer.num_bytes + size].view(getattr(torch, place.dtype))
        target.copy_(values.detach().to(target.dtype), non_blocking=True)
        buffer.parts.append((place, first_element, target))
        buffer.num_bytes += size + -size % ALIGNMENT
        self._device = values.device

    def finish(self) -> None:
        """Write what is left. A second call changes nothing."""
        self._turn()
        self._empty(self._other)

    def _turn(self) -> None:
        """Begin to fill the other buffer, once it is written: the device fills this one meanwhile."""
        self._filling.filled = mark(self._device)
        self._empty(self._other)
        self._filling, self._other = self._other, self._filling

    def _empty(self, buffer: _Buffer) -> None:
        if not buffer.parts:
            return
        if buffer.filled is not None:
            buffer.filled.synchronize()
        self._write(buffer.parts)
        buffer.parts, buffer.num_bytes, buffer.filled = [], 0, None


def stream_beside(device: torch.device) -> AbstractContextManager[object]:
    """A stream beside the computing, from the point that it has reached."""
    if device.type == "cpu":
        return nullcontext()
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream


def mark(device: torch.device) -> torch.Event | None:
    """An event after all that the device was told to do so far; None for the CPU, which has done it."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()
