"""A node's relay: new weights come to it chunk by chunk, and go on to the next node while they come.

                    ranks of this node
                          │ reports, bytes in shared memory
    upstream relays ─▶ Relay ─▶ downstream relays
                          └─▶ <root>/v00000012/, which the engines of this node load

Every node that has trainer ranks or engines has one, in its agent's process (`workers/node/agent.py`). A version is
begun on all of them, then the ranks write it; each relay computes the route itself (`plan.py`). What lies in shared
memory afterwards is what ranks of one node alone would have written there.

Plain Python, without Ray. The agent's listener calls `serve`; the orchestrator's weight sync the rest.

The downstream's side of a subscription: asks an upstream, receives into the file, checks, and asks another one.

`pull.py` decides; here are the socket and the clock. There is a thread for each lane of each chain that a node is in:
receiving and summing leave Python's lock to others.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import xxhash

from penstock.conf.errors import NotStarted, WeightError
from penstock.network.connection import Connection, Frame, connect
from penstock.workers.protocols import Publication
from penstock.workers.weights.chain.base import Base
from penstock.workers.weights.chain.difference import apply
from penstock.workers.weights.chain.plan import Broadcast, ChunkPlan, Lane, chain, lanes_of, upstreams
from penstock.workers.weights.chain.pull import ChunkTimes, Pull, Timeouts
from penstock.workers.weights.chain.reports import ReportServer
from penstock.workers.weights.chain.slot import Slot
from penstock.workers.weights.chain.subscription import (
    DIGEST_BYTES,
    Change,
    Ended,
    Failed,
    Gone,
    Parcel,
    Server,
    Subscribe,
    Waiting,
    read,
    send,
    to_bits,
)
from penstock.workers.weights.chain.transfer import Counters, Transfer, TransferOver
from penstock.workers.weights.publication.reused_files import WritableMappings, reclaim

WINDOW_BYTES = 2**20
"""Bytes that are received, then summed while they are still in the cache. Most of a relay's processor time is the
kernel's, and waking up for less at a time makes more of it."""
LEAST_TIMEOUT_S = 0.001
MOST_CONNECT_S = 5.0


