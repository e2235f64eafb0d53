"""The connection of a heartbeat's thread to the store, beside the event loop of its client, which may be blocked.

Each call blocks the thread for a bounded time. `ConnectionError` and `TimeoutError` may pass; `PartnerGone` is final.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from penstock.conf.errors import PartnerGone
from penstock.network.connection import Connection, connect
from penstock.store.data.codec import NOTHING, Codec, Malformed
from penstock.store.service import peers
from penstock.store.service.messages import ANSWER, HELLO, SAID, Answer, Hello, Said, calls_of
from penstock.store.service.server import STORE, Endpoint
from penstock.store.service.store import Store

Over = list[int] | None
"""Leases that are over; None with an error."""


class Pulse(Protocol):
    def renew(self, lease_ids: list[int], tickets: list[int], timeout_s: float) -> list[int]:
        """Renew these leases, and what was given to these requests and is on its way. Returns those that are over.
        Raises `OSError` if there was no answer in time, `PartnerGone` if there will be none."""

    def close(self) -> None: ...


class InProcess:
    """A pulse to a store that lives in an event loop of this process."""

    def __init__(self, store: Store, client: str) -> None:
        self._store, self._client = store, client

    def renew(self, lease_ids: list[int], tickets: list[int], timeout_s: float) -> list[int]:
        renewing = self._store.renew(lease_ids, self._client, tickets)
        try:
            assert self._store.loop is not None
            answer = asyncio.run_coroutine_threadsafe(renewing, self._store.loop)
        except RuntimeError:
            renewing.close()
            raise PartnerGone("the store's event loop is closed.") from None
        return answer.result(timeout_s)

    def close(self) -> None:
        pass


class OverConnection:
    """A connection of its own, made when it is needed and made again after it has broken."""

    def __init__(self, connect: Callable[[float], Connection], where: object, client: str) -> None:
        """Prepare a connection that `connect` makes, within the seconds that it is given."""
        self._connect, self._where, self._client = connect, where, client
        self._calls, self._codec = calls_of(Store), Codec()
        self._connection: Connection | None = None

    def renew(self, lease_ids: list[int], tickets: list[int], timeout_s: float) -> list[int]:
        try:
            connection = self._connected(timeout_s)
            request = self._calls.request("renew", (lease_ids, self._client, tickets))
            connection.send(SAID, self._codec.encode(Said(0, request))[0])
            answer = self._heard(connection)
            while answer.number is None:  # what the store says unasked
                answer = self._heard(connection)
        except OSError:
            self.close()
            raise
        if answer.error is not None:
            raise answer.error
        return answer.value or []

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self, timeout_s: float) -> Connection:
        if self._connection is None:
            try:
                self._connection = self._connect(timeout_s)
            except (ConnectionRefusedError, FileNotFoundError):
                raise PartnerGone(f"the store's process is gone, or the store is closed: {self._where}.") from None
            self._connection.send(HELLO, self._codec.encode(Hello(f"{self._client}.heartbeat"))[0])
        return self._connection

    def _heard(self, connection: Connection) -> Answer[Over]:
        frame = connection.receive()
        if frame.kind != ANSWER or frame.num_bytes:
            raise Malformed(f"the store sends a message of kind {frame.kind}.")
        answer: Answer[Over] = self._codec.decode(Answer[Over], frame.body, NOTHING)
        return answer


def over_socket(path: Path, client: str) -> OverConnection:
    return OverConnection(lambda timeout_s: Connection(peers.connect(path), timeout_s), path, client)


def over_tcp(endpoint: Endpoint, client: str) -> OverConnection:
    address = endpoint.address
    assert address is not None

    def connected(timeout_s: float) -> Connection:
        return connect(address, STORE, endpoint.token, timeout_s, silence_s=timeout_s)

    return OverConnection(connected, address, client)
