"""Requests, writes and leases that travel between clients and a store, as plain data (`data/codec.py`).

`client/client.py` and `store.py` make them; `client/connected.py` and `server.py` carry them.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from penstock.store.data.layout import Parcel, Placed
from penstock.store.data.payload import Payload, by_value
from penstock.store.errors import StoreError
from penstock.store.ledger.facts import Facts

WITHDRAWN = -1
"""The number of a group that its caller has withdrawn before it was admitted."""


class Write(Struct, frozen=True, array_like=True):
    """A write on its way: the columns `names` of a batch, one row for each of `row_ids`."""

    lease_id: int
    stage: str
    row_ids: list[int]
    names: list[str]
    parcel: Parcel
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


Call = tuple[str, tuple[Any, ...]]
"""Method and arguments."""
Result = tuple[Any, StoreError | None]
"""The value that a call of `many` returned, or the error that it raised."""


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
