"""The file of one version on one node, which ranks or the relay write. It is locked like one that is read, for as long
as the relay has it: no writer takes it meanwhile for another version (`publication/reused_files.py`)."""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from penstock.conf.errors import WeightError
from penstock.workers.machine.local_files import write_whole
from penstock.workers.protocols import Publication
from penstock.workers.weights.chain.plan import ChunkPlan
from penstock.workers.weights.publication.layout import ElementRange
from penstock.workers.weights.publication.reading import Manifest, manifest_to_json
from penstock.workers.weights.publication.reused_files import (
    MANIFEST_NAME,
    WritableMappings,
    prepare_slot,
    publication_directory,
)


class Slot:
    """The file of one version on one node. Lifecycle: made when the version begins; `target` and `seal` where the node
    receives; `close`."""

    def __init__(
        self,
        root: Path,
        version: int,
        plan: ChunkPlan,
        spans: Sequence[tuple[int, int]] | None,
        mappings: WritableMappings,
    ) -> None:
        """`spans`: byte ranges that are written on this node; None: all of it. Raises `WeightError` if there is no
        room."""
        self._plan, self._version = plan, version
        self.path = publication_directory(root, version)
        mappings.let_go(root)
        file = prepare_slot(root, version, plan.layout.num_bytes, spans)
        self.file: BinaryIO = file.open("rb")
        fcntl.flock(self.file, fcntl.LOCK_SH)
        if os.fstat(self.file.fileno()).st_ino != file.stat().st_ino:
            self.file.close()
            raise WeightError(f"{file}: taken for another version meanwhile. Publish again.")
        self._mapped = mappings.map(file, root)

    def target(self, chunk: int) -> memoryview:
        """The memory where a chunk's bytes belong."""
        start, end = self._plan.spans[chunk]
        return self._mapped.window(start, end)

    def memory(self, chunk: int) -> memoryview:
        """The bytes of a chunk that is there."""
        start, end = self._plan.spans[chunk]
        return memoryview(self._mapped.memory)[start:end]

    def bytes_of(self, chunks: Sequence[int]) -> bytes:
        """Bytes of a few small chunks, one behind the other."""
        return b"".join(self._mapped.memory[start:end] for start, end in (self._plan.spans[chunk] for chunk in chunks))

    def seal(self, digests: dict[int, bytes]) -> Publication:
        """Write header and manifest, once all chunks are here: the engines of this node then see the version."""
        layout = self._plan.layout
        self._mapped.memory[: len(layout.header)] = layout.header
        ranges = (
            ElementRange(chunk.name, chunk.first_element, chunk.num_elements, digests[number].hex(), chunk.rank)
            for number, chunk in enumerate(self._plan.chunks)
        )
        manifest = Manifest(self.path, self._version, layout, tuple(ranges))
        write_whole(self.path / MANIFEST_NAME, manifest_to_json(manifest))
        return Publication(str(self.path), self._version, layout.num_bytes)

    def close(self) -> None:
        """Unlock the file: another version may be written into it."""
        self.file.close()
