"""Messages between a store and its clients, and the connection in an event loop that carries them.

    client ─ Hello, then ClientMessage(number, request, …) ─▶ store        requests carry WriteRequest, LeaseRequest
    client ◀─ StoreAnswer(number, value or error, …) ───────────── store        values: Grant, …

Each method in `CALLS` has a request type after its signature; a message that names another method, or has arguments of
other types, is refused before anything of it is used. All is plain data (`data/codec.py`): `client/store_client.py` and
`store.py` make it, `client/links.py` and `store_server.py` exchange it over a `Wire`.

The frames of a `Wire` are those of `network/connection.py`, whose other end may be one of these or a thread; asyncio's
own streams would copy twice what they receive.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Generic, TypeVar, cast, get_type_hints

import numpy as np
import pyarrow as pa
from msgspec import Meta, Struct, defstruct
from msgspec.structs import astuple, replace

from penstock.network.connection import HEADER, MAX_BODY
from penstock.store.data.block_index import Payload, by_value
from penstock.store.data.codec import NOTHING, Codec, Malformed, SegmentRef, SentBatch, joined
from penstock.store.data.segments import SegmentNotice
from penstock.store.errors import StoreError
from penstock.store.ledger.group import Facts

T = TypeVar("T")
CALLS = (
    "spec", "put", "withdraw_put", "lease", "withdraw", "lease_shared", "batch_ready", "complete_shared", "write",
    "drop", "release", "renew", "abandon", "settle", "lost", "served", "last_batch", "cut", "snapshot", "stats",
    "describe", "work", "close", "become_source", "catch_up", "retire", "superseded", "outcomes",
)  # fmt: skip
"""Methods that clients call."""
MANY = "many"
TOGETHER = ("withdraw", "complete_shared", "write", "drop", "release", "renew")
"""Calls that do not wait, and so may go several in one message: see `Store.many`."""
HELLO, MESSAGE, ANSWER = range(3)
"""Kinds of messages."""
WITHDRAWN = -1
"""The number of a group that its caller has withdrawn before it was admitted."""
Call = tuple[str, tuple[Any, ...]]
"""Method and arguments."""
Result = tuple[Any, StoreError | None]
"""The value that a call of `many` returned, or the error that it raised."""
SCRATCH = 1 << 16
"""Size of the buffer for small messages, in bytes."""
MAX_BYTES = 2**36
"""The largest size of all buffers of a message, in bytes; one that announces more is none of ours. Memory is taken up
as they come."""
_ALIGN = 64
_LOG = logging.getLogger("penstock")
OnMessage = Callable[[int, memoryview, pa.Buffer], None]
"""A function that takes kind, body, area, as `Codec.decode` wants them. The body is valid during the call only."""


class WriteRequest(Struct, frozen=True, array_like=True):
    """A write on its way: the columns `names` of a batch, one row for each of `row_ids`."""

    lease_id: int
    stage: str
    row_ids: list[int]
    names: list[str]
    sent: SentBatch
    facts: Facts


class LeaseRequest(Struct, frozen=True, array_like=True):
    """A client's request for leases of a stage."""

    stage: str
    max_units: int
    """The most units of one lease: samples or groups, as the stage's unit is."""
    owner: str
    """The worker's name, for people and for `abandon`."""
    max_leases: int = 1
    max_held: int = 0
    """Units that this client works on at a time, of all its leases; it asks again whenever it has fewer. 0: it asks
    when it has nothing to do."""
    num_peers: int = 1
    """Number of clients of that kind that the stage has."""
    client: str = ""
    ticket: int = 0
    """The number by which `withdraw` names the request: unique in the client, which is unique."""


class Grant(Struct, frozen=True, array_like=True):
    """A lease on its way to its owner."""

    lease_id: int
    stage: str
    names: tuple[str, ...]
    payload: Payload
    version: int = 0


def refs_of(value: Any) -> list[SegmentRef]:
    """The segments that the answer to a call names."""
    return [placed for granted in _granted(value) for placed in granted.payload.refs]


def with_values(value: Any, resolve: Callable[[Payload], Payload]) -> Any:
    """Return the answer to a call for a client whose end the store would not notice: it names no segments, but has the
    values. `resolve`: reads them."""
    if isinstance(value, list):
        return [with_values(one, resolve) for one in value]
    return replace(value, payload=by_value(resolve(value.payload)))


def _granted(value: Any) -> list[Grant]:
    together = value if isinstance(value, list) else [value]
    return [one for one in together if isinstance(one, Grant)]


class Hello(Struct, array_like=True):
    """The first message of a client: its unique name, which its segments begin with. `node`: where they lie; the
    store's own has no name."""

    client: Annotated[str, Meta(pattern=r"\A\w[\w.]*\Z")]
    node: str = ""


class ClientMessage(Struct, Generic[T], array_like=True):
    """A message of a client. Without a `request` it says no more than what has ended, and is not answered."""

    number: int
    request: T | None
    ended: list[str] = []
    """Segments, once for each reading of theirs that has ended."""


class StoreAnswer(Struct, Generic[T], array_like=True):
    """The store's answer to the request of that number, or a message that it sends unasked."""

    number: int | None
    value: T
    error: StoreError | None = None
    notice: SegmentNotice | None = None


