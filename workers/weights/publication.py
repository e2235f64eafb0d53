"""A publication: one version of the weights in node-local shared memory, written by all trainer ranks at once.

    <root>/v00000012/model.safetensors   valid safetensors, HF names; each rank writes its pieces into their place
    <root>/v00000012/manifest.json       written last, by rename: without it there is no publication

    rank 0..R-1 (trainer/publish)                              engines (rollout/engine_*.py)
      writer = PublicationWriter(root, 12, layout, rank, R)      manifest = open_publication(publication)
      writer.write_rows(name, first_row, shard)  ...             mapped = MappedWeights(manifest); mapped.verify()
      writer.finish()                                            for name, tensor in mapped.tensors(): ...
      barrier; rank 0: seal(root, 12, layout, R)

Bytes go through `pwrite`, not a mapping: it is faster on tmpfs (no page fault a page) and a full tmpfs is an error that
can be reported instead of a SIGBUS. Reading is in `reading.py`.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from penstock.conf.errors import WeightError
from penstock.workers.protocols import Publication
from penstock.workers.weights.layout import Layout, TensorPlace, compute_layout
from penstock.workers.weights.reading import (
    MANIFEST_NAME,
    WEIGHTS_NAME,
    Manifest,
    ElementRange,
    manifest_to_json,
    open_publication,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "PublicationWriter",
    "newest_publication",
    "open_publication",
    "publication_directory",
    "reclaim",
    "seal",
    "write_publication",
]

CHUNK_BYTES = 64 * 2**20
"""Cast and written at a time: bounds the temporary copy of a large tensor."""


def publication_directory(root: str | Path, version: int) -> Path:
    return Path(root) / f"v{version:08d}"


class PublicationWriter:
    """One rank's pen. Writes pieces of tensors into their places; any rank may write any piece, each element once.

    Opening it takes back an earlier publication of the same version (a repeated step), since its bytes are about to
    change. Raises `WeightError` when the directory's file system cannot hold the layout.
    """

    def __init__(self, directory: str | Path, version: int, layout: Layout, rank: int = 0, num_ranks: int = 1) -> None:
        """`directory`: the root; the publication becomes `<directory>/v<version>`."""
        self.layout = layout
        self.rank = rank
        self.num_ranks = num_ranks
        self.ranges: list[ElementRange] = []
        self.path = publication_directory(directory, version)
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / MANIFEST_NAME).unlink(missing_ok=True)
        _rank_file(self.path, rank).unlink(missing_ok=True)
        _check_space(self.path, layout)
        self._file = os.open(self.path / WEIGHTS_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, layout.num_bytes)
        if rank == 0:
            self._write(layout.header, 0)

    def write_rows(self, name: str, first_row: int, tensor: "torch.Tensor") -> None:
        """Rows `[first_row, first_row + tensor.shape[0])` of tensor `name`: `write_elements` for a shard of dim 0.

        `tensor`: the full tensor's shape but for dim 0; a scalar is one row. Raises `WeightError` as `write_elements`
        does, and for a wrong shape.
        """
        place = self.layout.place(name)
        if place.shape and tuple(tensor.shape[1:]) != place.shape[1:]:
            raise WeightError(
                f"tensor {name!r}: rows of shape {list(tensor.shape)} do not fit into {list(place.shape)}. A shard is "
                "a range of dim 0 of the full tensor; write_elements takes other pieces."
            )
        self.write_elements(name, first_row * place.row_elements, tensor.detach().reshape(-1))

    def write_elements(self, name: str, first_element: int, values: "torch.Tensor") -> None:
        """Elements `[first_element, first_element + len(values))` of the flattened tensor `name`, cast to the layout's
        dtype.

        `values`: `[num_elements]`, any device and float dtype, without padding. None of them (an empty shard): nothing
        happens. Raises `WeightError` for a wrong name or range, and when the file system is full.
        """
        place = self.layout.place(name)
        _check_elements(place, first_element, tuple(values.shape))
        if values.shape[0] == 0:
            return
        digest = xxhash.xxh3_64()
        offset = place.offset + first_element * place.element_bytes
        for chunk in values.detach().split(max(1, CHUNK_BYTES // place.element_bytes)):
            data = _as_bytes(chunk, place.dtype)
            digest.update(data)
            self._write(data, offset)
            offset += len(data)
        self.ranges.append(ElementRange(name, first_element, values.shape[0], digest.hexdigest(), self.rank))

    def finish(self) -> list[ElementRange]:
        """Close the file and leave the checksums of what this rank wrote for `seal`. Returns them."""
        os.close(self._file)
        self._file = -1
        entries = [list(entry) for entry in self.ranges]
        _write_atomically(_rank_file(self.path, self.rank), json.dumps(entries))
        return self.ranges

    def _write(self, data: "bytes | memoryview", offset: int) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._file, view, offset)
                view = view[written:]
                offset += written
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise _no_space(self.path, self.layout) from None


def seal(directory: str | Path, version: int, layout: Layout, num_ranks: int = 1) -> Publication:
    """Make the publication visible. Called by rank 0 once every rank has finished.

    Raises `WeightError` naming the rank that left no checksums, or the tensor whose elements are missing or written twice.
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
    _check_coverage(path, layout, ranges)
    _write_atomically(path / MANIFEST_NAME, manifest_to_json(Manifest(path, version, layout, tuple(ranges))))
    for rank in range(num_ranks):
        _rank_file(path, rank).unlink(missing_ok=True)
    return Publication(str(path), version, layout.num_bytes)


