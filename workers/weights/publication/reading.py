"""The reading side of a publication: its manifest, its checksums, and its tensors as views of mapped memory.

A reader that finds anything wrong raises `WeightError` with file and tensor, before any weight of the engine has
changed.
"""

import fcntl
import json
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from penstock.conf.errors import WeightError
from penstock.workers.protocols import Publication
from penstock.workers.weights.publication.layout import ElementRange, Layout, byte_span, compute_layout
from penstock.workers.weights.publication.reused_files import MANIFEST_NAME, POPULATE_READ, WEIGHTS_NAME, populate

if TYPE_CHECKING:
    import torch

MOST_THREADS, THREAD_BYTES = 8, 2**28
"""Most threads that sum a publication, and fewest bytes for each."""


@dataclass(frozen=True)
class Manifest:
    """The description of a publication: version, layout, checksums."""

    directory: Path
    version: int
    layout: Layout
    ranges: tuple[ElementRange, ...]

    @property
    def file(self) -> Path:
        return self.directory / WEIGHTS_NAME

    def span(self, entry: ElementRange) -> tuple[int, int]:
        """First and last-plus-one byte of a range in the file."""
        return byte_span(self.layout, entry)


def manifest_to_json(manifest: Manifest) -> str:
    tensors = {place.name: {"dtype": place.dtype, "shape": place.shape} for place in manifest.layout.tensors}
    fields = {
        "version": manifest.version,
        "num_bytes": manifest.layout.num_bytes,
        "tensors": tensors,
        "ranges": [list(entry) for entry in manifest.ranges],
    }
    return json.dumps(fields)


def open_publication(publication: Publication) -> Manifest:
    """The manifest of a sealed publication, checked for version, size and header.

    Raises `WeightError` when it is missing (or not sealed yet), unreadable, truncated, or of another version. Tensor
    bytes are not read here: see `MappedWeights.verify`.
    """
    directory = Path(publication.directory)
    manifest = _read_manifest(directory)
    if manifest.version != publication.version:
        raise WeightError(
            f"{directory / MANIFEST_NAME}: holds version {manifest.version}, but version {publication.version} was "
            "asked for."
        )
    try:
        size = manifest.file.stat().st_size
        with manifest.file.open("rb") as file:
            header = file.read(len(manifest.layout.header))
    except FileNotFoundError:
        raise WeightError(f"{manifest.file}: missing, though its manifest is there. Publish again.") from None
    if size != manifest.layout.num_bytes:
        raise WeightError(
            f"{manifest.file}: {size:,} bytes instead of {manifest.layout.num_bytes:,}: truncated. Publish again."
        )
    if header != manifest.layout.header:
        raise WeightError(f"{manifest.file}: its header does not match the manifest: damaged. Publish again.")
    return manifest


def _read_manifest(directory: Path) -> Manifest:
    path = directory / MANIFEST_NAME
    try:
        fields = json.loads(path.read_text())
        layout = compute_layout((name, entry["shape"], entry["dtype"]) for name, entry in fields["tensors"].items())
        ranges = tuple(ElementRange(*entry) for entry in fields["ranges"])
        return Manifest(directory, int(fields["version"]), layout, ranges)
    except FileNotFoundError:
        raise WeightError(
            f"{path}: no such publication, or one that was never completed. Its trainer died, or it was reclaimed."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{path}: unreadable manifest ({type(error).__name__}: {error}). Publish again.") from None


class MappedWeights:
    """The file of a publication mapped into memory: tensors are views, nothing is copied until the caller does.

    Mapping and lock end when this object and the last tensor taken from it are gone. Until then no writer takes the
    file for another version. Writing into the views changes this process's copy only.

        mapped = MappedWeights(publication)
        mapped.verify()
        model.load_state_dict(dict(mapped.tensors()))
    """

    def __init__(self, publication: Publication) -> None:
        """Map the file and lock it. Raises `WeightError` as `open_publication` does, and when the publication is
        reclaimed meanwhile."""
        manifest = self.manifest = open_publication(publication)
        try:
            with manifest.file.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self.inode = os.fstat(file.fileno()).st_ino
                # A writer may have taken the file before the lock: it removes the manifest first.
                if _read_manifest(manifest.directory) != manifest or manifest.file.stat().st_ino != self.inode:
                    raise _reclaimed(manifest)
                # The mapping has a descriptor of its own for the same open file, and so keeps the lock.
                self._memory = mmap.mmap(file.fileno(), manifest.layout.num_bytes, access=mmap.ACCESS_COPY)
        except (FileNotFoundError, BlockingIOError):
            raise _reclaimed(manifest) from None

    def populate(self) -> None:
        """Fill the page tables, so that loading meets no page fault: most of a first read's time."""
        populate(self._memory, 0, len(self._memory), POPULATE_READ)

    def verify(self) -> None:
        """Compare every range's checksum, by several threads where there is much. Raises `WeightError` with the tensor
        and elements of the first that differs. The first read of a page fills the page tables around it, in any thread
        at once, which `populate` cannot."""
        view = memoryview(self._memory)

        def checksum(entry: ElementRange) -> str:
            start, end = self.manifest.span(entry)
            return xxhash.xxh3_128_hexdigest(view[start:end])

        with ThreadPoolExecutor(num_checking_threads(len(view))) as threads:
            ranges = self.manifest.ranges
            for entry, found in zip(ranges, threads.map(checksum, ranges), strict=True):
                if found != entry.checksum:
                    threads.shutdown(cancel_futures=True)
                    raise _damaged(self.manifest, entry, found)

    def tensor(self, name: str) -> "torch.Tensor":
        """A view of shape and dtype as published, on the CPU. Raises `WeightError` for an unknown name."""
        import torch

        place = self.manifest.layout.place(name)
        dtype = getattr(torch, place.dtype)
        if place.num_bytes == 0:
            return torch.empty(place.shape, dtype=dtype)
        count = place.num_bytes // dtype.itemsize
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=place.offset).reshape(place.shape)

    def copy_to(self, file: Path) -> None:
        """Write the whole safetensors file, for a reader that wants one of its own."""
        file.write_bytes(self._memory)

    def tensors(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """All tensors, layer by layer (by name): engines that repack a layer at a time then hold one layer at a
        time."""
        for name in sorted(self.manifest.layout.by_name):
            yield name, self.tensor(name)


def num_checking_threads(num_bytes: int) -> int:
    """Number of threads that sum a publication."""
    return max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)), num_bytes // THREAD_BYTES))


def _damaged(manifest: Manifest, entry: ElementRange, found: str) -> WeightError:
    last = entry.first_element + entry.num_elements - 1
    return WeightError(
        f"{manifest.file}: tensor {entry.name!r}, elements {entry.first_element} to {last} (written by rank "
        f"{entry.rank}): checksum {found}, manifest says {entry.checksum}. Damaged after it was written; publish again."
    )


def _reclaimed(manifest: Manifest) -> WeightError:
    return WeightError(
        f"{manifest.directory}: version {manifest.version} was reclaimed before it could be mapped; its file holds, or "
        "will hold, another version. Load the newest publication."
    )