class CallTypes:
    """The requests that one class serves."""

    def __init__(self, served: type, names: Sequence[str]) -> None:
        """Prepare the types of requests and results. `names`: of methods whose parameters and results are annotated."""
        methods = {name: getattr(served, name) for name in names}
        self._requests = {name: _request(name, method) for name, method in methods.items()}
        self._results = {name: get_type_hints(method)["return"] for name, method in methods.items()}
        together = [self._requests[name] for name in TOGETHER if name in self._requests]
        if together:
            several: Any = list.__class_getitem__(_any_of(together))
            self._requests[MANY] = defstruct(MANY, [("calls", several)], tag=MANY, array_like=True)
            self._results[MANY] = list[Result]
        self.message_type = ClientMessage[_any_of(list(self._requests.values()))]  # type: ignore[misc]

    def request(self, method: str, arguments: Sequence[Any]) -> Struct:
        """Make the request that travels. Raises `StoreError` for a call that does not."""
        if method not in self._requests:
            raise StoreError(f"the store has no call {method!r}.")
        if method == MANY:
            arguments = [[self.request(*call) for call in arguments[0]]]
        return self._requests[method](*arguments)

    def call(self, request: Struct) -> Call:
        """Return the method's name and arguments."""
        method = str(request.__struct_config__.tag)
        if method == MANY:
            return method, ([self.call(one) for one in request.calls],)  # type: ignore[attr-defined]
        return method, astuple(request)

    def result(self, method: str) -> Any:
        """Return the type of what the method returns."""
        return self._results[method]


@cache
def calls_of(served: type) -> CallTypes:
    """The calls of a store."""
    return CallTypes(served, CALLS)


def _any_of(requests: Sequence[type[Struct]]) -> Any:
    return reduce(or_, requests)


def _request(name: str, method: Any) -> type[Struct]:
    hints = get_type_hints(method)
    fields: list[Any] = []
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        default = () if parameter.default is inspect.Parameter.empty else (parameter.default,)
        fields.append((parameter.name, hints[parameter.name], *default))
    return defstruct(name, fields, tag=name, array_like=True)


class Wire(asyncio.BufferedProtocol):
    """One end of a connection. Messages are handed to `on_message` in order, the end of the connection to `on_lost`,
    with the error if it did not just close.

    A message that does not fit the scratch buffer is received into memory of its own, where its arrays stay. A
    malformed message ends the connection.
    """

    def __init__(self, on_message: OnMessage, on_lost: Callable[[Exception | None], None]) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self.codec = Codec()
        self._transport: asyncio.WriteTransport | None = None
        self._scratch = bytearray(SCRATCH)
        self._start = self._end = 0
        """Start and end of what lies in the scratch buffer and is not taken yet."""
        self._large: _LargeMessage | None = None
        """The message that is being received, if it is a large one."""
        self._failure: Exception | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    def send(self, kind: int, message: Any) -> None:
        """Hand a message to the kernel, or keep what it does not take yet. Raises `ConnectionError` when closed, and
        `NotPlainData`, before anything is sent."""
        if self._transport is None:
            raise ConnectionError("the connection is closed.")
        body, pieces, nbytes = self.codec.encode(message)
        for piece in joined(HEADER.pack(kind, len(body), nbytes) + body, pieces):
            self._transport.write(piece)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once: what the kernel has not taken yet is not sent."""
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._scratch, self._large = bytearray(), None  # whatever still refers to this end
        self._on_lost(self._failure or exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large.unfilled
        return memoryview(self._scratch)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._receive(nbytes)
        except (Malformed, MemoryError) as error:
            _LOG.warning("a connection of the store is ended: %s", error)
            self._failure = error
            self._start = self._end = 0
            self._large = None
            if self._transport is not None:
                self._transport.abort()

    def _receive(self, nbytes: int) -> None:
        if self._large is not None:
            if self._large.advance(nbytes):
                large, self._large = self._large, None
                self._on_message(large.kind, large.body, large.area)
            return
        self._end += nbytes
        scratch, length = memoryview(self._scratch), 0
        while self._end - self._start >= HEADER.size:
            kind, num_body, num_area = HEADER.unpack_from(scratch, self._start)
            if num_body > MAX_BODY or num_area > MAX_BYTES:
                raise Malformed(f"a message of {num_body} and {num_area} bytes: the other end speaks something else.")
            length = HEADER.size + num_body + num_area
            body = self._start + HEADER.size
            area, end = body + num_body, body + num_body + num_area
            if end > self._end:
                break
            values = pa.py_buffer(bytes(scratch[area:end])) if num_area else NOTHING  # its arrays stay
            self._start, length = end, 0
            self._on_message(kind, scratch[body:area], values)
        self._make_room(length)

    def _make_room(self, length: int) -> None:
        """Make room for the rest of a message of `length` bytes, 0 if that is unknown."""
        rest = self._scratch[self._start : self._end]
        if length > SCRATCH:
            self._large = _LargeMessage(rest)
            rest = bytearray()
        self._scratch[: len(rest)] = rest
        self._start, self._end = 0, len(rest)


class _LargeMessage:
    """A message that is being received."""

    def __init__(self, begun: bytearray) -> None:
        """Begin a message. `begun`: its first bytes, the header among them."""
        self.kind, num_body, num_area = HEADER.unpack_from(begun)
        self._skipped = -(num_body + HEADER.size) % _ALIGN  # so that the area is aligned
        self._memory = np.empty(self._skipped + HEADER.size + num_body + num_area, dtype=np.uint8)
        self._area_at = self._skipped + HEADER.size + num_body
        self._view = self._memory.data
        self._filled = self._skipped + len(begun)
        self._view[self._skipped : self._filled] = begun

    @property
    def unfilled(self) -> memoryview:
        return self._view[self._filled :]

    def advance(self, nbytes: int) -> bool:
        """Note received bytes. Returns whether the message is complete."""
        self._filled += nbytes
        return not len(self.unfilled)

    @property
    def body(self) -> memoryview:
        return self._view[self._skipped + HEADER.size : self._area_at]

    @property
    def area(self) -> pa.Buffer:
        return pa.py_buffer(self._memory).slice(self._area_at)
