"""A version on one node, from its beginning until a newer one begins: which chunks are here, their bytes, and its
outcome.

    ranks of this node ─▶ relay.Reporter ──────┐
                                               ├─ add ─▶ Transfer ─▶ subscription.ChunkServer ─▶ other nodes
    other nodes ─▶ subscription.Puller ────────┘            └─ all of it, where it is received ─▶ manifest

Threads share it; `condition` is notified of every change. The bytes are in a `VersionFile`.

A node keeps the version before as the base of differences (`difference.py`):

    node X    v11 in one file, v12 being written into the other: 2% of its words differ
    node a    v11, sealed
    X ─ the difference of chunk 7 to v11, digest of chunk 7 in v12 ─▶ a, which checks what it makes of it, and sends on
                                                                      the same bytes to a node that has v11 too

A base need not be trusted: nodes name it by the digests of its chunks, and a chunk that is made of a difference must
have the digest that the rank reported.
"""

import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import xxhash

from penstock.conf.errors import DeadlineExceeded, WeightError
from penstock.network.connection import Connection
from penstock.workers.protocols import Publication
from penstock.workers.weights.chain.difference import difference
from penstock.workers.weights.chain.plan import Broadcast, ChunkPlan, Lane, Pull
from penstock.workers.weights.publication.layout import ElementRange
from penstock.workers.weights.publication.publication_files import (
    Manifest,
    WritableMappings,
    prepare_file,
    publication_directory,
    write_manifest,
)

LEAVING_S = 5.0
"""Seconds for which `abandon` waits until no connection uses the file."""
COUNTERS = ("versions", "chunks", "bytes_in", "bytes_out", "bytes_whole", "differences", "damaged", "reparented")
"""Names of counters: versions that have begun; chunks and bytes that came from other nodes or went there; bytes of the
chunks that came, and how many of these came as differences to the version before; chunks that came damaged; upstreams
that were given up."""
WORTH = 0.5
"""Largest share of a chunk's bytes that a difference may have."""
UNKNOWN_S = 8e-9
"""Seconds that a byte takes on a link which has not been timed: 1 Gbit/s."""


class VersionFile:
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
        mappings.unmap_stale(root)
        file = prepare_file(root, version, plan.layout.num_bytes, spans)
        self.opened: BinaryIO = file.open("rb")
        fcntl.flock(self.opened, fcntl.LOCK_SH)
        if os.fstat(self.opened.fileno()).st_ino != file.stat().st_ino:
            self.opened.close()
            raise WeightError(f"{file}: taken for another version meanwhile. Publish again.")
        self._mapped = mappings.map(file, root)

    def target(self, chunk: int) -> memoryview:
        """The memory where a chunk's bytes belong."""
        start, end = self._plan.spans[chunk]
        return self._mapped.window(start, end)

    def memory(self, chunk: int) -> memoryview:
        """The bytes of a chunk that this node has."""
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
        return write_manifest(Manifest(self.path, self._version, layout, tuple(ranges)))

    def close(self) -> None:
        """Unlock the file: another version may be written into it."""
        self.opened.close()


class PreviousVersion:
    """The chunks of the version before. Lifecycle: made when the next version begins, from the file, which stays
    locked; `close`."""

    def __init__(self, file: VersionFile, plan: ChunkPlan, digests: Mapping[int, bytes]) -> None:
        """`digests`: of the chunks that this node has."""
        self._file, self.plan, self._digests = file, plan, dict(digests)

    def name(self, source: str) -> bytes:
        """The name of the chunks of a chain: the same on all nodes with the same bytes. Empty: some are missing."""
        digests = [self._digests.get(chunk, b"") for chunk in self.plan.chunks_from_node(source)]
        return xxhash.xxh3_128_digest(b"".join(digests)) if all(digests) else b""

    def bytes_of(self, chunk: int) -> memoryview:
        return self._file.memory(chunk)

    def close(self) -> None:
        self._file.close()


class Differences:
    """Differences of the chunks of one version to its base, each made once, on request. Threads share it."""

    def __init__(self, base: PreviousVersion | None) -> None:
        """`base`: None where the node has no version before; it then sends whole chunks."""
        self.base = base
        self._made: dict[int, bytes | None] = {}
        self._lock = threading.Lock()
        self._pays = True
        """False once a difference has taken longer to make and send than its chunk to send."""

    def name(self, source: str) -> bytes:
        """The name of the base's chunks of a chain; empty: there is none."""
        return b"" if self.base is None else self.base.name(source)

    def of(self, chunk: int, new: memoryview, seconds_per_byte: float) -> bytes | None:
        """The difference of a chunk; None: send it whole. `seconds_per_byte`: of the link; 0: not known."""
        assert self.base is not None
        with self._lock:
            if chunk in self._made or not self._pays:
                return self._made.get(chunk)
        began = time.thread_time()  # not the clock: other work on this core says nothing of the next chunk
        made = difference(self.base.bytes_of(chunk), new)
        seconds = time.thread_time() - began
        if made is not None and len(made) > WORTH * len(new):
            made = None
        saved_s = (len(new) - len(made or new)) * (seconds_per_byte or UNKNOWN_S)
        with self._lock:
            self._made[chunk] = made
            self._pays = saved_s > seconds
        return made

    def keep(self, chunk: int, made: bytes) -> None:
        """Keep a difference that came from another node, for the nodes that ask this one."""
        with self._lock:
            self._made[chunk] = made

    def close(self) -> None:
        with self._lock:
            self._made.clear()
            self._pays = False
        if self.base is not None:
            self.base.close()


