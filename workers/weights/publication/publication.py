"""A publication: one version of the weights in node-local shared memory, written by all trainer ranks at once.

    <root>/v00000012/model.safetensors   valid safetensors, HF names; each rank writes its pieces into their place
    <root>/v00000012/manifest.json       written last, by rename: without it there is no publication

    rank 0..R-1 (trainer/publishing.py)                        engines (rollout/engine_*.py)
      writer = PublicationWriter(root, 12, layout, rank, R)      mapped = MappedWeights(publication)
      writer.write_elements(name, first, values)  ...            mapped.verify()
      writer.finish()                                            for name, tensor in mapped.tensors(): ...
      barrier; rank 0: seal(root, 12, layout, R)

Bytes are cast and copied straight into a mapping of the file, whose pages are warm and known to be there
(`publication_files.py`): one copy, summed while it is in the cache, and several ranks do not wait for each other.
Several threads copy at once, without torch's own, which would synchronize after every block and, on shared
cores, wait for each other longer than they copy.

Copies from a device go through two page-locked buffers that take turns (`DeviceCopies`):

    device   cast, copy ─▶ buffer 0     cast, copy ─▶ buffer 1     cast, copy ─▶ buffer 0  …
    host                        buffer 0 ─▶ file, summed    buffer 1 ─▶ file, summed       …

The cast is made on the device, so that what crosses the bus is what engines load. Only the buffers are page-locked, and
they are the same for every version: the file is never registered with the driver, which takes longer than the copy and
would have to be undone whenever the file is given away. Copies are ordered by the device's current stream.
"""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from penstock.conf.errors import WeightError
from penstock.workers.protocols import Publication
from penstock.workers.runtime.local_files import write_whole
from penstock.workers.weights.publication.layout import (
    NO_OUTLET,
    ElementRange,
    Layout,
    Outlet,
    TensorPlace,
    check_coverage,
    cut,
)
from penstock.workers.weights.publication.publication_files import (
    Manifest,
    WritableMappings,
    prepare_file,
    publication_directory,
    write_manifest,
)

BLOCK_BYTES = 2**19
"""Bytes that are copied, then summed: the bytes read and written fit into the cache of a core, also at four bytes to
two."""
CAST_ELEMENTS = 2**15
"""Largest number of elements that torch casts without its threads, where it has several."""
BUFFER_BYTES = 64 * 2**20
"""Bytes of each buffer: a few ms of a bus, so that starting a copy costs little beside it."""
ALIGNMENT = 64
"""Divisor of where a range begins in a buffer: at least the size of any element."""
PlacedValues = tuple[TensorPlace, int, Tensor]
"""Place of a tensor, first element, and values in the layout's dtype, `[n]`."""
_mappings = WritableMappings()
"""Mappings of the process, like page tables: a rank writes many versions, each with a writer of its own."""


class PublicationWriter:
    """The writer of one rank. It writes pieces of tensors into their places; any rank may write any piece, each element
    once.

    Opening it takes back an earlier publication of the same version (a repeated step), since its bytes are about to
    change. Raises `WeightError` when the directory's file system cannot hold the layout.
    """

    def __init__(
        self,
        directory: str | Path,
        version: int,
        layout: Layout,
        rank: int = 0,
        num_ranks: int = 1,
        outlet: Outlet = NO_OUTLET,
    ) -> None:
        """`directory`: the root; the publication becomes `<directory>/v<version>`. `outlet`: used where readers are on
        other machines too."""
        self.layout = layout
        self.rank = rank
        self.num_ranks = num_ranks
        self.ranges: list[ElementRange] = []
        self.path = publication_directory(directory, version)
        _mappings.unmap_stale(Path(directory))
        self._outlet = outlet
        file = prepare_file(directory, version, layout.num_bytes, outlet.spans)
        _rank_file(self.path, rank).unlink(missing_ok=True)
        self._file = _mappings.map(file, Path(directory))
        num_threads = torch.get_num_threads()
        self._threads = ThreadPoolExecutor(num_threads) if num_threads > 1 else None
        self._from_device: DeviceCopies | None = None
        if rank == 0:
            self._file.memory[: len(layout.header)] = layout.header

    def write_elements(self, name: str, first_element: int, values: Tensor) -> None:
        """Write elements `[first_element, first_element + len(values))` of the flattened tensor `name`, cast to the
        layout's dtype.

        `values`: `[num_elements]`, any device and float dtype, without padding; those on a device must stay as they are
        until `close`. None of them (an empty shard): nothing happens. Raises `WeightError` for a wrong name or range,
        and when the file system is full.
        """
        place = self.layout.place(name)
        _check_elements(place, first_element, tuple(values.shape))
        if values.shape[0] == 0:
            return
        flat = values.detach()
        cuts = cut(place, 0, len(flat), self._outlet.range_bytes)
        parts = [(place, first_element + start, flat[start : start + size]) for start, size in cuts]
        if not needs_buffers(flat):
            self._write_all(parts)
            return
        self._from_device = self._from_device or DeviceCopies(self._write_all)
        for part in parts:
            self._from_device.add(*part)

    def close(self) -> None:
        """Wait until all is written and reported to the outlet. Values may change then."""
        if self._from_device is not None:
            self._from_device.finish()
        if self._threads is not None:
            self._threads.shutdown()

    def finish(self) -> list[ElementRange]:
        """Save the checksums of this rank's ranges for `seal`. Returns the ranges."""
        self.close()
        entries = [list(entry) for entry in self.ranges]
        write_whole(_rank_file(self.path, self.rank), json.dumps(entries))
        return self.ranges

    @property
    def checksum(self) -> int:
        """Sum modulo 2^128 of the hashes of this rank's ranges: places and checksums."""
        texts = (f"{one.name} {one.first_element} {one.num_elements} {one.checksum}" for one in self.ranges)
        return sum(xxhash.xxh3_128_intdigest(text.encode()) for text in texts) % 2**128

    def _write_all(self, parts: Sequence[PlacedValues]) -> None:
        if self._threads is None or len(parts) == 1:
            self.ranges += [self._write(*part) for part in parts]
        else:
            self.ranges += self._threads.map(lambda part: self._write(*part), parts)

    def _write(self, place: TensorPlace, first_element: int, values: Tensor) -> ElementRange:
        """Cast, copy, sum. Called from any thread."""
        start = place.offset + first_element * place.element_bytes
        target = self._file.window(start, start + len(values) * place.element_bytes)
        checksum = copy_and_sum(values, target, place.dtype)
        entry = ElementRange(place.name, first_element, len(values), checksum, self.rank)
        if self._outlet.written is not None:
            self._outlet.written(entry)
        return entry


