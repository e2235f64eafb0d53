"""Clients' links to the store: the one place that knows where it is, in this process, on this machine, or on another.

On the store's machine calls go over its socket (`service/store_server.py`), from other machines over TCP. Large batches
lie in files of their writer's machine (`data/segments.py`): read in place there, pulled from elsewhere
(`data/remote_rows.py`). A store actor is asked through Ray for its address, and for nothing else.

A client has one connection, with any number of calls at a time. A client whose connection has ended is one that has
left: what it held has gone back, so calls are not repeated.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import pyarrow as pa
from msgspec import Raw

from penstock.conf.errors import NotPlainData, PartnerGone, StoreDied
from penstock.network.connection import SILENCE_S, Connection, connect, connect_path
from penstock.store.client.heartbeat import ConnectionRenewer, InProcessRenewer, LeaseRenewer
from penstock.store.data.block_index import Payload
from penstock.store.data.codec import InlineBatch, Malformed, SegmentRef, SentBatch
from penstock.store.data.remote_rows import RemoteReader, RowsNode
from penstock.store.data.segment_files import Arena, DebouncedCall, SegmentMappings, SegmentSlot
from penstock.store.data.segments import SegmentNotice
from penstock.store.errors import StoreError, StoreUnreachable
from penstock.store.service.store import Store
from penstock.store.service.store_server import STORE_SERVICE, Endpoint
from penstock.store.service.wire import (
    ANSWER,
    HELLO,
    MESSAGE,
    CallTypes,
    ClientMessage,
    Hello,
    StoreAnswer,
    Wire,
    calls_of,
    refs_of,
    with_values,
)

RETRY_S = 60.0
"""Seconds for which a store's actor is asked while the network is down."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
CONNECT_S = 10.0
"""Seconds for the handshake; a packet that is lost is sent again within it."""
TRIES = 5
"""Attempts of a handshake: the store hangs up when all machines of a run come at once."""
LONGEST_RETRY_S = 1.0
HAS_LEFT = "this client has left its store. Make another to speak to it."


class Link(Protocol):
    """Calls the store's methods by name, and moves batches."""

    async def call(self, method: str, *args: Any) -> Any: ...

    def reserve(self, nbytes: int) -> SegmentSlot | None:
        """Reserve shared memory for a batch of about so many bytes; None where it goes by value. This and the other
        methods below are called after the first `call`."""

    def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: SegmentSlot | None = None) -> SentBatch:
        """Put a batch where the store takes it from, the slot if it lies there: the batch, or the note where it is."""

    async def fetch(self, payload: Payload) -> Payload:
        """Return the payload of an answer with the values of all batches that it names. If that fails, none of those
        batches is kept from being written anew."""

    def skip(self, refs: Sequence[SegmentRef]) -> None:
        """Tell the store that batches named by an answer will not be read."""

    def lease_renewer(self) -> LeaseRenewer:
        """The renewer of leases for the thread of a heartbeat. Any thread may ask, once there was a call."""

    async def leave(self) -> None:
        """Leave as if this end's process had ended. What waits for an answer over a connection raises `PartnerGone`."""


def link_to(handle: "Store | Any", client: str, node: str | None = None) -> Link:
    """Make a link to `handle`: a `Store`, an endpoint of one, or a Ray actor handle of one.
    `client`: the unique name of this end. `node`: Ray's id of its machine; None: to be asked for."""
    if isinstance(handle, Store):
        return InProcessLink(handle, client)
    if isinstance(handle, Endpoint):
        return LazyLink(lambda: find_endpoint(handle, client, node))
    return LazyLink(lambda: find_actor(handle, client, node))


class InProcessLink:
    """A link that calls the store directly. Batches go by value: there is nothing to place and nothing to fetch."""

    def __init__(self, store: Store, client: str) -> None:
        self._store, self._client = store, client
        self._has_left = False

    async def call(self, method: str, *args: Any) -> Any:
        if self._has_left:
            raise PartnerGone(HAS_LEFT)
        value, segments = await getattr(self._store, method)(*args), self._store.segments
        if segments is None or not (refs := refs_of(value)):
            return value
        with segments.held(refs) as resolve:
            if any(placed.node for placed in refs):
                return await asyncio.to_thread(with_values, value, resolve)
            return with_values(value, resolve)

    def reserve(self, nbytes: int) -> SegmentSlot | None:
        return None

    def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: SegmentSlot | None = None) -> SentBatch:
        return InlineBatch(batch)

    async def fetch(self, payload: Payload) -> Payload:
        return payload

    def skip(self, refs: Sequence[SegmentRef]) -> None:
        pass

    def lease_renewer(self) -> LeaseRenewer:
        return InProcessRenewer(self._store, self._client)

    async def leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            await self._store.left(self._client)


