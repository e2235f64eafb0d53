"""Whole publications, written in one process."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.workers.protocols import Publication
from penstock.workers.weights.publication.layout import compute_layout
from penstock.workers.weights.publication.publication import PublicationWriter, seal
from penstock.workers.weights.publication.publication_files import WEIGHTS_NAME, is_sealed, publication_directories


def write_rows(writer: PublicationWriter, name: str, first_row: int, tensor: Tensor) -> None:
    """Write rows of a tensor. `tensor`: the full tensor's shape but for dim 0; a scalar is one row."""
    writer.write_elements(name, first_row * math.prod(writer.layout.place(name).shape[1:]), tensor.reshape(-1))


def write_publication(
    directory: str | Path, version: int, tensors: Iterable[tuple[str, Tensor]], dtype: str | None = None
) -> Publication:
    """Write a publication of `(name, tensor)` pairs, cast to `dtype` (default: each its own)."""
    pairs = list(tensors)
    layout = compute_layout(
        (name, tensor.shape, dtype or str(tensor.dtype).removeprefix("torch.")) for name, tensor in pairs
    )
    writer = PublicationWriter(directory, version, layout)
    for name, tensor in pairs:
        write_rows(writer, name, 0, tensor.detach())
    writer.finish()
    return seal(directory, version, layout)


class SharedMemoryTransport:
    """Publications of one process with the calls of a `StreamTransport`, where the two are compared."""

    def __init__(self, root: Path, tensors: Callable[[], Iterable[tuple[str, Tensor]]], dtype: str) -> None:
        self._root, self._tensors, self._dtype = root, tensors, dtype

    def connect(self, engines: Any, address: str) -> None: ...

    def prepare(self, version: int) -> Publication:
        return write_publication(self._root, version, self._tensors(), self._dtype)

    def send(self, version: int) -> None: ...

    def close(self) -> None: ...


def newest_publication(directory: str | Path) -> Publication | None:
    """The sealed publication of the highest version; None when there is none."""
    for path in reversed(publication_directories(directory)):
        if is_sealed(path):
            return Publication(str(path), int(path.name[1:]), (path / WEIGHTS_NAME).stat().st_size)
    return None
