"""Clients' ends of a connection to the store: over its socket on the same machine, or over TCP from another.

One connection a client, any number of calls at a time. A client whose connection has ended is one that has left: what
it held has gone back, so calls are not repeated. The other end is `service/server.py`.
"""

import asyncio
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from msgspec import Raw

from penstock.conf.errors import NotPlainData, PartnerGone
from penstock.network.connection import SILENCE_S, connect, connect_path
from penstock.store.client.heartbeat import LeaseRenewer, renewer_over_socket, renewer_over_tcp
from penstock.store.data.arena import Arena, Slot
from penstock.store.data.codec import Malformed
from penstock.store.data.layout import Inline, Placed, SentBatch
from penstock.store.data.mappings import DebouncedCall, Mappings
from penstock.store.data.payload import Payload
from penstock.store.data.remote.nodes import RowsNode
from penstock.store.data.remote.pulls import Pulls
from penstock.store.data.segments import Notice
from penstock.store.errors import StoreError, StoreUnreachable
from penstock.store.service.messages import (
    ANSWER,
    HELLO,
    MESSAGE,
    Answer,
    Calls,
    ClientMessage,
    Hello,
    calls_of,
    refs_of,
)
from penstock.store.service.server import STORE_SERVICE, Endpoint
from penstock.store.service.store import Store
from penstock.store.service.wire import Wire

CONNECT_S = 10.0
"""Seconds for the handshake; a packet that is lost is sent again within it."""
TRIES = 5
"""Attempts of a handshake: the store hangs up when all machines of a run come at once."""
LONGEST_PAUSE_S = 1.0
HAS_LEFT = "this client has left its store. Make another to speak to it."


class Connected:
    """Calls over a connection. Large batches lie on the writer's node: on the reader's own node they are mapped, from
    another they are pulled."""

    def __init__(
        self,
        endpoint: Endpoint,
        client: str,
        calls: Calls,
        node: str | None,
        reading: Sequence[str],
        writing: Sequence[str],
    ) -> None:
        """Prepare the link. `node`: this one, as segments say it; None: one that has no memory for batches. `reading`,
        `writing`: its directories of segments."""
        self._endpoint, self._client = endpoint, client
        self._calls = calls
        self.wire = Wire(self._on_message, self._on_lost)
        self._numbers = itertools.count()
        self._answers: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        """Method and caller of each call that has no answer yet."""
        self._lost: PartnerGone | StoreUnreachable | None = None
        """The error that ended the connection; None while it is open."""
        self._node = node
        self._say_ended_soon = DebouncedCall(asyncio.get_running_loop(), self._say_ended)
        self._arena = Arena(writing, client, node or "") if writing else None
        self._mappings = Mappings(reading, self._say_ended_soon)
        self._pulls: Pulls | None = None

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the store. Raises what the store does, and `PartnerGone` or `StoreUnreachable` if the
        connection has ended: whether the call was carried out is not known then."""
        number, request = next(self._numbers), self._calls.request(method, args)
        ended = self._mappings.ended()
        try:
            self.wire.send(MESSAGE, ClientMessage(number, request, ended))
        except NotPlainData:
            self._mappings.skip(ended)  # they are with the next call
            raise
        except ConnectionError:
            raise self._lost_error() from None
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = method, answer
        try:
            return await answer
        except asyncio.CancelledError:
            if not answer.cancelled() and answer.exception() is None:  # it was there in the same moment
                self.skip(refs_of(answer.result()))
            raise

    async def reserve(self, nbytes: int) -> Slot | None:
        return self._arena.reserve(nbytes) if self._arena is not None else None

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: Slot | None = None) -> SentBatch:
        if self._arena is None or (slot is None and batch.nbytes <= inline_bytes):
            return Inline(batch)
        try:
            return self._arena.place(batch, slot)
        except OSError:  # there is no room: the store is asked to keep it, and says so
            if slot is not None:  # its pages are written again while the batch is under way
                batch = pa.ipc.read_record_batch(batch.serialize(), batch.schema)  # a copy
                slot.give_back()
            return Inline(batch)

    async def fetch(self, payload: Payload) -> Payload:
        refs = payload.refs
        if not any(map(self.is_remote, refs)):
            return payload.with_batches(self._mappings.read_all(refs)) if refs else payload
        remote = [placed for placed in refs if self.is_remote(placed)]
        try:
            mapped = iter(self._mappings.read_all([placed for placed in refs if not self.is_remote(placed)]))
            payload = await self._remote_reader().fetch(payload, self.is_remote)
            return payload.with_batches(list(mapped))
        finally:
            self.skip(remote)  # they are here, or nobody reads them

    def skip(self, refs: Sequence[Placed]) -> None:
        """Tell the store that batches named by an answer will not be read."""
        self._mappings.skip(placed.segment for placed in refs)

    async def leave(self) -> None:
        self._lost = self._lost or PartnerGone(HAS_LEFT)
        self.wire.abort()

    def is_remote(self, placed: Placed) -> bool:
        return placed.node != self._node

    def _remote_reader(self) -> Pulls:
        if self._pulls is None:
            endpoint = self._endpoint
            own = {"": endpoint.address} if endpoint.address is not None else {}
            self._pulls = Pulls(endpoint.nodes.addresses | own, endpoint.token)
        return self._pulls

    def _say_ended(self) -> None:
        """Tell the store which readings have ended, where no call has taken that along: the store would hold on to
        their files."""
        ended = self._mappings.ended()
        if ended and self.wire.is_open:
            self.wire.send(MESSAGE, ClientMessage(0, None, ended))

    def _apply_notice(self, notice: Notice) -> None:
        """Apply what the store says of segments."""
        if self._arena is not None:
            self._arena.recycled(notice.recycled)
            self._arena.forget(notice.removed)
        self._mappings.forget(notice.removed)

    def _on_message(self, kind: int, body: memoryview, area: pa.Buffer) -> None:
        if kind != ANSWER:
            raise Malformed(f"the store sends a message of kind {kind}.")
        heard = self.wire.codec.decode(Answer[Raw], body, area)
        if heard.notice is not None:
            self._apply_notice(heard.notice)
        if heard.number is None:
            return
        if heard.number not in self._answers:
            raise Malformed(f"the store answers call {heard.number}, which is none.")
        method, answer = self._answers[heard.number]
        value = None
        if heard.error is None:
            value = self.wire.codec.decode(self._calls.result(method), heard.value, area)
        del self._answers[heard.number]
        if answer.done():
            self.skip(refs_of(value))  # nobody will read it: the use that the store has counted ends
        elif heard.error is None:
            answer.set_result(value)
        else:
            answer.set_exception(heard.error)

    def _on_lost(self, error: Exception | None) -> None:
        self._lost = self._lost or self._explained(error)
        if self._pulls is not None:
            self._pulls.close()
        for _, answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._lost_error())

    def _explained(self, error: Exception | None) -> PartnerGone | StoreUnreachable:
        return PartnerGone(f"the store's process is gone: {self._where} has closed{f' ({error})' if error else ''}.")

    def _lost_error(self) -> StoreError | PartnerGone:
        """A new error for each caller that gets it: each adds its traceback."""
        lost = self._lost or self._explained(None)
        return type(lost)(str(lost))

    @property
    def _where(self) -> str:
        return self._endpoint.path


class OverSocket(Connected):
    """A connection over the store's socket, on its machine."""

    def __init__(self, endpoint: Endpoint, client: str, calls: Calls) -> None:
        super().__init__(endpoint, client, calls, "", endpoint.segments, endpoint.segments)

    @classmethod
    async def connect(cls, endpoint: Endpoint, client: str, calls: Calls | None = None) -> Self | None:
        """Connect. None if the socket cannot be reached from here (in a container of its own, say), or if it is another
        user's."""
        link = cls(endpoint, client, calls or calls_of(Store))
        try:
            connection = connect_path(Path(endpoint.path))
        except OSError:
            return None
        await asyncio.get_running_loop().create_unix_connection(lambda: link.wire, sock=connection)
        link.wire.send(HELLO, Hello(client))
        return link

    def lease_renewer(self) -> LeaseRenewer:
        return renewer_over_socket(Path(self._endpoint.path), self._client)


