"""How the thread of a heartbeat speaks to the store, beside the event loop of its client, which may be blocked.

Each call blocks the thread for a bounded time. `ConnectionError` and `TimeoutError` may pass; `PartnerGone` is final.
Made by `links.py`, used by `heartbeat.py`.
"""

import asyncio
from pathlib import Path
from typing import Any, Protocol

from penstock.conf.errors import PartnerGone
from penstock.network.connection import Connection
from penstock.store.data.codec import NOTHING, Codec, Malformed
from penstock.store.service import peers
from penstock.store.service.messages import ANSWER, HELLO, SAID, Answer, Hello, Said, calls_of
from penstock.store.service.store import Store


class Pulse(Protocol):
    def renew(self, lease_ids: list[int], tickets: list[int], timeout_s: float) -> list[int]:
        """Renew these leases, and what was given to these requests and is on its way; those that are over. Raises
        `OSError` if there was no answer in time, `PartnerGone` if there will be none."""

    def close(self) -> None: ...


class InProcess:
    """The store lives in an event loop of this process."""

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


class OverSocket:
    """A connection of its own, made when it is needed and made again after it has broken."""

    def __init__(self, path: str, client: str) -> None:
        self._path, self._client = path, client
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
                self._connection = Connection(peers.connect(Path(self._path)), timeout_s)
            except (ConnectionRefusedError, FileNotFoundError):
                raise PartnerGone(f"the store's process is gone, or the store is closed: {self._path}.") from None
            self._connection.send(HELLO, self._codec.encode(Hello(f"{self._client}.heartbeat"))[0])
        return self._connection

    def _heard(self, connection: Connection) -> Answer[list[int] | None]:
        frame = connection.receive()
        if frame.kind != ANSWER or frame.num_bytes:
            raise Malformed(f"the store sends a message of kind {frame.kind}.")
        answer: Answer[list[int] | None] = self._codec.decode(Answer[list[int] | None], frame.body, NOTHING)
        return answer


class OverRay:
    """Actor calls, waited for in the thread."""

    def __init__(self, handle: Any, client: str) -> None:
        self._handle, self._client = handle, client

    def renew(self, lease_ids: list[int], tickets: list[int], timeout_s: float) -> list[int]:
        from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError

        try:
            return list(self._handle.renew.remote(lease_ids, self._client, tickets).future().result(timeout_s))
        except (ActorUnavailableError, ObjectLostError) as error:
            raise ConnectionError(str(error)) from None
        except RayActorError as error:
            raise PartnerGone(f"the store's process is gone: {error}") from None

    def close(self) -> None:
        pass