def write_publication(
    directory: str | Path, version: int, tensors: Iterable[tuple[str, "torch.Tensor"]], dtype: str | None = None
) -> Publication:
    """All of it by one process: `(name, tensor)` pairs, cast to `dtype` (default: each its own)."""
    pairs = list(tensors)
    layout = compute_layout(
        (name, tensor.shape, dtype or str(tensor.dtype).removeprefix("torch.")) for name, tensor in pairs
    )
    writer = PublicationWriter(directory, version, layout)
    for name, tensor in pairs:
        writer.write_rows(name, 0, tensor)
    writer.finish()
    return seal(directory, version, layout)


def newest_publication(directory: str | Path) -> Publication | None:
    """The sealed publication of the highest version, for an engine that has just started; None when there is none."""
    for path in sorted(Path(directory).glob("v[0-9]*"), reverse=True):
        if (path / MANIFEST_NAME).exists():
            return Publication(str(path), int(path.name[1:]), (path / WEIGHTS_NAME).stat().st_size)
    return None


def reclaim(directory: str | Path, keep: int = 2) -> list[str]:
    """Remove all but the newest `keep` publications; engines that still map one keep its memory until they let go.

    Returns the directories removed.
    """
    paths = sorted(Path(directory).glob("v[0-9]*"))
    stale = paths[: max(0, len(paths) - keep)]
    for path in stale:
        (path / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    return [str(path) for path in stale]


def _rank_file(path: Path, rank: int) -> Path:
    return path / f"manifest.rank_{rank}.json"


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _as_bytes(tensor: "torch.Tensor", dtype: str) -> memoryview:
    import torch

    data = tensor.to(device="cpu", dtype=getattr(torch, dtype)).contiguous()
    return data.reshape(-1).view(torch.uint8).numpy().data


def _check_elements(place: TensorPlace, first_element: int, shape: tuple[int, ...]) -> None:
    if len(shape) != 1 or first_element < 0 or first_element + shape[0] > place.num_elements:
        raise WeightError(
            f"tensor {place.name!r}: values of shape {list(shape)} from element {first_element} do not fit into "
            f"{list(place.shape)}, which has {place.num_elements} elements. Flatten a piece, and cut off its padding."
        )


def _check_coverage(path: Path, layout: Layout, ranges: list[ElementRange]) -> None:
    """Every element of every tensor is written exactly once."""
    written: dict[str, list[ElementRange]] = {}
    for entry in ranges:
        written.setdefault(entry.name, []).append(entry)
    for place in layout.tensors:
        parts = sorted(written.get(place.name, []), key=lambda part: part.first_element)
        covered = 0
        for entry in parts:
            if entry.first_element != covered:
                break
            covered += entry.num_elements
        total = sum(entry.num_elements for entry in parts)
        if (covered, total) != (place.num_elements, place.num_elements):
            raise WeightError(
                f"publication {path}: tensor {place.name!r} has {place.num_elements} elements, {total} were written, "
                f"in order up to element {covered}. Every element must be written by exactly one rank."
            )


def _check_space(path: Path, layout: Layout) -> None:
    existing = path / WEIGHTS_NAME
    present = existing.stat().st_blocks * 512 if existing.exists() else 0
    if shutil.disk_usage(path).free + present < layout.num_bytes:
        raise _no_space(path, layout)


def _no_space(path: Path, layout: Layout) -> WeightError:
    usage = shutil.disk_usage(path)
    return WeightError(
        f"no room for a publication in {path}: {layout.num_bytes:,} bytes are needed, {usage.free:,} of "
        f"{usage.total:,} are free. Two publications must fit side by side: enlarge shared memory (docker: --shm-size; "
        "else: mount -o remount,size=… /dev/shm)."
    )