class OverTcp(Connected):
    """A connection from another machine: the kernel notices when that or the link to it is gone, within `SILENCE_S`."""

    def __init__(self, endpoint: Endpoint, client: str, calls: Calls, node: RowsNode | None) -> None:
        places = node.places if node is not None else ()
        # What shared memory has no room for goes to the store by value: the directory on disk is its server's.
        super().__init__(endpoint, client, calls, node.id if node is not None else None, places, places[:1])

    @classmethod
    async def connect(
        cls, endpoint: Endpoint, client: str, calls: Calls | None = None, node: RowsNode | None = None
    ) -> Self:
        """Connect. `node`: what this one has for large batches. Raises `StoreUnreachable`."""
        assert endpoint.address is not None
        link = cls(endpoint, client, calls or calls_of(Store), node)
        tries = 0
        while True:
            try:
                arguments = endpoint.address, STORE_SERVICE, endpoint.token, CONNECT_S
                connection = await asyncio.to_thread(connect, *arguments)  # the event loop goes on meanwhile
                break
            except OSError as error:
                tries += 1
                if not isinstance(error, ConnectionResetError) or tries == TRIES:
                    raise StoreUnreachable(
                        f"no connection to the store at {endpoint.address}: {error}. See that its run is still there, "
                        "and that a firewall lets this machine through: cluster.ports=[20000,20099] keeps to a range "
                        "of ports."
                    ) from None
            await asyncio.sleep(random.uniform(0, LONGEST_PAUSE_S))
        connection.socket.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: link.wire, sock=connection.socket)
        link.wire.send(HELLO, Hello(client, link._node or ""))
        return link

    def lease_renewer(self) -> LeaseRenewer:
        return renewer_over_tcp(self._endpoint, self._client)

    def _explained(self, error: Exception | None) -> PartnerGone | StoreUnreachable:
        if error is None or isinstance(error, ConnectionError):  # its machine has said so
            return super()._explained(error)
        return StoreUnreachable(
            f"nothing was heard of the store at {self._where} for {SILENCE_S:g} s ({error}): its machine is gone, or "
            "the network between. See that both are well, and that no firewall drops connections that are idle; then "
            "resume the run."
        )

    @property
    def _where(self) -> str:
        return str(self._endpoint.address)
