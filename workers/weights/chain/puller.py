"""The downstream's side of a subscription: asks an upstream, receives into the file, checks, and asks another one.

`pull.py` decides; here are the socket and the clock. There is a thread for each lane of each chain that a node is in:
receiving and summing leave Python's lock to others.
"""

import time

import xxhash

from penstock.network.connection import Connection, Frame, connect
from penstock.workers.weights.chain.difference import apply
from penstock.workers.weights.chain.plan import Lane
from penstock.workers.weights.chain.subscription import (
    DIGEST_BYTES,
    Change,
    Ended,
    Failed,
    Gone,
    Parcel,
    Subscribe,
    Waiting,
    read,
    send,
    to_bits,
)
from penstock.workers.weights.chain.transfer import Counters, Transfer, TransferOver

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
