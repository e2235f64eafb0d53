"""The one place that knows where the store is: in this process, on this machine, or on another.

On the store's machine calls go over its socket (`service/server.py`), from other machines over TCP. Large batches lie
in files of their writer's machine (`data/segments.py`): read in place there, pulled from elsewhere (`data/remote/`). A
store actor is asked through Ray where that is, and nothing else. The connections are in `connected.py`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from penstock.conf.errors import PartnerGone, StoreDied, StoreError
from penstock.store.client.connected import HAS_LEFT, OverSocket, OverTcp
from penstock.store.client.heartbeat import InProcessRenewer, LeaseRenewer
from penstock.store.data.arena import Slot
from penstock.store.data.layout import Inline, Placed, SentBatch
from penstock.store.data.payload import Payload
from penstock.store.errors import StoreUnreachable
from penstock.store.service.messages import refs_of, with_values
from penstock.store.service.server import Endpoint
from penstock.store.service.store import Store

RETRY_S = 60.0
"""Seconds for which a store's actor is asked while the network is down."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class Link(Protocol):
    """Calls the store's methods by name, and moves batches."""

    async def call(self, method: str, *args: Any) -> Any: ...

    async def reserve(self, nbytes: int) -> Slot | None:
        """Shared memory for a batch of about so many bytes; None where it goes by value."""

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: Slot | None = None) -> SentBatch:
        """Put a batch where the store takes it from, the slot if it lies there: the batch, or the note where it is."""

    async def fetch(self, payload: Payload) -> Payload:
        """Return the payload of an answer with the values of all batches that it names. If that fails, none of those
        batches is kept from being written anew."""

    def skip(self, refs: Sequence[Placed]) -> None:
        """Tell the store that batches named by an answer will not be read."""

    def lease_renewer(self) -> LeaseRenewer:
        """The renewer of leases for the thread of a heartbeat. Any thread may ask, once there was a call."""

    async def leave(self) -> None:
        """Leave as if this end's process had ended. What waits for an answer over a connection raises `PartnerGone`."""


def link_to(handle: "Store | Any", client: str, node: str | None = None) -> Link:
    """Make a link to `handle`: a `Store`, an endpoint of one, or a Ray actor handle of one.
    `client`: the unique name of this end. `node`: Ray's id of its machine; None: to be asked for."""
    if isinstance(handle, Store):
        return InProcess(handle, client)
    if isinstance(handle, Endpoint):
        return Lazy(lambda: find_endpoint(handle, client, node))
    return Lazy(lambda: find_actor(handle, client, node))


class InProcess:
    """A link that calls the store directly. Batches go by value: there is nothing to place and nothing to fetch."""

    def __init__(self, store: Store, client: str) -> None:
        self._store, self._client = store, client
        self._has_left = False

    async def call(self, method: str, *args: Any) -> Any:
        if self._has_left:
            raise PartnerGone(HAS_LEFT)
        value, segments = await getattr(self._store, method)(*args), self._store.segments
        refs = refs_of(value)
        if segments is None or not refs:
            return value
        held = segments.hold(refs)
        try:
            if any(placed.node for placed in refs):
                return await asyncio.to_thread(with_values, value, held.resolve)
            return with_values(value, held.resolve)
        finally:
            held.release()

    async def reserve(self, nbytes: int) -> Slot | None:
        return None

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: Slot | None = None) -> SentBatch:
        return Inline(batch)

    async def fetch(self, payload: Payload) -> Payload:
        return payload

    def skip(self, refs: Sequence[Placed]) -> None:
        pass

    def lease_renewer(self) -> LeaseRenewer:
        return InProcessRenewer(self._store, self._client)

    async def leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            await self._store.left(self._client)


class Lazy:
    """A link that is made by the first call."""

    def __init__(self, find: Callable[[], Awaitable[Link]]) -> None:
        self._find = find
        self._finding = asyncio.Lock()
        self._has_left = False
        self.found: Link | None = None

    async def call(self, method: str, *args: Any) -> Any:
        return await (await self._link()).call(method, *args)

    async def reserve(self, nbytes: int) -> Slot | None:
        return await (await self._link()).reserve(nbytes)

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: Slot | None = None) -> SentBatch:
        return await (await self._link()).ship(batch, inline_bytes, slot)

    async def fetch(self, payload: Payload) -> Payload:
        assert self.found is not None
        return await self.found.fetch(payload)

    def skip(self, refs: Sequence[Placed]) -> None:
        assert self.found is not None
        self.found.skip(refs)

    def lease_renewer(self) -> LeaseRenewer:
        assert self.found is not None
        return self.found.lease_renewer()

    async def leave(self) -> None:
        self._has_left = True
        if self.found is not None:
            await self.found.leave()

    async def _link(self) -> Link:
        if self.found is None:
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
    link = await OverSocket.connect(endpoint, client) if shares_memory else None
    if link is not None:
        return link
    if endpoint.address is None:
        raise PartnerGone(f"no store listens at {endpoint.path}.")
    return await OverTcp.connect(endpoint, client, node=None if shares_memory else endpoint.nodes.by_id.get(node))


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
