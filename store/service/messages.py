"""The calls of a store as messages: one type for each method, after its signature, and one for all answers.

    client ─ Hello, then Said(number, request, …) ─▶ store
    client ◀─ Answer(number, value or error, …) ──── store

A call can travel once it stands in `CALLS`, and nothing else can: a message that names another method, or has arguments
of other types than the method says, is refused before anything of it is used.
"""

import inspect
from collections.abc import Sequence
from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

from msgspec import Meta, Struct, defstruct
from msgspec.structs import astuple

from penstock.store.data.segments import Notice
from penstock.store.errors import StoreError
from penstock.store.service.calls import Call, Result

CALLS = (
    "spec", "put", "withdraw_put", "lease", "withdraw", "lease_shared", "batch_ready", "complete_shared", "write",
    "drop", "release", "renew", "abandon", "settle", "lost", "published", "last_batch", "cut", "snapshot", "stats",
    "describe", "work", "close", "become_source", "catch_up", "retire", "answered",
)  # fmt: skip
"""Methods that clients call."""
MANY = "many"
TOGETHER = ("withdraw", "complete_shared", "write", "drop", "release", "renew")
"""Calls that do not wait, and so may go several in one message: see `Store.many`."""
HELLO, SAID, ANSWER = range(3)
"""Kinds of messages."""

T = TypeVar("T")


class Hello(Struct, array_like=True):
    """The first message of a client: its unique name, which its segments begin with. `node`: where they lie; the
    store's own has no name."""

    client: Annotated[str, Meta(pattern=r"\A\w[\w.]*\Z")]
    node: str = ""


class Said(Struct, Generic[T], array_like=True):
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
        self.said = Said[_any_of(list(self._requests.values()))]  # type: ignore[misc]

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
