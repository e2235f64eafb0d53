"""A publication: one version of the weights in node-local shared memory, written by all trainer ranks at once.

    <root>/v00000012/model.safetensors   valid safetensors, HF names; each rank writes its pieces into their place
    <root>/v00000012/manifest.json       written last, by rename: without it there is no publication

    rank 0..R-1 (trainer/publishing.py)                        engines (rollout/engine_*.py)
      writer = PublicationWriter(root, 12, layout, rank, R)      manifest = open_publication(publication)
      writer.write_elements(name, first, values)  ...            mapped = MappedWeights(manifest); mapped.verify()
      writer.finish()                                            for name, tensor in mapped.tensors(): ...
      barrier; rank 0: seal(root, 12, layout, R)

Bytes are cast and copied straight into a mapping of the file, whose pages are warm and known to be there
(`reused_files.py`): one copy, summed while it is in the cache, and several ranks do not wait for each other. Several
threads copy at once, without torch's own, which would synchronize after every block and, on cores that others use as
well, wait for each other longer than they copy. What lies on a device comes by `device_copies.py`. Reading is in
`reading.py`.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from penstock.conf.errors import WeightError
from penstock.workers.machine.local_files import write_whole
from penstock.workers.protocols import Publication
from penstock.workers.weights.publication.device_copies import DeviceCopies, Part
from penstock.workers.weights.publication.layout import (
    NO_OUTLET,
    ElementRange,
    Layout,
    Outlet,
    TensorPlace,
    check_coverage,
    cut,
)
from penstock.workers.weights.publication.reading import Manifest, manifest_to_json
from penstock.workers.weights.publication.reused_files import (
    MANIFEST_NAME,
    WritableMappings,
    prepare_slot,
    publication_directory,
)

BLOCK_BYTES = 2**19
"""Bytes that are copied, then summed: the bytes read and written fit into the cache of a core, also at four bytes to
two."""
CAST_ELEMENTS = 2**15
"""Largest number of elements that torch casts without its threads, where it has several."""
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
        _mappings.let_go(Path(directory))
        self._outlet = outlet
        file = prepare_slot(directory, version, layout.num_bytes, outlet.spans)
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
        """Wait until all is written, and the outlet has been told of all of it. Values may change then."""
        if self._from_device is not None:
            self._from_device.finish()
        if self._threads is not None:
            self._threads.shutdown()

    def finish(self) -> list[ElementRange]:
        """Leave the checksums of what this rank wrote for `seal`. Returns them."""
        self.close()
        entries = [list(entry) for entry in self.ranges]
        write_whole(_rank_file(self.path, self.rank), json.dumps(entries))
        return self.ranges

    def _write_all(self, parts: Sequence[Part]) -> None:
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
    write_whole(path / MANIFEST_NAME, manifest_to_json(Manifest(path, version, layout, tuple(ranges))))
    for rank in range(num_ranks):
        _rank_file(path, rank).unlink(missing_ok=True)
    return Publication(str(path), version, layout.num_bytes)


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
