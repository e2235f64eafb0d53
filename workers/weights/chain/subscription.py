"""A subscription: the messages between two relays, and both sides of it.

    downstream ─ Subscribe ─▶ upstream        these chunks of this version, please
    downstream ◀─ Parcel, bytes ─ upstream    some of them, as soon as they are here; a digest for each
    downstream ◀─ Change, bytes ─ upstream    one of them, as its difference to the version that both have
    downstream ◀─ Waiting ─ upstream          nothing new
    downstream ◀─ Ended | Gone | Failed       all sent | that version is no longer here | it will never be whole

Each message is a header and a small body of plain data, which ends with its checksum: a bit that flips in transit must
not turn one chunk's number into another's. A connection is one subscription, of some or all chunks of a chain.

*Upstream*: a thread of the agent's listener serves it. `Feed`, which is pure, decides what is sent next, and
`ChunkServer` sends it. *Downstream*: `Puller` asks an upstream, receives into the file, checks, and asks another one;
`plan.Pull` decides, here are the socket and the clock. There is a thread for each lane of each chain that a node is in:
receiving and summing release Python's lock.
"""

import time
from collections.abc import Collection, Iterable, Sequence

import msgspec
import xxhash

from penstock.network.connection import Connection, Frame, connect
from penstock.workers.weights.chain.difference import apply
from penstock.workers.weights.chain.plan import Lane
from penstock.workers.weights.chain.transfer import Counters, Transfer, TransferOver

DIGEST_BYTES = 16
SUM_BYTES = 8
SMALL_BYTES = 2**16
"""Largest chunk that is sent together with others: a model has many vectors, an adapter nothing else."""
PARCEL_BYTES, PARCEL_CHUNKS = 2**20, 256
"""Most bytes and most chunks that are sent together."""
WINDOW_BYTES = 2**20
"""Bytes that are received, then summed while they are still in the cache. Most of a relay's processor time is the
kernel's, and waking up for less at a time makes more of it."""
LEAST_TIMEOUT_S = 0.001
MOST_CONNECT_S = 5.0


class Subscribe(msgspec.Struct, frozen=True, tag=1):
    number: int
    """Number of the broadcast."""
    plan: bytes
    """Digest of the plan that chunk numbers refer to."""
    source: str
    """The node where the chain begins."""
    wanted: bytes
    """Bits of the wanted chunks; bit i: chunk i."""
    base: bytes = b""
    """Name of the version that the subscriber has (`transfer.PreviousVersion`); empty: chunks come whole."""
    seconds_per_byte: float = 0.0
    """Time of a byte on the link; 0: not known."""


class Parcel(msgspec.Struct, frozen=True, tag=2):
    """Announcement of chunks, whose bytes follow in this order."""

    chunks: list[tuple[int, bytes]]
    """Number of each chunk, and xxh3-128 of its bytes as the rank wrote them."""


class ChainHeartbeat(msgspec.Struct, frozen=True, tag=3):
    source_age_s: float
    """Seconds since the chain's source was heard of."""


class AllSent(msgspec.Struct, frozen=True, tag=4):
    pass


class VersionGone(msgspec.Struct, frozen=True, tag=5):
    pass


class VersionFailure(msgspec.Struct, frozen=True, tag=6):
    reason: str


class DifferenceParcel(msgspec.Struct, frozen=True, tag=7):
    """Announcement of a chunk whose difference to the base follows."""

    chunk: int
    digest: bytes
    """xxh3-128 of the chunk's bytes as the rank wrote them."""


Message = Subscribe | Parcel | ChainHeartbeat | AllSent | VersionGone | VersionFailure | DifferenceParcel
KIND = 1
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def send(connection: Connection, message: Message, num_bytes: int = 0) -> None:
    """Send a message. The caller sends `num_bytes` next."""
    body = msgspec.msgpack.encode(message)
    connection.send(KIND, body + xxhash.xxh3_64_digest(body), num_bytes)


def read(frame: Frame) -> Message:
    """Decode a message. Raises `ConnectionAbortedError` for a damaged one."""
    body, found = frame.body[:-SUM_BYTES], frame.body[-SUM_BYTES:]
    if frame.kind != KIND or xxhash.xxh3_64_digest(body) != found:
        raise ConnectionAbortedError("a message between relays came damaged.")
    try:
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ConnectionAbortedError(f"a message between relays is none of theirs: {error}.") from None