def seal(directory: str | Path, version: int, layout: Layout, num_ranks: int = 1) -> Publication:
    """Make the publication visible, on rank 0, once every rank has finished.

    Raises `WeightError` naming the rank that left no checksums, or the tensor whose elements are missing or
    written twice.
    """
    path = publication_directory(directory, version)
    ranges: list[ElementRange] = []
    for rank in range(num_ranks):
        try:
            ranges += [ElementRange(*entry) for entry in json.loads(_rank_file(path, rank).read_text())]
        except FileNotFoundError:
            raise WeightError(
                f"publication {path}: rank {rank} of {num_ranks} did not finish; call seal only after every rank's "
                "finish()."
            ) from None
    check_coverage(f"publication {path}", layout, ranges)
    publication = write_manifest(Manifest(path, version, layout, tuple(ranges)))
    for rank in range(num_ranks):
        _rank_file(path, rank).unlink(missing_ok=True)
    return publication


def needs_buffers(values: Tensor) -> bool:
    """Return whether values go to the file through page-locked buffers: those on a device."""
    return values.device.type != "cpu"


def copy_and_sum(values: Tensor, target: memoryview, dtype: str) -> str:
    """Write `values` (`[num_elements]`, any device and float dtype) as `dtype` into `target`; return the xxh3-128 of
    the bytes written, hexadecimal.
    """
    destination = torch.frombuffer(target, dtype=getattr(torch, dtype))
    if values.device.type != "cpu":  # one transfer: each of them costs a round trip
        destination.copy_(values)
        return xxhash.xxh3_128_hexdigest(target)
    digest = xxhash.xxh3_128()
    step = BLOCK_BYTES // destination.itemsize
    for start, source, block in zip(
        range(0, len(values), step), values.split(step), destination.split(step), strict=True
    ):
        _copy(source, block)
        digest.update(target[start * destination.itemsize : (start + step) * destination.itemsize])
    return digest.hexdigest()


def _rank_file(path: Path, rank: int) -> Path:
    return path / f"manifest.rank_{rank}.json"


def _check_elements(place: TensorPlace, first_element: int, shape: tuple[int, ...]) -> None:
    if len(shape) != 1 or first_element < 0 or first_element + shape[0] > place.num_elements:
        raise WeightError(
            f"tensor {place.name!r}: values of shape {list(shape)} from element {first_element} do not fit into "
            f"{list(place.shape)}, which has {place.num_elements} elements. Flatten a piece, and cut off its padding."
        )


def _copy(source: Tensor, block: Tensor) -> None:
    if source.dtype == block.dtype and source.is_contiguous():
        np.copyto(block.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
        return
    step = len(source) if torch.get_num_threads() == 1 else CAST_ELEMENTS
    for some, there in zip(source.split(step), block.split(step), strict=True):
        there.copy_(some)


@dataclass
class _Buffer:
    memory: Tensor
    parts: list[PlacedValues] = field(default_factory=list)
    num_bytes: int = 0
    filled: torch.Event | None = None
    """Event after the last copy into it; None where copies are done when they return."""


class DeviceCopies:
    """Lifecycle: `add` each range, then `finish`: `write` has been called with all of them by then, in their order, and
    what was added may change."""

    def __init__(self, write: Callable[[Sequence[PlacedValues]], None], num_bytes: int = BUFFER_BYTES) -> None:
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
            self._switch_buffers()
        buffer = self._filling
        target = buffer.memory[buffer.num_bytes : buffer.num_bytes + size].view(getattr(torch, place.dtype))
        target.copy_(values.detach().to(target.dtype), non_blocking=True)
        buffer.parts.append((place, first_element, target))
        buffer.num_bytes += size + -size % ALIGNMENT
        self._device = values.device

    def finish(self) -> None:
        """Write the remaining ranges. A second call changes nothing."""
        self._switch_buffers()
        self._flush(self._other)

    def _switch_buffers(self) -> None:
        """Begin to fill the other buffer, once it is written: the device fills this one meanwhile."""
        self._filling.filled = mark(self._device)
        self._flush(self._other)
        self._filling, self._other = self._other, self._filling

    def _flush(self, buffer: _Buffer) -> None:
        if not buffer.parts:
            return
        if buffer.filled is not None:
            buffer.filled.synchronize()
        self._write(buffer.parts)
        buffer.parts, buffer.num_bytes, buffer.filled = [], 0, None


def side_stream(device: torch.device) -> AbstractContextManager[object]:
    """A side stream of the device, which starts after the work submitted so far."""
    if device.type == "cpu":
        return nullcontext()
    stream = torch.Stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    return stream


def mark(device: torch.device) -> torch.Event | None:
    """An event after all work submitted to the device so far; None for the CPU, whose work is done."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()
