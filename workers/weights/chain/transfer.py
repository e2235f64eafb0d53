"""A version on one node, from its beginning until a newer one begins: which chunks are here, and its outcome.

    ranks of this node ─▶ reports.py ─┐
                                      ├─ add ─▶ Transfer ─▶ subscription.py ─▶ other nodes
    other nodes ─▶ puller.py ─────────┘            └─ all of it, where it is received ─▶ manifest

Threads share it; `condition` is notified of every change. The bytes are in a `Slot`.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.conf.errors import DeadlineExceeded, WeightError
from penstock.network.connection import Connection
from penstock.workers.protocols import Publication
from penstock.workers.weights.chain.base import Base, Differences
from penstock.workers.weights.chain.plan import Broadcast, ChunkPlan, Lane
from penstock.workers.weights.chain.pull import Pull
from penstock.workers.weights.chain.slot import Slot

LEAVING_S = 5.0
"""Seconds for which `give_up` waits until no connection uses the file."""
COUNTERS = ("versions", "chunks", "bytes_in", "bytes_out", "bytes_whole", "differences", "damaged", "reparented")
"""Names of counters: versions that have begun; chunks and bytes that came from other nodes or went there; bytes of the
chunks that came, and how many of these came as differences to the version before; chunks that came damaged; upstreams
that were given up."""


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
    """The transfer is given up, for a newer version or for good: every thread that works on it stops."""


class Transfer:
    """Lifecycle: `add` chunks until `publication` is there, or `fail`; then, or before, `give_up`."""

    def __init__(
        self,
        broadcast: Broadcast,
        plan: ChunkPlan,
        node: str,
        slot: Slot,
        pulls: dict[Lane, Pull],
        base: Base | None = None,
    ) -> None:
        """`pulls`: one for each lane that this node receives. Empty: the node only sends. `base`: the version before,
        where it is here."""
        self.differences = Differences(base)
        self.broadcast, self.plan, self.node, self.slot, self.pulls = broadcast, plan, node, slot, pulls
        self.condition = threading.Condition()
        self.receives = node in broadcast.receivers
        self.digests: dict[int, bytes] = {}
        """Digests of the chunks that are here."""
        sent = {lane.source for lane in pulls} | ({node} & set(plan.sources))
        self.logs: dict[str, list[int]] = {source: [] for source in sent}
        """Chunks in the order in which they came, for each chain that this node sends."""
        self.publication: Publication | None = None
        self.failure: str | None = None
        self.is_given_up = False
        self._began = time.monotonic()
        self.seconds = 0.0
        """Seconds until the version was whole."""
        self._connections: set[Connection] = set()
        self._is_sealing = False

    @property
    def is_over(self) -> bool:
        """True once nothing more is to be fetched or sent."""
        return self.is_given_up or self.failure is not None

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

    def written(self, chunks: Sequence[tuple[int, bytes]]) -> None:
        """Add chunks that ranks of this node have written."""
        self.add(self.node, chunks)

    def rank_left(self, rank: int) -> None:
        """Fail the transfer, because a rank left before it had written its part."""
        self.fail(f"rank {rank} has left before it had written its part")

    def fail(self, reason: str) -> None:
        with self.condition:
            if self.publication is None and not self.is_over:
                self.failure = reason
            self.condition.notify_all()

    def give_up(self) -> Base:
        """End everything that goes on, for good. Returns when no connection uses the file any more: as the base of the
        next version, to be closed."""
        with self.condition:
            self.is_given_up = True
            for connection in self._connections:
                connection.hang_up()
            self.condition.notify_all()
            self.condition.wait_for(lambda: not self._connections and not self._is_sealing, LEAVING_S)
        self.differences.close()
        return Base(self.slot, self.plan, self.digests if not self._connections else {})

    @contextmanager
    def using(self, connection: Connection) -> Iterator[Connection]:
        """Let `give_up` end the connection within the block. Raises `TransferOver`."""
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
        """Seconds since the node where a chain begins was heard of; 0 on that node."""
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
            if self.is_given_up:
                raise WeightError(f"version {version} on node {self.node}: given up for a newer one.")
            raise DeadlineExceeded(
                f"version {version} on node {self.node}: not complete after {timeout_s:.0f} s: "
                f"{self._what_is_missing()}. weights.phase_timeout_s sets how long it may take."
            )

    def _what_is_missing(self) -> str:
        own = [chunk for chunk in self.plan.of_node(self.node) if chunk not in self.digests]
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
            publication = self.slot.seal(self.digests)
        except OSError as error:
            self.fail(f"its manifest cannot be written: {error}")
        with self.condition:
            self._is_sealing = False
            if not self.is_over:
                self.publication = publication
                self.seconds = time.monotonic() - self._began
            self.condition.notify_all()