def to_bits(chunks: Iterable[int], num_chunks: int) -> bytes:
    return sum(1 << chunk for chunk in set(chunks)).to_bytes((num_chunks + 7) // 8, "little")


def from_bits(bits: bytes, num_chunks: int) -> set[int]:
    return {chunk for chunk in range(min(num_chunks, 8 * len(bits))) if bits[chunk // 8] >> chunk % 8 & 1}


class ChunkServer:
    """The service of one subscription. Lifecycle: `run`, which returns when all is sent or the transfer is over."""

    def __init__(self, transfer: Transfer, subscribe: Subscribe, heartbeat_s: float, counters: Counters) -> None:
        self._transfer, self._source, self._heartbeat_s = transfer, subscribe.source, heartbeat_s
        self._counters = counters
        wanted = from_bits(subscribe.wanted, len(transfer.plan.chunks))
        self._feed = Feed(transfer.logs[subscribe.source], wanted, transfer.plan.spans)
        self._has_base = bool(subscribe.base) and subscribe.base == transfer.differences.name(subscribe.source)
        self._seconds_per_byte = subscribe.seconds_per_byte

    def run(self, connection: Connection) -> None:
        """Send until all is sent or the transfer is over. Raises `OSError` when the subscriber is gone."""
        while True:
            following = self._next()
            if isinstance(following, list):
                self._send_parcel(connection, following)
                continue
            send(connection, following)
            if not isinstance(following, ChainHeartbeat):
                return

    def _next(self) -> Message | list[int]:
        """The next message, or the chunks to be sent together."""
        transfer = self._transfer
        with transfer.condition:
            parcel = self._take()
            if not parcel and not self._feed.is_over and not transfer.is_over:
                transfer.condition.wait(self._heartbeat_s)
                parcel = self._take()
            if transfer.failure is not None:
                return VersionFailure(transfer.failure)
            if transfer.is_abandoned:
                return VersionGone()
            if parcel:
                return parcel
            return AllSent() if self._feed.is_over else ChainHeartbeat(transfer.source_age_s(self._source))

    def _take(self) -> list[int]:
        return [] if self._transfer.is_over else self._feed.next_parcel()

    def _send_parcel(self, connection: Connection, parcel: list[int]) -> None:
        transfer = self._transfer
        spans = [transfer.plan.spans[chunk] for chunk in parcel]
        num_bytes = sum(end - start for start, end in spans)
        change = self.difference(parcel[0], num_bytes) if len(parcel) == 1 else None
        if change is not None:
            send(connection, DifferenceParcel(parcel[0], transfer.digests[parcel[0]]), len(change))
            connection.send_bytes(change)
            self._counters.add(bytes_out=len(change))
            return
        send(connection, Parcel([(chunk, transfer.digests[chunk]) for chunk in parcel]), num_bytes)
        if len(parcel) == 1:
            connection.send_file(transfer.file.opened, spans[0][0], num_bytes)
        else:
            connection.send_bytes(transfer.file.bytes_of(parcel))
        self._counters.add(bytes_out=num_bytes)

    def difference(self, chunk: int, num_bytes: int) -> bytes | None:
        """The difference to send instead of a large chunk; None: send it whole."""
        if not self._has_base or num_bytes <= SMALL_BYTES:
            return None
        transfer = self._transfer
        return transfer.differences.of(chunk, transfer.file.memory(chunk), self._seconds_per_byte)


class Feed:
    """The position of one subscriber in the order in which chunks arrived at this node."""

    def __init__(self, log: Sequence[int], wanted: Collection[int], spans: Sequence[tuple[int, int]]) -> None:
        """`log`: numbers of the chunks on this node; it grows. `spans`: of all chunks in the file."""
        self._log, self._wanted, self._spans = log, set(wanted), spans
        self._position = 0

    @property
    def is_over(self) -> bool:
        """True once all wanted chunks have been sent."""
        return not self._wanted

    def next_parcel(self) -> list[int]:
        """Take the next chunks, which are sent together; none: there is nothing new."""
        parcel: list[int] = []
        room = PARCEL_BYTES
        while self._position < len(self._log) and len(parcel) < PARCEL_CHUNKS:
            chunk = self._log[self._position]
            if chunk in self._wanted:
                start, end = self._spans[chunk]
                is_small = end - start <= SMALL_BYTES
                if parcel and (not is_small or end - start > room):
                    break
                parcel.append(chunk)
                room -= end - start
                self._wanted.discard(chunk)
                if not is_small:
                    self._position += 1
                    break
            self._position += 1
        return parcel


class Puller:
    """Receives one lane of one version. Lifecycle: `run`, in a thread; it returns when the lane is complete or its
    transfer over."""

    def __init__(self, transfer: Transfer, lane: Lane, token: bytes, service: int, counters: Counters) -> None:
        self._transfer, self._source, self._pull = transfer, lane.source, transfer.pulls[lane]
        self._token, self._service, self._counters = token, service, counters
        self._base = transfer.differences.name(lane.source)
        """Name of the version that differences may be to; empty: chunks come whole."""

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
        except OSError:  # a timeout, too: nothing has come until the deadline
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
            elif isinstance(message, DifferenceParcel):
                self._receive_difference(connection, message, frame)
            elif isinstance(message, ChainHeartbeat):
                pull.waiting(message.source_age_s, time.monotonic())
            elif isinstance(message, AllSent):
                pull.ended(time.monotonic())
            elif isinstance(message, VersionGone):
                pull.lost(time.monotonic())
            elif isinstance(message, VersionFailure) and pull.upstream == self._source:
                transfer.fail(message.reason)
            elif isinstance(message, VersionFailure):  # of this upstream alone: another one may have the version
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

    def _receive_difference(self, connection: Connection, change: DifferenceParcel, frame: Frame) -> None:
        """Receive the difference of a chunk to the base, and make the chunk of it. If its digest is wrong, all missing
        chunks are requested whole."""
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
        """The memory that a chunk is received into. A chunk that is here already is not written again: it may be in
        use."""
        if chunk in self._pull.missing:
            return self._transfer.file.target(chunk)
        return memoryview(bytearray(size))

    def _fill(self, connection: Connection, target: memoryview) -> bytes:
        """Receive into `target`; return the xxh3-128 of the received bytes."""
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