class Counters:
    """Counters of a relay's work since it began, shared by all of its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def read(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class TransferOver(Exception):
    """The transfer is abandoned, for a newer version or for good: every thread that works on it stops."""


class Transfer:
    """Lifecycle: `add` chunks until `publication` is there, or `fail`; then, or before, `abandon`."""

    def __init__(
        self,
        broadcast: Broadcast,
        plan: ChunkPlan,
        node: str,
        file: VersionFile,
        pulls: dict[Lane, Pull],
        base: PreviousVersion | None = None,
    ) -> None:
        """`pulls`: one for each lane that this node receives. Empty: the node only sends. `base`: the version before,
        if this node has it."""
        self.differences = Differences(base)
        self.broadcast, self.plan, self.node, self.file, self.pulls = broadcast, plan, node, file, pulls
        self.condition = threading.Condition()
        self.receives = node in broadcast.receivers
        self.digests: dict[int, bytes] = {}
        """Digests of the chunks that are here."""
        sent = {lane.source for lane in pulls} | ({node} & set(plan.sources))
        self.logs: dict[str, list[int]] = {source: [] for source in sent}
        """Chunks in the order in which they came, for each chain that this node sends."""
        self.publication: Publication | None = None
        self.failure: str | None = None
        self.is_abandoned = False
        self._began = time.monotonic()
        self.seconds = 0.0
        """Seconds until the version was whole."""
        self._connections: set[Connection] = set()
        self._is_sealing = False

    @property
    def is_over(self) -> bool:
        """True once nothing more is to be fetched or sent."""
        return self.is_abandoned or self.failure is not None

    def add(self, source: str, chunks: Sequence[tuple[int, bytes]]) -> None:
        """Add chunks whose bytes are in the file, with their digests. The thread that brings the last one seals the
        version. Raises `TransferOver`."""
        with self.condition:
            if self.is_over:
                raise TransferOver
            new = [(chunk, digest) for chunk, digest in chunks if chunk not in self.digests]
            self.digests.update(new)
            self.logs[source] += [chunk for chunk, _ in new]
            is_whole = bool(new) and self.receives and len(self.digests) == len(self.plan.chunks)
            self._is_sealing = self._is_sealing or is_whole
            self.condition.notify_all()
        if is_whole:
            self._seal()

    def fail(self, reason: str) -> None:
        with self.condition:
            if self.publication is None and not self.is_over:
                self.failure = reason
            self.condition.notify_all()

    def abandon(self) -> PreviousVersion:
        """End all work on it for good. Returns when no connection uses the file any more: the base of the next version,
        to be closed."""
        with self.condition:
            self.is_abandoned = True
            for connection in self._connections:
                connection.hang_up()
            self.condition.notify_all()
            self.condition.wait_for(lambda: not self._connections and not self._is_sealing, LEAVING_S)
        self.differences.close()
        return PreviousVersion(self.file, self.plan, self.digests if not self._connections else {})

    @contextmanager
    def using(self, connection: Connection) -> Iterator[Connection]:
        """Let `abandon` end the connection within the block. Raises `TransferOver`."""
        with self.condition:
            if self.is_over:
                raise TransferOver
            self._connections.add(connection)
        try:
            yield connection
        finally:
            with self.condition:
                self._connections.discard(connection)
                self.condition.notify_all()

    def source_age_s(self, source: str) -> float:
        """Seconds since the last sign of the node where a chain begins; 0 on that node."""
        now = time.monotonic()
        return min((pull.source_age_s(now) for lane, pull in self.pulls.items() if lane.source == source), default=0.0)

    def wait(self, timeout_s: float) -> Publication:
        """Wait for the publication. Raises `WeightError`, `DeadlineExceeded`."""
        version = self.broadcast.version
        with self.condition:
            self.condition.wait_for(lambda: self.publication is not None or self.is_over, timeout_s)
            if self.publication is not None:
                return self.publication
            if self.failure is not None:
                raise WeightError(f"version {version} on node {self.node}: {self.failure}. Publish again.")
            if self.is_abandoned:
                raise WeightError(f"version {version} on node {self.node}: given up for a newer one.")
            raise DeadlineExceeded(
                f"version {version} on node {self.node}: not complete after {timeout_s:.0f} s: "
                f"{self._missing_text()}. weights.phase_timeout_s sets how long it may take."
            )

    def _missing_text(self) -> str:
        own = [chunk for chunk in self.plan.chunks_from_node(self.node) if chunk not in self.digests]
        parts = [f"{len(own)} chunks of ranks of this node"] if own else []
        parts += [
            f"{len(pull.missing)} chunks from {source}, last asked of {pull.upstream} ({pull.reparented} times another)"
            for (source, _), pull in self.pulls.items()
            if pull.missing
        ]
        return ", ".join(parts)

    def _seal(self) -> None:
        publication = None
        try:
            publication = self.file.seal(self.digests)
        except OSError as error:
            self.fail(f"its manifest cannot be written: {error}")
        with self.condition:
            self._is_sealing = False
            if not self.is_over:
                self.publication = publication
                self.seconds = time.monotonic() - self._began
            self.condition.notify_all()
