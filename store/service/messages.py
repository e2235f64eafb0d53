"""Messages between a store and its clients: one type for each method, after its signature, and one for all answers.

    client ─ Hello, then ClientMessage(number, request, …) ─▶ store        requests carry Write, LeaseRequest
    client ◀─ Answer(number, value or error, …) ───────────── store        values: Granted, …

A call can travel once it stands in `CALLS`, and nothing else can: a message that names another method, or has arguments
of other types than the method says, is refused before anything of it is used. All is plain data (`data/codec.py`):
`client/client.py` and `store.py` make it, `client/connected.py` and `server.py` carry it.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

from msgspec import Meta, Struct, defstruct
from msgspec.structs import astuple, replace

from penstock.store.data.layout import Placed, SentBatch
from penstock.store.data.payload import Payload, by_value
from penstock.store.data.segments import Notice
from penstock.store.errors import StoreError
from penstock.store.ledger.facts import Facts

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
T = TypeVar("T")
Call = tuple[str, tuple[Any, ...]]
"""Method and arguments."""
Result = tuple[Any, StoreError | None]
"""The value that a call of `many` returned, or the error that it raised."""


class Write(Struct, frozen=True, array_like=True):
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


class Granted(Struct, frozen=True, array_like=True):
    """A lease on its way to its owner."""

    lease_id: int
    stage: str
    names: tuple[str, ...]
    payload: Payload
    version: int = 0


def refs_of(value: Any) -> list[Placed]:
    """The segments that the answer to a call names."""
    return [placed for granted in _granted(value) for placed in granted.payload.refs]


def with_values(value: Any, resolve: Callable[[Payload], Payload]) -> Any:
    """Return the answer to a call for a client whose end the store would not notice: it names no segments, but has the
    values. `resolve`: reads them."""
    if isinstance(value, list):
        return [with_values(one, resolve) for one in value]
    return replace(value, payload=by_value(resolve(value.payload), []))


def _granted(value: Any) -> list[Granted]:
    together = value if isinstance(value, list) else [value]
    return [one for one in together if isinstance(one, Granted)]


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


class Answer(Struct, Generic[T], array_like=True):
    """The store's answer to the request of that number, or a message that it sends unasked."""

    number: int | None
    value: T
    error: StoreError | None = None
    notice: Notice | None = None


class Calls:
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
def calls_of(served: type) -> Calls:
    """The calls of a store."""
    return Calls(served, CALLS)


def _any_of(requests: Sequence[type[Struct]]) -> Any:
    return reduce(or_, requests)


def _request(name: str, method: Any) -> type[Struct]:
    hints = get_type_hints(method)
    fields: list[Any] = []
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        default = () if parameter.default is inspect.Parameter.empty else (parameter.default,)
        fields.append((parameter.name, hints[parameter.name], *default))
    return defstruct(name, fields, tag=name, array_like=True)
