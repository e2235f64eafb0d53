"""A node's relay: it receives new weights chunk by chunk, and forwards them to the next node meanwhile.

                    ranks of this node
                          │ reports, bytes in shared memory
    upstream relays ─▶ Relay ─▶ downstream relays
                          └─▶ <root>/v00000012/, which the engines of this node load

Every node that has trainer ranks or engines has one, in its agent's process (`workers/node/node_agent.py`). A version
is begun on all of them, then the ranks write it; each relay computes the route itself (`plan.py`). What lies in shared
memory afterwards is what ranks of one node alone would have written there.

Ranks report the chunks that they have written, while they write, over a Unix socket in the root:

    rank ─ hello: magic, version, rank ─ (chunk, digest)* ─ finished ─▶ relay

A connection is one rank's writing of one version, so that the relay notices a rank that dies within it: the connection
ends before `finished`. Nothing is answered. `Reporter` is the rank's side, `ReportServer` the
relay's.

Plain Python, without Ray. The agent's listener calls `serve`; the orchestrator's weight sync the rest.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

from penstock.conf.errors import NotStarted, WeightError
from penstock.network.connection import (
    Connection,
    bind_path,
    connect_path,
    hang_up,
    is_same_user,
    read_exactly,
)
from penstock.workers.protocols import Publication
from penstock.workers.weights.chain.plan import (
    Broadcast,
    ChunkPlan,
    ChunkTimes,
    Lane,
    Pull,
    Timeouts,
    chain,
    lanes_of,
    upstreams,
)
from penstock.workers.weights.chain.subscription import (
    ChainHeartbeat,
    ChunkServer,
    Puller,
    Subscribe,
    VersionFailure,
    VersionGone,
    read,
    send,
)
from penstock.workers.weights.chain.transfer import Counters, PreviousVersion, Transfer, TransferOver, VersionFile
from penstock.workers.weights.publication.layout import ElementRange, Outlet
from penstock.workers.weights.publication.publication_files import (
    MappedWeights,
    WritableMappings,
    publication_directory,
    reclaim,
)

PUBLICATIONS_KEPT = 2
MOST_LANES = 8
"""Largest number of connections that a node receives a version over: a core each, while it comes."""
EXPECT_S = 30.0
"""Seconds for which reports and subscriptions of a broadcast that has not begun here wait for it."""


class Relay:
    """Lifecycle: `plan` once, `begin` and `wait` for each version, `close`.

    relay = Relay(Path("/dev/shm/penstock-run/weights"), "node-1", token, service=CHUNKS)
    listener = Listener(host, token, {CHUNKS: relay.serve})
    relay.plan(plan)
    relay.begin(Broadcast(1, 12, ["node-1"], {"node-0": address, "node-1": listener.address}))
    publication = relay.wait(12, timeout_s=120)
    """

    def __init__(
        self,
        root: Path,
        node: str,
        token: bytes,
        service: int,
        timeouts: Timeouts | None = None,
        most_lanes: int | None = None,
        *,
        sends_differences: bool = True,
    ) -> None:
        """`root`: of publications, the same path on every node. `node`: name of this one in plans and broadcasts.
        `service`: number of `serve` in the nodes' listeners, the same on every node. `most_lanes`: of all chains; None:
        one a core, `MOST_LANES` at most. `sends_differences`: to the version before, where they are shorter; False: all
        chunks go whole, and come whole."""
        self._sends_differences = sends_differences
        self._most_lanes = most_lanes or min(MOST_LANES, len(os.sched_getaffinity(0)))
        self._root, self._node, self._token, self._service = root, node, token, service
        self._timeouts = timeouts or Timeouts()
        self._counters = Counters()
        self._mappings = WritableMappings()
        self._kept: MappedWeights | None = None
        """The publication that stays beside the newest two, mapped and so locked: no version is written into its
        file."""
        self._changed = threading.Condition()
        """Lock and notification of the three fields below."""
        self._plan: ChunkPlan | None = None
        self._transfer: Transfer | None = None
        self._is_closed = False
        self._chunk_times: dict[Lane, ChunkTimes] = {}
        root.mkdir(parents=True, exist_ok=True)
        self._reports = ReportServer(root, self._expect_reports)

    def plan(self, plan: ChunkPlan) -> None:
        """Set the plan of all following versions."""
        with self._changed:
            self._plan = plan
            self._changed.notify_all()

    def begin(self, broadcast: Broadcast) -> None:
        """Begin a version that is about to be written: make room for it, and pull it where this node receives it. An
        older one that is under way is abandoned.

        Raises `WeightError` if there is no room, or a newer version has begun.
        """
        plan, older = self._plan, self._transfer
        if plan is None:
            raise NotStarted(f"node {self._node}: a version begins before its chunks are known; `plan` first.")
        if older is not None and broadcast.number <= older.broadcast.number:
            raise WeightError(
                f"node {self._node}: broadcast {broadcast.number} of version {broadcast.version} comes after "
                f"{older.broadcast.number} of version {older.broadcast.version}."
            )
        transfer = self._make_transfer(broadcast, plan, None if older is None else older.abandon())
        self._counters.add(versions=1)
        with self._changed:
            self._transfer = transfer
            self._changed.notify_all()
        for lane in transfer.pulls:
            puller = Puller(transfer, lane, self._token, self._service, self._counters)
            threading.Thread(target=puller.run, name=f"pull-{lane.source}-{lane.number}", daemon=True).start()
        self.reclaim()

    def wait(self, version: int, timeout_s: float) -> Publication:
        """Wait for all of a version that has begun, in the form that this node's engines load. Raises `WeightError` if
        it can no longer arrive, `DeadlineExceeded`."""
        transfer = self._transfer
        if transfer is None or transfer.broadcast.version != version or not transfer.receives:
            raise WeightError(f"node {self._node}: version {version} has not begun here, or is not for this node.")
        return transfer.wait(timeout_s)

    def keep(self, version: int | None) -> bool:
        """Keep a version beside the newest two, until the next call; None: no other. Returns whether it is here."""
        kept = None if self._kept is None else self._kept.manifest.version
        if version is None or version != kept:
            self._kept = None
        if version is not None and self._kept is None:
            with contextlib.suppress(WeightError):
                self._kept = MappedWeights(Publication(str(publication_directory(self._root, version)), version))
        return self._kept is not None

    def reclaim(self) -> None:
        """Remove all but the newest two publications, and the one that is kept."""
        kept = self._kept
        but = None if kept is None else str(kept.manifest.directory)
        reclaim(self._root, keep=PUBLICATIONS_KEPT, but=but)

    def serve(self, connected: socket.socket) -> None:
        """Send chunks over a subscriber's connection, past its handshake, as they come. The listener's handler."""
        with Connection(connected) as connection:
            try:
                self._serve(connection)
            except (OSError, TransferOver):
                return  # the subscriber is gone, or does not want it any more

    def stats(self) -> dict[str, float]:
        """Counters since the start; seconds that the newest whole version took; the share of the chunks' bytes that was
        received, since differences are shorter."""
        with self._changed:
            transfer = self._transfer
        seconds = transfer.seconds if transfer is not None else 0.0
        counts = self._counters.read()
        share = counts["bytes_in"] / counts["bytes_whole"] if counts["bytes_whole"] else 0.0
        return {**counts, "seconds": seconds, "received_share": share}

    def close(self) -> None:
        """Close everything. A second call changes nothing."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        self._reports.close()
        if self._transfer is not None:
            self._transfer.abandon().close()
        self._mappings.close()

    def _make_transfer(self, broadcast: Broadcast, plan: ChunkPlan, base: PreviousVersion | None) -> Transfer:
        receives = self._node in broadcast.receivers
        file, base = self._open_file(
            broadcast.version, plan, None if receives else plan.spans_from_node(self._node), base
        )
        pulls: dict[Lane, Pull] = {}
        sources = [source for source in plan.sources if receives and source != self._node]
        for source in sources:
            order = chain(broadcast, plan.sources, source)
            for lane, chunks in lanes_of(plan, source, self._most_lanes // len(sources)).items():
                chunk_times = self._chunk_times.setdefault(lane, ChunkTimes(self._timeouts))
                pulls[lane] = Pull(
                    chunks, upstreams(order, source, self._node), plan.chunk_bytes, chunk_times, self._timeouts,
                    time.monotonic(),
                )  # fmt: skip
        return Transfer(broadcast, plan, self._node, file, pulls, base)

    def _open_file(
        self, version: int, plan: ChunkPlan, spans: Sequence[tuple[int, int]] | None, base: PreviousVersion | None
    ) -> tuple[VersionFile, PreviousVersion | None]:
        """The file of a version, and the base for its differences: None where the base has another plan, or where there
        is no room for both."""
        if base is not None and (base.plan.digest != plan.digest or not self._sends_differences):
            base.close()
            base = None
        try:
            return VersionFile(self._root, version, plan, spans, self._mappings), base
        except WeightError:
            if base is None:
                raise
            base.close()
            return VersionFile(self._root, version, plan, spans, self._mappings), None

    def _serve(self, connection: Connection) -> None:
        message = read(connection.receive())
        if not isinstance(message, Subscribe):
            raise ConnectionAbortedError("a connection that does not begin with a subscription.")
        transfer = self._wait_for(connection, message.number)
        if transfer is None:
            send(connection, VersionGone())
        elif message.plan != transfer.plan.digest or message.source not in transfer.logs:
            reason = f"node {self._node} has another plan of chunks, or none of {message.source}'s"
            send(connection, VersionFailure(reason))
        elif transfer.failure is not None:
            send(connection, VersionFailure(transfer.failure))
        else:
            with transfer.using(connection):
                ChunkServer(transfer, message, self._timeouts.heartbeat_s, self._counters).run(connection)

    def _wait_for(self, connection: Connection, number: int) -> Transfer | None:
        """Wait until the broadcast begins here. None: a later one has begun, or this one has not begun in time."""
        began = time.monotonic()
        while time.monotonic() - began < EXPECT_S:
            with self._changed:
                transfer = self._transfer
                if self._is_closed or (transfer is not None and transfer.broadcast.number > number):
                    return None
                if transfer is not None and transfer.broadcast.number == number:
                    return transfer
                self._changed.wait(self._timeouts.heartbeat_s)
            send(connection, ChainHeartbeat(time.monotonic() - began))
        return None

    def _expect_reports(self, version: int, plan: bytes) -> Transfer | None:
        """The transfer that reports of this version are for, if it is under way here."""

        def is_there() -> bool:
            return self._is_closed or (self._transfer is not None and self._transfer.broadcast.version >= version)

        with self._changed:
            self._changed.wait_for(is_there, EXPECT_S)
            transfer = self._transfer
        if self._is_closed or transfer is None or transfer.is_over:
            return None
        if transfer.broadcast.version != version or transfer.plan.digest != plan:
            return None
        return transfer


SOCKET_NAME = "relay.sock"
HELLO = struct.Struct("!QI16s")
"""Version, rank, digest of the plan."""
REPORT = struct.Struct("!i16s")
"""Number of a chunk, and its digest."""
FINISHED = REPORT.pack(-1, bytes(16))
READ_BYTES = REPORT.size * 4096
BACKLOG = 1024
"""Ranks that may wait to connect: all of a node come at once."""
TIMEOUT_S = 30.0
"""Seconds after which a relay that takes no reports hangs, since it does nothing but listen."""


class Reporter:
    """The rank's side, for one version.

    with Reporter(root, plan, version=12, rank=0) as reporter:
        writer = PublicationWriter(root, 12, plan.layout, outlet=reporter.outlet)
        writer.write_elements(name, first, values) ...
        writer.close()
        reporter.finish()
    """

    def __init__(self, root: str | Path, plan: ChunkPlan, version: int, rank: int) -> None:
        """Connect to the node's relay. Raises `WeightError` where no relay listens."""
        self._numbers, self._rank = plan.numbers, rank
        self.outlet = Outlet(plan.chunk_bytes, plan.spans_from_node(plan.nodes[rank]), self._written)
        self._lock = threading.Lock()
        try:
            self._socket = connect_path(Path(root) / SOCKET_NAME)
        except OSError as error:
            raise self._relay_error(error) from None
        self._socket.settimeout(TIMEOUT_S)
        self._send(HELLO.pack(version, rank, plan.digest))

    def finish(self) -> None:
        """Report that all is written. Raises `WeightError`."""
        self._send(FINISHED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _written(self, entry: ElementRange) -> None:
        number = self._numbers.get((entry.name, entry.first_element))
        if number is None:
            raise WeightError(
                f"rank {self._rank}: elements of {entry.name!r} from {entry.first_element} are not in the plan of "
                "chunks. Ranks must have the same pieces in every version."
            )
        self._send(REPORT.pack(number, bytes.fromhex(entry.checksum)))

    def _send(self, data: bytes) -> None:
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError as error:
            raise self._relay_error(error) from None

    def _relay_error(self, error: OSError) -> WeightError:
        return WeightError(
            f"rank {self._rank}: this node's relay takes no reports of what is written ({error}). Its agent has ended, "
            "or the version is no longer wanted."
        )


class ReportServer:
    """The relay's side. Lifecycle: made once, `close`."""

    def __init__(self, root: Path, expect: Callable[[int, bytes], Transfer | None]) -> None:
        """`expect`: returns the transfer that reports are for, by version and digest of the plan; it may wait. None:
        reports are not wanted."""
        self._expect = expect
        self._path = root / SOCKET_NAME
        self._path.unlink(missing_ok=True)
        self._socket = bind_path(self._path)
        self._socket.listen(BACKLOG)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="reports", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for connected in [self._socket, *self._open]:
                hang_up(connected)
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        with self._socket:
            while True:
                try:
                    connected, _ = self._socket.accept()
                except OSError:
                    if self._is_closed:
                        return
                    continue
                threading.Thread(target=self._serve, args=(connected,), name="report", daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        with connected:
            with self._lock:
                if self._is_closed:
                    return
                self._open.add(connected)
            try:
                if is_same_user(connected):
                    self._follow(connected)
            finally:
                with self._lock:
                    self._open.discard(connected)

    def _follow(self, connected: socket.socket) -> None:
        try:
            version, rank, plan = HELLO.unpack(read_exactly(connected, HELLO.size))
        except OSError:
            return
        transfer = self._expect(version, plan)
        if transfer is None:
            return
        try:
            for chunks in _reports(connected):
                transfer.add(transfer.node, chunks)
        except TransferOver:
            return
        except OSError:
            transfer.fail(f"rank {rank} has left before it had written its part")


def _reports(connected: socket.socket) -> Iterator[list[tuple[int, bytes]]]:
    """Yield the reports that have come, until the rank has finished. Raises `OSError` if the connection ends before."""
    data = b""
    while not data.startswith(FINISHED):
        some = connected.recv(READ_BYTES)
        if not some:
            raise ConnectionResetError("the rank has left.")
        data += some
        whole = len(data) - len(data) % REPORT.size
        if data[:whole].endswith(FINISHED):
            whole -= REPORT.size
        if whole:
            yield list(REPORT.iter_unpack(data[:whole]))
        data = data[whole:]
