"""The upstream's side of a connection: chunks as they come to this node, as long as a subscriber wants them. There is a
thread of the agent's listener for each subscriber.

`Feed`, which is pure, decides what is sent next; `Server` sends it.
"""

import time
from collections.abc import Collection, Sequence

from penstock.network.connection import Connection
from penstock.workers.weights.chain.messages import (
    Ended,
    Failed,
    Gone,
    Message,
    Parcel,
    Subscribe,
    Waiting,
    from_bits,
    send,
)
from penstock.workers.weights.chain.transfer import Counters, Transfer

SMALL_BYTES = 2**16
"""Largest chunk that is sent together with others: a model has many vectors, an adapter nothing else."""
PARCEL_BYTES, PARCEL_CHUNKS = 2**20, 256
"""Most bytes and most chunks that are sent together."""


class Server:
    """The service of one subscription. Lifecycle: `run`, which returns when all is sent or the transfer is over."""

    def __init__(
        self,
        transfer: Transfer,
        subscribe: Subscribe,
        heartbeat_s: float,
        counters: Counters,
    ) -> None:
        self._transfer, self._source, self._heartbeat_s = transfer, subscribe.source, heartbeat_s
        self._counters = counters
        wanted = from_bits(subscribe.wanted, len(transfer.plan.chunks))
        self._feed = Feed(transfer.logs[subscribe.source], wanted, transfer.plan.spans)

    def run(self, connection: Connection) -> None:
        """Send until all is sent or the transfer is over. Raises `OSError` when the subscriber is gone."""
        while True:
            message, parcel = self._next()
            if parcel:
                self._send_parcel(connection, parcel)
            else:
                send(connection, message)
            if isinstance(message, Ended | Gone | Failed):
                return

    def _next(self) -> tuple[Message, list[int]]:
        """The next message, and the chunks that it is about."""
        transfer = self._transfer
        with transfer.condition:
            parcel = self._take()
            if not parcel and not self._feed.is_over and not transfer.is_over:
                transfer.condition.wait(self._heartbeat_s)
                parcel = self._take()
            if transfer.failure is not None:
                return Failed(transfer.failure), []
            if transfer.is_given_up:
                return Gone(), []
            if parcel:
                return Parcel([(chunk, transfer.digests[chunk]) for chunk in parcel]), parcel
            if self._feed.is_over:
                return Ended(), []
            pull = transfer.pulls.get(self._source)
            return Waiting(0.0 if pull is None else pull.source_age_s(time.monotonic())), []

    def _take(self) -> list[int]:
        return [] if self._transfer.is_over else self._feed.next_parcel()

    def _send_parcel(self, connection: Connection, parcel: list[int]) -> None:
        transfer = self._transfer
        spans = [transfer.plan.spans[chunk] for chunk in parcel]
        num_bytes = sum(end - start for start, end in spans)
        send(connection, Parcel([(chunk, transfer.digests[chunk]) for chunk in parcel]), num_bytes)
        if len(parcel) == 1:
            connection.send_file(transfer.slot.file, spans[0][0], num_bytes)
        else:
            connection.send_bytes(transfer.slot.bytes_of(parcel))
        self._counters.add(bytes_out=num_bytes)


class Feed:
    """The place of one subscriber in the order in which chunks have come to this node."""

    def __init__(self, log: Sequence[int], wanted: Collection[int], spans: Sequence[tuple[int, int]]) -> None:
        """`log`: numbers of the chunks that are here; it grows. `spans`: of all chunks in the file."""
        self._log, self._wanted, self._spans = log, set(wanted), spans
        self._position = 0

    @property
    def is_over(self) -> bool:
        """True once all wanted chunks have been sent."""
        return not self._wanted

    def next_parcel(self) -> list[int]:
        """Take the chunks to be sent together; none: there is nothing new."""
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
