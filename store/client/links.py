"""The one place that knows where the store is: in this process, on this machine, or behind Ray.

On the machine of the store's actor calls go over its socket (`service/server.py`) and large batches through files in
shared memory (`data/segments.py`). From other machines calls go through Ray, and so does the data, by value. Used by
`client.py`.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from msgspec import Raw

from penstock.conf.errors import NotPlainData, PartnerGone, StoreError
from penstock.store.client import pulse
from penstock.store.client.pulse import Pulse
from penstock.store.data.arena import Arena, Slot
from penstock.store.data.codec import Malformed
from penstock.store.data.layout import Inline, Parcel, Placed
from penstock.store.data.mappings import Mappings
from penstock.store.data.soon import Soon
from penstock.store.errors import StoreUnreachable
from penstock.store.service import peers
from penstock.store.service.calls import refs_of
from penstock.store.service.messages import ANSWER, HELLO, SAID, Answer, Calls, Hello, Said, calls_of
from penstock.store.service.server import Endpoint
from penstock.store.service.store import Store
from penstock.store.service.wire import Wire

ONCE_ONLY = ("put", "lease", "snapshot")
"""Calls that may not be repeated when it is not known whether they were carried out: groups would be admitted twice,
rows be leased to nobody, another moment than that of the cut be written. All others change nothing the second time."""
RETRY_S = 60.0
"""Calls through Ray are repeated for so long while the network is down."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class Link(Protocol):
    """Calls the store's methods by name, and moves batches."""

    async def call(self, method: str, *args: Any) -> Any: ...

    async def reserve(self, nbytes: int) -> Slot | None:
        """Shared memory for a batch of about so many bytes; None where it goes by value."""

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: Slot | None = None) -> Parcel:
        """Put a batch where the store takes it from, the slot if it lies there: the batch, or the note where it is."""

    def fetch(self, refs: Sequence[Placed]) -> list[pa.RecordBatch]:
        """Read what an answer names: all of it, or nothing is kept from being written anew."""

    def skip(self, refs: Sequence[Placed]) -> None:
        """What an answer names will not be read."""

    def pulse(self) -> Pulse:
        """A way to the store for the thread of a heartbeat. Any thread may ask, once there was a call."""


def link_to(handle: "Store | Any", client: str, node: str | None = None) -> Link:
    """`handle`: a `Store`, an endpoint of one, or a Ray actor handle of one.
    `client`: the unique name of this end. `node`: Ray's id of its machine; None: to be asked for."""
    if isinstance(handle, Store):
        return InProcess(handle, client)
    if isinstance(handle, Endpoint):
        return Lazy(lambda: find_endpoint(handle, client))
    return Lazy(lambda: find_actor(handle, client, node))


class ByValue:
    """Data goes with the call or the answer: there is nothing to place and nothing to fetch."""

    async def reserve(self, nbytes: int) -> Slot | None:
        return None

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: Slot | None = None) -> Parcel:
        return Inline(batch)

    def fetch(self, refs: Sequence[Placed]) -> list[pa.RecordBatch]:
        return []

    def skip(self, refs: Sequence[Placed]) -> None:
        pass


class InProcess(ByValue):
    """Direct calls."""

    def __init__(self, store: Store, client: str) -> None:
        self._store, self._client = store, client

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._store, method)(*args)

    def pulse(self) -> Pulse:
        return pulse.InProcess(self._store, self._client)


class Lazy:
    """A link that the first call finds."""

    def __init__(self, find: Callable[[], Awaitable[Link]]) -> None:
        self._find = find
        self._finding = asyncio.Lock()
        self.found: Link | None = None

    async def call(self, method: str, *args: Any) -> Any:
        return await (await self._link()).call(method, *args)

    async def reserve(self, nbytes: int) -> Slot | None:
        return await (await self._link()).reserve(nbytes)

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: Slot | None = None) -> Parcel:
        return await (await self._link()).ship(batch, inline_bytes, slot)

    def fetch(self, refs: Sequence[Placed]) -> list[pa.RecordBatch]:
        assert self.found is not None
        return self.found.fetch(refs)

    def skip(self, refs: Sequence[Placed]) -> None:
        assert self.found is not None
        self.found.skip(refs)

    def pulse(self) -> Pulse:
        assert self.found is not None
        return self.found.pulse()

    async def _link(self) -> Link:
        if self.found is None:
            async with self._finding:
                self.found = self.found or await self._find()
        return self.found


async def find_endpoint(endpoint: Endpoint, client: str) -> Link:
    """By its socket alone. Raises `PartnerGone`."""
    link = await OverSocket.connect(endpoint, client)
    if link is None:
        raise PartnerGone(f"no store listens at {endpoint.path}.")
    return link


async def find_actor(handle: Any, client: str, node: str | None) -> Link:
    """A store actor: by its socket if that can be reached, else through Ray."""
    import ray

    through_ray = OverRay(handle, client)
    endpoint: Endpoint = await through_ray.call("endpoint")
    if endpoint.node != (node or ray.get_runtime_context().get_node_id()):
        return through_ray
    return await OverSocket.connect(endpoint, client) or through_ray


