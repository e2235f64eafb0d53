"""How the thread of a heartbeat speaks to the store, beside the event loop of its client, which may be blocked.

Each call blocks the thread for a bounded time. `ConnectionError` and `TimeoutError` may pass; `PartnerGone` is final.
Made by `links.py`, used by `heartbeat.py`.
"""

import asyncio
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.conf.errors import PartnerGone
from penstock.store.service import peers
from penstock.store.service.wire import pieces, receive

if TYPE_CHECKING:
    from penstock.store.service.store import Store


class Pulse(Protocol):
    def renew(self, lease_ids: list[int], tickets: list[int], timeout_s: float) -> list[int]:
        """Renew these leases, and what was given to these requests and is on its way; those that are over. Raises
        `OSError` if there was no answer in time, `PartnerGone` if there will be none."""

    def close(self) -> None: ...


class InProcess:
    """The store lives in an event loop of this process."""

    def __init__(self, store: "Store", client: str) -> None:
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
        self._socket: socket.socket | None = None

    def renew(self, lease_ids: list[int], tickets: list[int], timeout_s: float) -> list[int]:
        try:
            connection = self._connected(timeout_s)
            self._send((0, "renew", (lease_ids, self._client, tickets), []))
            number = None
            while number is None:  # what the store says unasked
                number, over, error, _ = receive(lambda count: _exactly(connection, count))
        except OSError:
            self.close()
            raise
        if error is not None:
            raise error
        return list(over)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self, timeout_s: float) -> socket.socket:
        if self._socket is None:
            try:
                self._socket = peers.connect(Path(self._path))
            except (ConnectionRefusedError, FileNotFoundError):
                raise PartnerGone(f"the store's process is gone, or the store is closed: {self._path}.") from None
            self._socket.settimeout(timeout_s)
            self._send(f"{self._client}.heartbeat")
        return self._socket

    def _send(self, message: Any) -> None:
        assert self._socket is not None
        self._socket.sendall(b"".join(pieces(message)))


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


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        some = connection.recv(count - len(data))
        if not some:
            raise ConnectionResetError("the store has ended the connection.")
        data += some
    return bytes(data)
