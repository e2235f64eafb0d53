"""Batchers of one client: what is called while a message is under way goes together in the next one.

Under load a worker thus pays one round trip for many writes, renewals and releases; without load each goes at once.
Groups that are put wait for credits as well, in a call of their own.
"""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.conf.errors import suggest
from penstock.store.client.lease import Values
from penstock.store.client.links import Link
from penstock.store.data.arena import Slot
from penstock.store.errors import MissingColumn, UnknownColumn
from penstock.store.ledger.facts import Facts

Outgoing = tuple[str, tuple[Any, ...], "asyncio.Future[Any]"]


class CallBatcher:
    """Calls of one client to one store that need not go alone, in the order in which they were made; at most one
    message is under way."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: list[Outgoing] = []
        self._flight: asyncio.Task[Any] | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """The result of that method of the store, which must be one that does not wait. Raises what it raises."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((method, arguments, future))
        if self._flight is None:
            self._take_off()
        return await future

    def _take_off(self) -> None:
        sent, self._waiting = self._waiting, []
        calls = [(method, arguments) for method, arguments, _ in sent]
        flight = asyncio.get_running_loop().create_task(self._link.call("many", calls))
        flight.add_done_callback(lambda flight: self._landed(sent, flight))
        self._flight = flight

    def _landed(self, sent: list[Outgoing], flight: "asyncio.Task[Any]") -> None:
        """Give every caller its result: the message has been answered, or the store's process is gone."""
        self._flight = None
        if self._waiting:
            self._take_off()
        failure = asyncio.CancelledError() if flight.cancelled() else flight.exception()
        results = [(None, failure)] * len(sent) if failure is not None else flight.result()
        for (_, _, future), (value, error) in zip(sent, results, strict=True):
            if future.done():
                continue
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)


@dataclass(frozen=True, eq=False)
class Incoming:
    """The groups of one caller, encoded."""

    ticket: int
    batch: pa.RecordBatch
    facts: Facts
    slot: Slot | None
    numbers: "asyncio.Future[list[int]]"


class PutBatcher:
    """Puts of one client to one store. One call is under way at a time, so groups are admitted in the order in which
    they were given; those that are given while others wait for credits go together afterwards."""

    def __init__(self, link: Link, client: str) -> None:
        self._link, self._client = link, client
        self._tickets = itertools.count()
        self._withdrawing: set[asyncio.Future[Any]] = set()
        self._inline_bytes = 0
        self._waiting: list[Incoming] = []
        self._putting: asyncio.Task[list[int]] | None = None

    async def put(self, batch: pa.RecordBatch, facts: Facts, inline_bytes: int, slot: Slot | None = None) -> list[int]:
        """Put groups. Returns their numbers, once all are admitted. Raises what the store raises. Cancelled, it
        withdraws those that are not admitted yet."""
        self._inline_bytes = inline_bytes
        numbers: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        incoming = Incoming(next(self._tickets), batch, facts, slot, numbers)
        self._waiting.append(incoming)
        if self._putting is None:
            self._next()
        try:
            return await numbers
        except asyncio.CancelledError:
            self._withdraw(incoming)
            raise

    def _withdraw(self, incoming: Incoming) -> None:
        if incoming in self._waiting:
            self._waiting.remove(incoming)
            if incoming.slot is not None:
                incoming.slot.give_back()
            return
        asking = asyncio.ensure_future(self._link.call("withdraw_put", self._client, incoming.ticket))
        self._withdrawing.add(asking)
        asking.add_done_callback(self._withdrawn)

    def _withdrawn(self, asking: "asyncio.Future[Any]") -> None:
        self._withdrawing.discard(asking)
        if not asking.cancelled():
            asking.exception()  # the store is gone, and the groups with it

    def _next(self) -> None:
        """Send the waiting groups, as far as they are small."""
        first = self._waiting[0]
        small = itertools.takewhile(self._is_small, self._waiting)
        count = max(1, len(list(small)))
        sent, self._waiting = self._waiting[:count], self._waiting[count:]
        batch = first.batch if count == 1 else pa.concat_batches([one.batch for one in sent])
        facts = first.facts if count == 1 else _together([one.facts for one in sent])
        tickets = [one.ticket for one in sent for _ in range(one.batch.num_rows)]
        self._putting = asyncio.ensure_future(self._send(batch, facts, first, tickets))
        self._putting.add_done_callback(lambda putting: self._landed(sent, putting))

    async def _send(self, batch: pa.RecordBatch, facts: Facts, first: Incoming, tickets: list[int]) -> list[int]:
        sent = await self._link.ship(batch, self._inline_bytes, first.slot)
        arguments = batch.schema.names, sent, facts, self._client, tickets
        return list(await self._link.call("put", *arguments))

    def _is_small(self, one: Incoming) -> bool:
        return one.slot is None and sum(one.facts.row_bytes) <= self._inline_bytes

    def _landed(self, sent: list[Incoming], putting: "asyncio.Task[list[int]]") -> None:
        self._putting = None
        if self._waiting:
            self._next()
        failure = asyncio.CancelledError() if putting.cancelled() else putting.exception()
        start = 0
        for one in sent:
            end = start + one.batch.num_rows
            if one.numbers.done():
                pass
            elif failure is not None:
                one.numbers.set_exception(failure)
            else:
                one.numbers.set_result(putting.result()[start:end])
            start = end


def _together(facts: list[Facts]) -> Facts:
    """Join the facts of several puts; all have the source's columns, so the same facts are known of each."""

    def joined(name: str) -> list[int] | None:
        values = [getattr(one, name) for one in facts]
        return None if values[0] is None else [value for some in values for value in some]

    return Facts(
        joined("row_bytes") or [],
        joined("oldest_version"),
        joined("response_tokens"),
        joined("prompt_tokens"),
        facts[0].token_column,
        joined("token_lengths"),
        joined("context_tokens"),
    )


def by_column(groups: Sequence[Values], source: Sequence[str]) -> dict[str, list[Any]]:
    """Join the values of groups that are to be put, by column: all of the source's columns, and no others."""
    for number, group in enumerate(groups):
        for name in source:
            if name not in group:
                raise MissingColumn(
                    f"group {number} of {len(groups)} lacks column {name!r}. Give {', '.join(source)} for each."
                )
        for name in group:
            if name not in source:
                raise UnknownColumn(f"group {number}: the source writes no column {name!r}{suggest(name, source)}")
    return {name: [group[name] for group in groups] for name in source}