class OverRay(ByValue):
    """Actor calls."""

    def __init__(self, handle: Any, client: str, patience_s: float = RETRY_S) -> None:
        """`patience_s`: how long calls that may be repeated are, while the actor cannot be reached."""
        import ray

        self._errors = ray.exceptions
        self._handle, self._client, self._patience_s = handle, client, patience_s

    async def call(self, method: str, *args: Any) -> Any:
        """Raises `StoreError` as the store does, `StoreUnreachable` if it is not known whether the call was carried
        out, `PartnerGone` if the store's process is gone."""
        give_up = time.monotonic() + self._patience_s
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return await asyncio.shield(asyncio.wrap_future(getattr(self._handle, method).remote(*args).future()))
            except self._errors.RayTaskError as error:
                if isinstance(error.cause, StoreError):
                    raise error.cause from None
                raise
            except (self._errors.ActorUnavailableError, self._errors.ObjectLostError) as error:
                if method in ONCE_ONLY or time.monotonic() + pause_s > give_up:
                    raise _unreachable(method, error, self._patience_s) from None
            except self._errors.RayActorError as error:
                raise PartnerGone(f"the store's process is gone: {error}") from None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def pulse(self) -> Pulse:
        return pulse.OverRay(self._handle, self._client)


def _unreachable(method: str, error: Exception, patience_s: float) -> StoreUnreachable:
    done = (
        "is not repeated, since that could do it twice" if method in ONCE_ONLY else f"was repeated for {patience_s} s"
    )
    return StoreUnreachable(
        f"the store's actor cannot be reached, and call {method!r} {done}: {error} See whether its machine and the "
        "network are well, and resume the run."
    )


class OverSocket:
    """Calls over the store's socket; one connection a client, any number of calls at a time."""

    def __init__(self, endpoint: Endpoint, client: str, calls: Calls) -> None:
        self._endpoint, self._client = endpoint, client
        self._calls = calls
        self._wire = Wire(self._hear, self._gone)
        self._say_ended_soon = Soon(asyncio.get_running_loop(), self._say_ended)
        self._arena = Arena(endpoint.segments, client)
        self._mappings = Mappings(endpoint.segments, self._say_ended_soon)
        self._numbers = itertools.count()
        self._answers: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        """Method and caller of each call that has no answer yet."""

    @classmethod
    async def connect(cls, endpoint: Endpoint, client: str, calls: Calls | None = None) -> "OverSocket | None":
        """None if the socket cannot be reached from here: a container of its own, say. Or if it is another user's."""
        link = cls(endpoint, client, calls or calls_of(Store))
        try:
            connection = peers.connect(Path(endpoint.path))
        except OSError:
            return None
        await asyncio.get_running_loop().create_unix_connection(lambda: link._wire, sock=connection)
        link._wire.send(HELLO, Hello(client))
        return link

    async def call(self, method: str, *args: Any) -> Any:
        number, request = next(self._numbers), self._calls.request(method, args)
        ended = self._mappings.ended()
        try:
            self._wire.send(SAID, Said(number, request, ended))
        except NotPlainData:
            self._mappings.skip(ended)  # what has ended is told with the next call
            raise
        except ConnectionError:
            raise self._lost() from None
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = method, answer
        return await answer

    async def reserve(self, nbytes: int) -> Slot | None:
        return self._arena.reserve(nbytes)

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: Slot | None = None) -> Parcel:
        if slot is None and batch.nbytes <= inline_bytes:
            return Inline(batch)
        try:
            return self._arena.place(batch, slot)
        except OSError:  # shared memory and disk are full: the store is asked to keep it, and says so
            if slot is not None:  # its pages are written again while the batch is under way
                batch = batch.take(pa.array(range(batch.num_rows)))
                slot.give_back()
            return Inline(batch)

    def fetch(self, refs: Sequence[Placed]) -> list[pa.RecordBatch]:
        batches: list[pa.RecordBatch] = []
        try:
            for placed in refs:
                batches.append(self._mappings.read(placed))
        finally:
            self.skip(refs[len(batches) + 1 :])  # after one that cannot be read
        return batches

    def skip(self, refs: Sequence[Placed]) -> None:
        self._mappings.skip(placed.segment for placed in refs)

    def pulse(self) -> Pulse:
        return pulse.OverSocket(self._endpoint.path, self._client)

    def _say_ended(self) -> None:
        """No call has taken along which readings have ended: the store would hold on to their files."""
        ended = self._mappings.ended()
        if ended and self._wire.is_open:
            self._wire.send(SAID, Said(0, None, ended))

    def _hear(self, kind: int, body: memoryview, area: pa.Buffer) -> None:
        if kind != ANSWER:
            raise Malformed(f"the store sends a message of kind {kind}.")
        heard = self._wire.codec.decode(Answer[Raw], body, area)
        if (notice := heard.notice) is not None:
            self._arena.recycled(notice.recycled)
            self._arena.forget(notice.removed)
            self._mappings.forget(notice.removed)
        if heard.number is None:
            return
        if heard.number not in self._answers:
            raise Malformed(f"the store answers call {heard.number}, which is none.")
        method, answer = self._answers[heard.number]
        value = None
        if heard.error is None:
            value = self._wire.codec.decode(self._calls.result(method), heard.value, area)
        del self._answers[heard.number]
        if answer.done():
            self.skip(refs_of(value))  # nobody will read it: the use that the store has counted ends
        elif heard.error is None:
            answer.set_result(value)
        else:
            answer.set_exception(heard.error)

    def _gone(self, error: Exception | None) -> None:
        for _, answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._lost())

    def _lost(self) -> PartnerGone:
        return PartnerGone(f"the store's process is gone: {self._endpoint.path} has closed.")