class LazyLink:
    """A link that is made by the first call."""

    def __init__(self, find: Callable[[], Awaitable[Link]]) -> None:
        self._find = find
        self._finding = asyncio.Lock()
        self._has_left = False
        self.found: Link | None = None

    async def call(self, method: str, *args: Any) -> Any:
        link = self.found or await self._find_link()
        return await link.call(method, *args)

    def __getattr__(self, name: str) -> Any:
        """The other methods are those of the link, once there was a call."""
        return getattr(self.found, name)

    async def leave(self) -> None:
        self._has_left = True
        if self.found is not None:
            await self.found.leave()

    async def _find_link(self) -> Link:
        async with self._finding:
            self.found = self.found or await self._find()
        if self._has_left:  # meanwhile
            await self.found.leave()
        return self.found


async def find_endpoint(endpoint: Endpoint, client: str, node: str | None = None) -> Link:
    """Connect to an endpoint. `node`: Ray's id of this machine; None: the store's. There its socket can be reached,
    unless this is a container of its own. Raises `PartnerGone`, `StoreUnreachable`."""
    node = endpoint.node if node is None else node
    shares_memory = endpoint.nodes.shares_memory(node, endpoint.node)
    link = await SocketLink.connect(endpoint, client) if shares_memory else None
    if link is not None:
        return link
    if endpoint.address is None:
        raise PartnerGone(f"no store listens at {endpoint.path}.")
    return await TcpLink.connect(endpoint, client, node=None if shares_memory else endpoint.nodes.by_id.get(node))


async def find_actor(handle: Any, client: str, node: str | None) -> Link:
    """Connect to a store actor. Raises as `find_endpoint` and `endpoint_of` do."""
    import ray

    endpoint = await endpoint_of(handle)
    here = node or ray.get_runtime_context().get_node_id()
    return await find_endpoint(endpoint, client, here)


async def endpoint_of(handle: Any, patience_s: float = RETRY_S) -> Endpoint:
    """The endpoint of an actor's store, asked for through Ray, which knows which process asks. Raises `StoreDied` if
    its process is dead, and `StoreUnreachable` if it does not answer for so long."""
    from ray import exceptions as of_ray

    give_up, pause_s = time.monotonic() + patience_s, FIRST_PAUSE_S
    while True:
        try:
            endpoint: Endpoint = await asyncio.wrap_future(handle.endpoint.remote().future())
            return endpoint
        except of_ray.RayTaskError as error:
            if isinstance(error.cause, StoreError):
                raise error.cause from None
            raise
        except (of_ray.ActorUnavailableError, of_ray.ObjectLostError) as error:
            if time.monotonic() + pause_s > give_up:
                raise StoreUnreachable(
                    f"the store's actor could not be reached through Ray for {patience_s:g} s: {error} See whether its "
                    "machine and the network are well, and resume the run."
                ) from None
        except (of_ray.RayActorError, of_ray.OutOfMemoryError) as error:
            raise StoreDied(f"the store's process is gone: {error}") from None
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class ConnectionLink:
    """Calls over a connection. Large batches lie on the writer's node: on the reader's own node they are mapped, from
    another they are pulled."""

    _where: object
    """The address of the store, for people."""

    def __init__(
        self,
        endpoint: Endpoint,
        client: str,
        calls: CallTypes,
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
        self._report_ended_soon = DebouncedCall(asyncio.get_running_loop(), self._report_ended)
        self._arena = Arena(writing, client, node or "") if writing else None
        self._mappings = SegmentMappings(reading, self._report_ended_soon)
        self._remote: RemoteReader | None = None

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
            raise self._new_loss_error() from None
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = method, answer
        try:
            return await answer
        except asyncio.CancelledError:
            if not answer.cancelled() and answer.exception() is None:  # it arrived in the same moment
                self.skip(refs_of(answer.result()))
            raise

    def reserve(self, nbytes: int) -> SegmentSlot | None:
        return self._arena.reserve(nbytes) if self._arena is not None else None

    def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: SegmentSlot | None = None) -> SentBatch:
        if self._arena is None or (slot is None and batch.nbytes <= inline_bytes):
            return InlineBatch(batch)
        try:
            return self._arena.place(batch, slot)
        except OSError:  # there is no room: the store is asked to keep it, and says so
            if slot is not None:  # its pages are written again while the batch is under way
                batch = pa.ipc.read_record_batch(batch.serialize(), batch.schema)  # a copy
                slot.give_back()
            return InlineBatch(batch)

    async def fetch(self, payload: Payload) -> Payload:
        refs = payload.refs
        remote = [placed for placed in refs if placed.node != self._node]
        if not remote:
            return payload.with_batches(self._mappings.read_all(refs)) if refs else payload
        try:
            mapped = self._mappings.read_all([placed for placed in refs if placed.node == self._node])
            payload = await self._remote_reader().fetch(payload)
            return payload.with_batches(mapped)
        finally:
            self.skip(remote)  # their values are here, or will not be read

    def skip(self, refs: Sequence[SegmentRef]) -> None:
        """Tell the store that batches named by an answer will not be read."""
        self._mappings.skip(placed.segment for placed in refs)

    async def leave(self) -> None:
        self._lost = self._lost or PartnerGone(HAS_LEFT)
        self.wire.abort()

    def _remote_reader(self) -> RemoteReader:
        if self._remote is None:
            endpoint = self._endpoint
            own = {"": endpoint.address} if endpoint.address is not None else {}
            self._remote = RemoteReader(endpoint.nodes.addresses | own, endpoint.token, self._node)
        return self._remote

    def _report_ended(self) -> None:
        """Tell the store which readings have ended, where no call has taken that along: the store would hold on to
        their files."""
        ended = self._mappings.ended()
        if ended and self.wire.is_open:
            self.wire.send(MESSAGE, ClientMessage(0, None, ended))

    def _apply_notice(self, notice: SegmentNotice) -> None:
        """Apply what the store says of segments."""
        if self._arena is not None:
            self._arena.take_back(notice.recycled)
            self._arena.forget(notice.removed)
        self._mappings.forget(notice.removed)

    def _on_message(self, kind: int, body: memoryview, area: pa.Buffer) -> None:
        if kind != ANSWER:
            raise Malformed(f"the store sends a message of kind {kind}.")
        answered = self.wire.codec.decode(StoreAnswer[Raw], body, area)
        if answered.notice is not None:
            self._apply_notice(answered.notice)
        if answered.number is None:
            return
        if answered.number not in self._answers:
            raise Malformed(f"the store answers call {answered.number}, which is none.")
        method, answer = self._answers[answered.number]
        value = None
        if answered.error is None:
            value = self.wire.codec.decode(self._calls.result(method), answered.value, area)
        del self._answers[answered.number]
        if answer.done():
            self.skip(refs_of(value))  # the caller is gone: the reading that the store has counted ends
        elif answered.error is None:
            answer.set_result(value)
        else:
            answer.set_exception(answered.error)

    def _on_lost(self, error: Exception | None) -> None:
        self._lost = self._lost or self._loss_reason(error)
        if self._remote is not None:
            self._remote.close()
        for _, answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._new_loss_error())

    def _loss_reason(self, error: Exception | None) -> PartnerGone | StoreUnreachable:
        return PartnerGone(f"the store's process is gone: {self._where} has closed{f' ({error})' if error else ''}.")

    def _new_loss_error(self) -> StoreError | PartnerGone:
        """A new error for each caller that gets it: each adds its traceback."""
        lost = self._lost or self._loss_reason(None)
        return type(lost)(str(lost))