class Puller:
    """Receives one lane of one version. Lifecycle: `run`, in a thread; it returns when the lane is complete or its
    transfer over."""

    def __init__(self, transfer: Transfer, lane: Lane, token: bytes, service: int, counters: Counters) -> None:
        self._transfer, self._source, self._pull = transfer, lane.source, transfer.pulls[lane]
        self._token, self._service, self._counters = token, service, counters
        self._base = transfer.differences.name(lane.source)
        """Name of the version that differences may be to; empty: chunks are to come whole."""

    def run(self) -> None:
        try:
            while not self._pull.is_complete:
                self._pause()
                self._ask()
        except TransferOver:
            return

    def _pause(self) -> None:
        """Wait until the upstream is to be asked."""
        transfer = self._transfer
        with transfer.condition:
            while not transfer.is_over and (remaining := self._pull.not_before - time.monotonic()) > 0:
                transfer.condition.wait(remaining)
            if transfer.is_over:
                raise TransferOver

    def _ask(self) -> None:
        """Ask one upstream over one connection, until it is over."""
        pull, transfer = self._pull, self._transfer
        address = transfer.broadcast.addresses[pull.upstream]
        reparented = pull.reparented
        try:
            timeout_s = min(MOST_CONNECT_S, self._remaining_s())
            with connect(address, self._service, self._token, timeout_s) as connection, transfer.using(connection):
                pull.connected(time.monotonic())
                self._follow(connection)
        except TimeoutError:
            pull.silent(time.monotonic())
        except OSError:
            pull.lost(time.monotonic())
        self._counters.add(reparented=pull.reparented - reparented)
        if pull.failure is not None:
            transfer.fail(pull.failure)

    def _follow(self, connection: Connection) -> None:
        pull, transfer, turn = self._pull, self._transfer, self._pull.turn
        wanted = to_bits(pull.missing, len(transfer.plan.chunks))
        send(connection, Subscribe(
            transfer.broadcast.number, transfer.plan.digest, self._source, wanted, self._base, pull.seconds_per_byte
        ))  # fmt: skip
        while pull.turn == turn and not pull.is_complete and not transfer.is_over and pull.failure is None:
            connection.socket.settimeout(self._remaining_s())
            frame = connection.receive()
            message = read(frame)
            if isinstance(message, Parcel):
                self._receive(connection, message, frame)
            elif isinstance(message, Change):
                self._receive_change(connection, message, frame)
            elif isinstance(message, Waiting):
                pull.waiting(message.source_age_s, time.monotonic())
            elif isinstance(message, Ended):
                pull.ended(time.monotonic())
            elif isinstance(message, Gone):
                pull.lost(time.monotonic())
            elif isinstance(message, Failed) and pull.upstream == self._source:
                transfer.fail(message.reason)
            elif isinstance(message, Failed):  # for itself: others may have more luck
                pull.lost(time.monotonic())

    def _receive(self, connection: Connection, parcel: Parcel, frame: Frame) -> None:
        """Receive each chunk into its place. A damaged one is overwritten when it comes again; those that came before
        the connection broke stay."""
        spans = self._transfer.plan.spans
        num_chunks = len(spans)
        if any(chunk >= num_chunks or len(digest) != DIGEST_BYTES for chunk, digest in parcel.chunks):
            raise ConnectionAbortedError("a parcel of chunks that are not in the plan.")
        sizes = [spans[chunk][1] - spans[chunk][0] for chunk, _ in parcel.chunks]
        if frame.num_bytes != sum(sizes):
            raise ConnectionAbortedError(f"a parcel of {sum(sizes)} bytes that says {frame.num_bytes}.")
        began = time.monotonic()
        good, num_bytes = [], 0
        try:
            for (chunk, digest), size in zip(parcel.chunks, sizes, strict=True):
                target = self._target(chunk, size)
                is_right = self._fill(connection, target) == digest
                num_bytes += size
                now = time.monotonic()
                if not is_right:
                    self._counters.add(damaged=1)
                    self._pull.damaged(chunk, now)
                elif self._pull.arrived(chunk, size, now - began, now):
                    good.append((chunk, digest))
                began = now
        finally:
            self._counters.add(chunks=len(good), bytes_in=num_bytes, bytes_whole=num_bytes)
            self._transfer.add(self._source, good)

    def _receive_change(self, connection: Connection, change: Change, frame: Frame) -> None:
        """Receive the difference of a chunk to the base, and make the chunk of it. Where its digest is another, the
        chunks that are missing are asked for whole."""
        transfer, chunk, base = self._transfer, change.chunk, self._transfer.differences.base
        spans = transfer.plan.spans
        if base is None or chunk >= len(spans) or len(change.digest) != DIGEST_BYTES:
            raise ConnectionAbortedError("a difference of a chunk that is not in the plan, or to no version.")
        size = spans[chunk][1] - spans[chunk][0]
        if frame.num_bytes > size:
            raise ConnectionAbortedError(f"a difference of {frame.num_bytes} bytes to a chunk of {size}.")
        received = bytearray(frame.num_bytes)
        self._fill(connection, memoryview(received))
        target = self._target(chunk, size)
        try:
            apply(received, base.bytes_of(chunk), target)
            is_right = xxhash.xxh3_128_digest(target) == change.digest
        except ValueError:
            is_right = False
        now = time.monotonic()
        self._counters.add(bytes_in=len(received), bytes_whole=size, differences=1)
        if not is_right:
            self._base = b""
            self._counters.add(damaged=1)
            self._pull.damaged(chunk, now)
        elif self._pull.arrived(chunk, 0, 0.0, now):  # its time says nothing of the link
            transfer.differences.keep(chunk, bytes(received))
            self._counters.add(chunks=1)
            transfer.add(self._source, [(chunk, change.digest)])

    def _target(self, chunk: int, size: int) -> memoryview:
        """The memory that a chunk is received into. A chunk that is here already is not written again: others may be
        reading it."""
        if chunk in self._pull.missing:
            return self._transfer.slot.target(chunk)
        return memoryview(bytearray(size))

    def _fill(self, connection: Connection, target: memoryview) -> bytes:
        """Receive into `target`; return the xxh3-128 of what came."""
        digest = xxhash.xxh3_128()
        for start in range(0, len(target), WINDOW_BYTES):
            window = target[start : start + WINDOW_BYTES]
            connection.socket.settimeout(self._remaining_s())
            connection.receive_into(window)
            digest.update(window)
            self._pull.progressed(time.monotonic())
        return digest.digest()

    def _remaining_s(self) -> float:
        return max(LEAST_TIMEOUT_S, self._pull.deadline - time.monotonic())


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
        self._changed = threading.Condition()
        """Lock and notification of the three fields below."""
        self._plan: ChunkPlan | None = None
        self._transfer: Transfer | None = None
        self._is_closed = False
        self._chunk_times: dict[Lane, ChunkTimes] = {}
        root.mkdir(parents=True, exist_ok=True)
        self._reports = ReportServer(root, self._expect_reports)

    def plan(self, plan: ChunkPlan) -> None:
        """Take the plan of every version from now on."""
        with self._changed:
            self._plan = plan
            self._changed.notify_all()

    def begin(self, broadcast: Broadcast) -> None:
        """Begin a version that is about to be written: make room for it, and pull it where this node receives it. An
        older one that is under way is given up.

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
        transfer = self._make_transfer(broadcast, plan, None if older is None else older.give_up())
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
        it cannot come any more, `DeadlineExceeded`."""
        transfer = self._transfer
        if transfer is None or transfer.broadcast.version != version or not transfer.receives:
            raise WeightError(f"node {self._node}: version {version} has not begun here, or is not for this node.")
        return transfer.wait(timeout_s)

    def reclaim(self) -> None:
        """Remove all but the newest two publications."""
        reclaim(self._root, keep=PUBLICATIONS_KEPT)

    def serve(self, connected: socket.socket) -> None:
        """Send chunks over a subscriber's connection, past its handshake, as they come. The listener's handler."""
        with Connection(connected) as connection:
            try:
                self._serve(connection)
            except (OSError, TransferOver):
                return  # the subscriber is gone, or does not want it any more

    def stats(self) -> dict[str, float]:
        """Counters since the start; seconds that the newest whole version took; bytes that came of those of the chunks,
        of which the others had not changed."""
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
            self._transfer.give_up().close()
        self._mappings.close()

    def _make_transfer(self, broadcast: Broadcast, plan: ChunkPlan, base: Base | None) -> Transfer:
        receives = self._node in broadcast.receivers
        slot, base = self._make_slot(
            broadcast.version, plan, None if receives else plan.spans_of_node(self._node), base
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
        return Transfer(broadcast, plan, self._node, slot, pulls, base)

    def _make_slot(
        self, version: int, plan: ChunkPlan, spans: Sequence[tuple[int, int]] | None, base: Base | None
    ) -> tuple[Slot, Base | None]:
        """The file of a version, and the base that is left: none of another plan, or where both do not fit."""
        if base is not None and (base.plan.digest != plan.digest or not self._sends_differences):
            base.close()
            base = None
        try:
            return Slot(self._root, version, plan, spans, self._mappings), base
        except WeightError:
            if base is None:
                raise
            base.close()
            return Slot(self._root, version, plan, spans, self._mappings), None

    def _serve(self, connection: Connection) -> None:
        message = read(connection.receive())
        if not isinstance(message, Subscribe):
            raise ConnectionAbortedError("a connection that does not begin with a subscription.")
        transfer = self._wait_for(connection, message.number)
        if transfer is None:
            send(connection, Gone())
        elif message.plan != transfer.plan.digest or message.source not in transfer.logs:
            send(connection, Failed(f"node {self._node} has another plan of chunks, or none of {message.source}'s"))
        elif transfer.failure is not None:
            send(connection, Failed(transfer.failure))
        else:
            with transfer.using(connection):
                Server(transfer, message, self._timeouts.heartbeat_s, self._counters).run(connection)

    def _wait_for(self, connection: Connection, number: int) -> Transfer | None:
        """Wait for the broadcast to begin here too. None: a later one has begun, or this one has not for too long."""
        began = time.monotonic()
        while time.monotonic() - began < EXPECT_S:
            with self._changed:
                transfer = self._transfer
                if self._is_closed or (transfer is not None and transfer.broadcast.number > number):
                    return None
                if transfer is not None and transfer.broadcast.number == number:
                    return transfer
                self._changed.wait(self._timeouts.heartbeat_s)
            send(connection, Waiting(time.monotonic() - began))
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
