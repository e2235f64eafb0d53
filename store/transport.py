"""The one place that knows where the store is: in this process, on this machine, or behind Ray.

On the machine of the store's actor calls go over its socket (`server.py`) and large batches through files in shared
memory (`segments.py`). From other machines calls go through Ray, and so does the data, by value. Used by
`store/client.py`.
"""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from penstock.conf.errors import PartnerGone, StoreError
from penstock.store import peers
from penstock.store.arena import Arena, Slot
from penstock.store.calls import refs_of
from penstock.store.layout import Placed
from penstock.store.mappings import Mappings
from penstock.store.segments import Notice
from penstock.store.server import Endpoint
from penstock.store.soon import Soon
from penstock.store.store import Store
from penstock.store.wire import Wire


class Link(Protocol):
    """Calls the store's methods by name, and moves batches."""

    async def call(self, method: str, *args: Any) -> Any: ...

    async def reserve(self, nbytes: int) -> Slot | None:
        """Shared memory for a batch of about so many bytes; None where it goes by value."""

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: Slot | None = None) -> Any:
        """Put a batch where the store takes it from, the slot if it lies there: the batch, or the note where it is."""

    async def fetch(self, refs: Sequence[Any]) -> list[pa.RecordBatch]:
        """Read what an answer names."""


def link_to(handle: "Store | Any", client: str) -> Link:
    """`handle`: a `Store`, or a Ray actor handle of one. `client`: the unique name of this end."""
    return InProcess(handle) if isinstance(handle, Store) else ToActor(handle, client)


class InProcess:
    """Direct calls; all values are in the answers."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def call(self, method: str, *args: Any) -> Any:
        return await getattr(self._store, method)(*args)

    async def reserve(self, nbytes: int) -> Slot | None:
        return None

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: Slot | None = None) -> Any:
        return batch

    async def fetch(self, refs: Sequence[Any]) -> list[pa.RecordBatch]:
        return []


class ToActor:
    """A store actor: by its socket if that can be reached, else through Ray. Found out by the first call."""

    def __init__(self, handle: Any, client: str) -> None:
        self._handle, self._client = handle, client
        self._link: Link | None = None
        self._finding = asyncio.Lock()

    async def call(self, method: str, *args: Any) -> Any:
        link = self._link or await self._find()
        return await link.call(method, *args)

    async def reserve(self, nbytes: int) -> Slot | None:
        return await (self._link or await self._find()).reserve(nbytes)

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: Slot | None = None) -> Any:
        return await (self._link or await self._find()).ship(batch, inline_bytes, slot)

    async def fetch(self, refs: Sequence[Any]) -> list[pa.RecordBatch]:
        return await (self._link or await self._find()).fetch(refs)

    async def _find(self) -> Link:
        async with self._finding:
            if self._link is None:
                import ray

                through_ray = OverRay(self._handle)
                endpoint: Endpoint = await through_ray.call("endpoint")
                link: Link = through_ray
                if endpoint.node == ray.get_runtime_context().get_node_id():
                    link = await OverSocket.connect(endpoint, self._client) or through_ray
                self._link = link
        return self._link


class OverRay:
    """Actor calls. What the store keeps in segments is read by it and comes by value."""

    def __init__(self, handle: Any) -> None:
        import ray

        self._ray = ray
        self._handle = handle

    async def call(self, method: str, *args: Any) -> Any:
        try:
            return await getattr(self._handle, method).remote(*args)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, StoreError):
                raise error.cause from None
            raise
        except self._ray.exceptions.RayActorError as error:
            raise PartnerGone(f"the store's process is gone: {error}") from None

    async def reserve(self, nbytes: int) -> Slot | None:
        return None

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: Slot | None = None) -> Any:
        return batch

    async def fetch(self, refs: Sequence[Any]) -> list[pa.RecordBatch]:
        return list(await self.call("read", list(refs))) if refs else []


class OverSocket:
    """Calls over the store's socket; one connection a client, any number of calls at a time."""

    def __init__(self, endpoint: Endpoint, client: str) -> None:
        self._endpoint, self._client = endpoint, client
        self._wire = Wire(self._hear, self._gone)
        self._say_over_soon = Soon(asyncio.get_running_loop(), self._say_over)
        self._arena = Arena(endpoint.segments, client)
        self._mappings = Mappings(endpoint.segments, self._say_over_soon)
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}

    @classmethod
    async def connect(cls, endpoint: Endpoint, client: str) -> "OverSocket | None":
        """None if the socket cannot be reached from here: a container of its own, say. Or if it is another user's:
        answers are pickles, and what is not authenticated is not read."""
        link = cls(endpoint, client)
        try:
            connection = peers.connect(Path(endpoint.path))
        except OSError:
            return None
        await asyncio.get_running_loop().create_unix_connection(lambda: link._wire, sock=connection)
        link._wire.send(client)
        return link

    async def call(self, method: str, *args: Any) -> Any:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._wire.send((number, method, args, self._mappings.over()))
            return await answer
        except ConnectionError:
            raise self._lost() from None
        finally:
            self._answers.pop(number, None)

    async def reserve(self, nbytes: int) -> Slot | None:
        return self._arena.reserve(nbytes)

    async def ship(self, batch: pa.RecordBatch, inline_bytes: int, slot: Slot | None = None) -> Any:
        if slot is None and batch.nbytes <= inline_bytes:
            return batch
        try:
            return self._arena.place(batch, slot)
        except OSError:  # shared memory and disk are full: the store is asked to keep it, and says so
            if slot is not None:  # its pages are written again while the batch is under way
                batch = batch.take(pa.array(range(batch.num_rows)))
                slot.give_back()
            return batch

    async def fetch(self, refs: Sequence[Placed]) -> list[pa.RecordBatch]:
        return [self._mappings.read(placed) for placed in refs]

    def _say_over(self) -> None:
        """No call has taken along which readings have ended: the store would hold on to their files."""
        over = self._mappings.over()
        if over and self._wire.is_open:
            self._wire.send((None, "", (), over))

    def _hear(self, message: tuple[int | None, Any, BaseException | None, Notice | None]) -> None:
        number, value, error, notice = message
        if notice is not None:
            self._arena.recycled(notice.recycled)
            self._arena.gone(notice.gone)
            self._mappings.gone(notice.gone)
        if number is None:
            return
        answer = self._answers.get(number)
        if answer is None or answer.done():
            for placed in refs_of(value):  # nobody will read it: the use that the store has counted ends
                self._mappings.read(placed)
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def _gone(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._lost())

    def _lost(self) -> PartnerGone:
        return PartnerGone(f"the store's process is gone: {self._endpoint.path} has closed.")