class SocketLink(ConnectionLink):
    """A connection over the store's socket, on its machine."""

    def __init__(self, endpoint: Endpoint, client: str, calls: CallTypes) -> None:
        self._where = endpoint.path
        super().__init__(endpoint, client, calls, "", endpoint.segments, endpoint.segments)

    @classmethod
    async def connect(cls, endpoint: Endpoint, client: str, calls: CallTypes | None = None) -> Self | None:
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
        path = Path(self._endpoint.path)
        return ConnectionRenewer(lambda timeout_s: Connection(connect_path(path), timeout_s), path, self._client)


class TcpLink(ConnectionLink):
    """A connection from another machine: the kernel notices when that or the link to it is gone, within `SILENCE_S`."""

    def __init__(self, endpoint: Endpoint, client: str, calls: CallTypes, node: RowsNode | None) -> None:
        self._where = endpoint.address
        places = node.places if node is not None else ()
        # What shared memory has no room for goes to the store by value: the directory on disk is its server's.
        super().__init__(endpoint, client, calls, node.id if node is not None else None, places, places[:1])

    @classmethod
    async def connect(
        cls, endpoint: Endpoint, client: str, calls: CallTypes | None = None, node: RowsNode | None = None
    ) -> Self:
        """Connect. `node`: what this one has for large batches. Raises `StoreUnreachable`."""
        assert endpoint.address is not None
        link = cls(endpoint, client, calls or calls_of(Store), node)
        tries = 0
        while True:
            try:
                arguments = endpoint.address, STORE_SERVICE, endpoint.token, CONNECT_S
                connection = await asyncio.to_thread(connect, *arguments)  # the event loop runs meanwhile
                break
            except OSError as error:
                tries += 1
                if not isinstance(error, ConnectionResetError) or tries == TRIES:
                    raise StoreUnreachable(
                        f"no connection to the store at {endpoint.address}: {error}. See that its run is still there, "
                        "and that a firewall lets this machine through: cluster.ports=[20000,20099] keeps to a range "
                        "of ports."
                    ) from None
            await asyncio.sleep(random.uniform(0, LONGEST_RETRY_S))
        connection.socket.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: link.wire, sock=connection.socket)
        link.wire.send(HELLO, Hello(client, link._node or ""))
        return link

    def lease_renewer(self) -> LeaseRenewer:
        address, token = self._endpoint.address, self._endpoint.token
        assert address is not None

        def connected(timeout_s: float) -> Connection:
            return connect(address, STORE_SERVICE, token, timeout_s, silence_s=timeout_s)

        return ConnectionRenewer(connected, address, self._client)

    def _loss_reason(self, error: Exception | None) -> PartnerGone | StoreUnreachable:
        if error is None or isinstance(error, ConnectionError):  # its machine has reported it
            return super()._loss_reason(error)
        return StoreUnreachable(
            f"nothing was heard of the store at {self._where} for {SILENCE_S:g} s ({error}): its machine is gone, or "
            "the network between. See that both are well, and that no firewall drops connections that are idle; then "
            "resume the run."
        )
