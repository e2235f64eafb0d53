"""The worker's interface to the store, in-process or as a Ray actor: the same calls and few round trips.

A worker's loop, which is what every stage looks like:

    client = StoreClient(handle)
    async with client.leases("reward", max_units=16, owner="reward-0") as leases:
        async for lease in leases:
            scores = score(lease.rows.strings("response_text"))
            await client.write(lease, lease.rows.row_ids, {"reward": scores})

Behind it: `links.py` (where the store is), `heartbeat.py` (leases of a living worker do not run out), `lease.py`
(leases, and the next one while this one is computed). Calls of one client that are made while a message is under way go
together in the next one (`CallBatcher`, `PutBatcher`): under load a worker pays one round trip for many writes,
renewals and releases; without load each goes at once.
"""

import asyncio
import itertools
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from penstock.algorithms.graph.columns import Column
from penstock.conf.errors import WorkerDied, suggest
from penstock.store.client.heartbeat import Heartbeat
from penstock.store.client.lease import Lease, LeaseStream, Share, SharedLease, Values, ids_of
from penstock.store.client.links import Link, link_to
from penstock.store.data.block_index import assemble
from penstock.store.data.rows import Rows
from penstock.store.data.schema import check_declared, encode, size_of
from penstock.store.data.segment_files import OVERHEAD_BYTES, SegmentSlot
from penstock.store.errors import (
    LeaseExpired,
    LeaseSuperseded,
    MissingColumn,
    RowsLost,
    RowsUnreachable,
    StoreError,
    UnknownColumn,
)
from penstock.store.ledger.admission import check_group_bytes
from penstock.store.ledger.group import Facts
from penstock.store.ledger.outcomes import Outcome
from penstock.store.service.store import Store
from penstock.store.service.wire import Grant, LeaseRequest, WriteRequest
from penstock.store.spec import StageSpec, StoreSpec

Outgoing = tuple[str, tuple[Any, ...], "asyncio.Future[Any]"]


class CallBatcher:
    """Calls of one client to one store that need not go alone, in the order in which they were made; at most one
    message is under way."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: list[Outgoing] = []
        self._in_flight: asyncio.Task[Any] | None = None

    async def call(self, method: str, *arguments: Any) -> Any:
        """The result of that method of the store, which must be one that does not wait. Raises what it raises."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((method, arguments, future))
        if self._in_flight is None:
            self._send_waiting()
        return await future

    def _send_waiting(self) -> None:
        sent, self._waiting = self._waiting, []
        calls = [(method, arguments) for method, arguments, _ in sent]
        flight = asyncio.get_running_loop().create_task(self._link.call("many", calls))
        flight.add_done_callback(lambda flight: self._on_answer(sent, flight))
        self._in_flight = flight

    def _on_answer(self, sent: list[Outgoing], flight: "asyncio.Task[Any]") -> None:
        """Give every caller its result: the message has been answered, or the store's process is gone."""
        self._in_flight = None
        if self._waiting:
            self._send_waiting()
        failure = asyncio.CancelledError() if flight.cancelled() else flight.exception()
        results = [(None, failure)] * len(sent) if failure is not None else flight.result()
        for (_, _, future), (value, error) in zip(sent, results, strict=True):
            _deliver(future, value, error)


@dataclass(frozen=True, eq=False)
class PendingPut:
    """The groups of one caller, encoded."""

    ticket: int
    batch: pa.RecordBatch
    facts: Facts
    slot: SegmentSlot | None
    numbers: "asyncio.Future[list[int]]"


class PutBatcher:
    """Puts of one client to one store. One call is under way at a time, so groups are admitted in the order in which
    they were given; those that are given while earlier ones wait for credits go together afterwards."""

    def __init__(self, link: Link, client: str) -> None:
        self._link, self._client = link, client
        self._tickets = itertools.count()
        self._withdrawing: set[asyncio.Future[Any]] = set()
        self._inline_bytes = 0
        self._waiting: list[PendingPut] = []
        self._putting: asyncio.Task[list[int]] | None = None

    async def put(
        self, batch: pa.RecordBatch, facts: Facts, inline_bytes: int, slot: SegmentSlot | None = None
    ) -> list[int]:
        """Put groups. Returns their numbers, once all are admitted. Raises what the store raises. Cancelled, it
        withdraws those that are not admitted yet."""
        self._inline_bytes = inline_bytes
        numbers: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        incoming = PendingPut(next(self._tickets), batch, facts, slot, numbers)
        self._waiting.append(incoming)
        if self._putting is None:
            self._send_small()
        try:
            return await numbers
        except asyncio.CancelledError:
            self._withdraw(incoming)
            raise

    def _withdraw(self, incoming: PendingPut) -> None:
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

    def _send_small(self) -> None:
        """Send the waiting groups, as far as they are small."""
        first = self._waiting[0]
        small = itertools.takewhile(self._is_small, self._waiting)
        count = max(1, len(list(small)))
        sent, self._waiting = self._waiting[:count], self._waiting[count:]
        batch = first.batch if count == 1 else pa.concat_batches([one.batch for one in sent])
        facts = first.facts if count == 1 else Facts.concat([one.facts for one in sent])
        tickets = [one.ticket for one in sent for _ in range(one.batch.num_rows)]
        self._putting = asyncio.ensure_future(self._send(batch, facts, first, tickets))
        self._putting.add_done_callback(lambda putting: self._on_answer(sent, putting))

    async def _send(self, batch: pa.RecordBatch, facts: Facts, first: PendingPut, tickets: list[int]) -> list[int]:
        sent = self._link.ship(batch, self._inline_bytes, first.slot)
        arguments = batch.schema.names, sent, facts, self._client, tickets
        return list(await self._link.call("put", *arguments))

    def _is_small(self, one: PendingPut) -> bool:
        return one.slot is None and sum(one.facts.row_bytes) <= self._inline_bytes

    def _on_answer(self, sent: list[PendingPut], putting: "asyncio.Task[list[int]]") -> None:
        self._putting = None
        if self._waiting:
            self._send_small()
        failure = asyncio.CancelledError() if putting.cancelled() else putting.exception()
        start = 0
        for one in sent:
            end = start + one.batch.num_rows
            _deliver(one.numbers, None if failure is not None else putting.result()[start:end], failure)
            start = end


def _deliver(future: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
    """Give a caller its result, unless it waits no more."""
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def values_by_column(groups: Sequence[Values], source: Sequence[str]) -> dict[str, list[Any]]:
    """Join the values of groups that are to be put, by column: all of the source's columns, and no other."""
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


RETIRED_POLL_S = 0.2
"""Seconds between two checks of a member without leases whether it has retired."""
PAUSE_S = 1.0
"""Seconds before rows that lie on a node that does not answer are asked for again."""


class StoreClient:
    """A worker's end of the store. Not thread-safe: one for each event loop.

    Every method raises the store's typed errors (`store/errors.py`); a refused call has changed nothing. Leases are
    renewed until they are finished, for as long as the event loop is open, and even while it is blocked. A call that
    is cancelled, or whose answer cannot be read, leaves no lease.
    """

    def __init__(self, handle: "Store | Any", node: str | None = None) -> None:
        """Connect to `handle`: a `Store` in this process, an endpoint of one on this machine, or the handle of the Ray
        actor around one. `node`: Ray's id of this machine; None: to be asked for."""
        self.name = uuid.uuid4().hex
        """Unique name of this end."""
        self._tickets = itertools.count()
        self._connect(handle, node)
        self._columns: dict[str, Column] = {}
        self._binary: set[str] = set()
        self._stages: dict[str, StageSpec] = {}
        self._undoing: set[asyncio.Task[None]] = set()
        self.has_retired = False
        """True once this client asks for no more leases."""

    def _connect(self, handle: "Store | Any", node: str | None) -> None:
        self.link = link_to(handle, self.name, node)
        self._calls = CallBatcher(self.link)
        self._puts = PutBatcher(self.link, self.name)
        self.heartbeat = Heartbeat()
        self._known: StoreSpec | None = None

    async def put_groups(self, groups: Sequence[Values]) -> list[int]:
        """Admit groups, each with the source's columns given once; waits for credits until all are in. Returns their
        numbers.

        Raises `StoreClosed`, `MissingColumn`, `UnknownColumn`, `WrongType`, `WrongLength`, `NotFinite`, `TooLarge`;
        then none is admitted.

        Cancelled, it withdraws what is not admitted yet: what the store admits before it learns of that stays admitted,
        always the first ones.
        """
        if not groups:
            return []
        spec = self._known or await self.spec()
        values = values_by_column(groups, spec.source_columns)
        parts = [list(range(len(groups)))]
        if not self._binary.isdisjoint(spec.source_columns):
            parts = [[row] for row in parts[0]]  # each by itself: its pictures go with its last row
        encoded: list[tuple[pa.RecordBatch, Facts, SegmentSlot | None]] = []
        try:
            for rows in parts:
                some = values if len(parts) == 1 else {name: [one[row] for row in rows] for name, one in values.items()}
                encoded.append(self._encode(spec, some, rows))
                # Here, since groups of other callers may travel in the same message.
                check_group_bytes(spec.max_bytes, encoded[-1][1].row_bytes)
        except StoreError:
            for _, _, slot in encoded:
                if slot is not None:
                    slot.give_back()
            raise
        put = [self._puts.put(batch, facts, spec.inline_bytes, slot) for batch, facts, slot in encoded]
        return await put[0] if len(put) == 1 else list(itertools.chain.from_iterable(await asyncio.gather(*put)))

    async def become_source(self) -> int:
        """Make this client the only source of groups: another's are refused from now on, those that wait withdrawn.
        Returns how many groups were put so far: the number of the next one."""
        return int(await self.link.call("become_source", self.name))

    async def outcomes(self, first: int, end: int) -> list[Outcome | None] | None:
        """Wait for outcomes of the groups from `first` to before `end`: see `Store.outcomes`. None when closed."""
        outcomes: list[Outcome | None] | None = await self.link.call("outcomes", first, end)
        return outcomes

    async def lease(
        self, stage: str, max_units: int, owner: str, *, max_held: int = 0, num_peers: int = 1
    ) -> Lease | None:
        """Lease a unit or more, up to `max_units` (samples or groups, as the stage's is), of the oldest groups. Waits.

        What is free is shared among the clients that ask (`service/sharing.py`). `owner`: the worker's name,
        for `describe` and `abandon`. `max_held`: for a client that asks whenever it holds fewer units of the stage, one
        of `num_peers`. None when the store is closed, or this client has retired.
        """
        leases = await self._ask(LeaseRequest(stage, max_units, owner, max_held=max_held, num_peers=num_peers))
        return leases[0] if leases else None

    def leases(self, stage: str, max_units: int, owner: str, *, ahead: int = 1) -> LeaseStream:
        """Iterate over leases, `ahead` of them fetched while the present one is worked on."""
        return LeaseStream(lambda count: self._ask(LeaseRequest(stage, max_units, owner, count)), self.release, ahead)

    async def lease_shared(
        self, stage: str, round: int, rank: int, num_ranks: int, max_units: int = 1, owner: str = ""
    ) -> SharedLease | None:
        """Lease this rank's rows of a round that all ranks ask for by the same number; waits until it is formed.

        The train stage gives exactly `groups_per_step` whole groups, whatever `max_units`. Rows are balanced over
        ranks by tokens and ordered by row id. Asking again gives the same rows, less those finished since. None when
        the store is closed.
        """
        await self.spec()
        owner = owner or f"{stage} ranks"
        granted: Grant | None = await self.link.call("lease_shared", stage, round, rank, num_ranks, max_units, owner)
        if granted is None:
            return None
        lease = SharedLease(granted.lease_id, stage, await self._rows(granted), granted.version, round, rank)
        if self._stages[stage].unit != "batch":  # a batch in training does not run out
            self.heartbeat.hold(lease.id, ids_of(lease.rows.row_ids))
        return lease

    async def complete_shared(self, share: Share) -> None:
        """Report that a rank has trained its rows. They end when all ranks have reported it; a second report is
        harmless."""
        await self._calls.call("complete_shared", share.lease, share.rank)

    async def settle(self, stage: str, epoch: int | None = None) -> int:
        """Take back what a stage's rounds had under way: all its ranks are gone, or begin anew. Returns the number of
        the next round, with which the new ranks begin.

        For the train stage that is the last step that was trained: a batch that not all ranks have reported as trained
        is formed again of the same groups, unless some of their rows were lost with a node.

        `epoch`: that of the command that asks (`store/epoch.py`), of which an older one is refused. None: a worker.
        """
        return int(await self.link.call("settle", stage, epoch))

    async def write(self, lease: Lease, row_ids: "Sequence[int] | np.ndarray", columns: Values) -> None:
        """Write results of some rows of a lease.

        A row is complete once it has all columns of the stage; the lease ends with its last row. Writing a row again
        changes nothing. Raises `LeaseExpired` if the rows went to another, `LeaseSuperseded` if another engine was
        first, and what `encode` raises for values that do not fit.
        """
        spec, rows = self._known or await self.spec(), ids_of(row_ids)
        check_declared(self._columns, columns, lease.stage)
        batch, facts, slot = self._encode(spec, columns, rows)
        sent = self.link.ship(batch, spec.inline_bytes, slot)
        try:
            await self._calls.call("write", WriteRequest(lease.id, lease.stage, rows, batch.schema.names, sent, facts))
        except LeaseExpired as error:
            if isinstance(error, LeaseSuperseded):
                self.heartbeat.finished(lease.id, rows)
            else:
                self.heartbeat.unhold(lease.id)
            raise
        if set(self._stages[lease.stage].writes) <= columns.keys():
            self.heartbeat.finished(lease.id, rows)

    async def superseded(self) -> list[tuple[int, int]] | None:
        """Wait until other clients have written groups that this one samples too. Returns leases and groups; None once
        closed."""
        superseded: list[tuple[int, int]] | None = await self.link.call("superseded", self.name)
        size = (await self.spec()).group_size
        for lease_id, group in superseded or ():
            self.heartbeat.finished(lease_id, range(group * size, (group + 1) * size))
        return superseded

    async def until_closed(self) -> None:
        """Wait until the store has closed, or this client has retired. For members that lease nothing."""
        hearing = asyncio.ensure_future(self._wait_until_closed())
        try:
            while not (hearing.done() or self.has_retired):
                await asyncio.wait([hearing], timeout=RETIRED_POLL_S)
            if hearing.done():
                hearing.result()
        finally:
            hearing.cancel()

    async def _wait_until_closed(self) -> None:
        while await self.superseded() is not None:
            pass

    async def drop(self, lease: Lease, row_ids: "Sequence[int] | np.ndarray", reason: str, detail: str = "") -> None:
        """End these rows here, counted under dropped/<reason>; `detail` is kept for `describe`."""
        rows = ids_of(row_ids)
        await self._calls.call("drop", lease.id, lease.stage, rows, reason, detail)
        self.heartbeat.finished(lease.id, rows)

    async def release(self, lease: Lease) -> None:
        """Give the unfinished rows back. For a train lease: its step was lost, and its groups form a batch again."""
        self.heartbeat.unhold(lease.id)
        await self._calls.call("release", lease.id)

    async def renew(self, lease: Lease) -> None:
        """Restart the lease's time; the client does so by itself. Raises `LeaseExpired`."""
        if await self._calls.call("renew", [lease.id]):
            raise LeaseExpired(f"lease {lease.id} is over: it was completed, released or not renewed in time.")

    async def abandon(self, owner: str) -> int:
        """Take back the leases of an owner that died, at once (except a batch in training). Returns how many they
        were."""
        return int(await self.link.call("abandon", owner))

    async def move(self, handle: "Store | Any") -> None:
        """Speak to another store from now on, which takes the place of one that is gone."""
        await self.leave()
        self._connect(handle, None)

    async def catch_up(self, steps: Sequence[Sequence[int]], version: int, epoch: int = 0) -> None:
        """Tell a store that was restored in another one's place what was trained, before a batch is asked for. `steps`:
        ids of the rows trained since what it knows, by step. `version`: the newest that every engine serves. What was
        not trained comes again. `epoch`: as in `settle`."""
        await self.link.call("catch_up", [list(map(int, rows)) for rows in steps], version, epoch)

    async def lost(self, node: str) -> None:
        """Report that a node, by Ray's id, is gone: the large batches that were written there are made again."""
        await self.link.call("lost", node)

    async def served(self, version: int, epoch: int = 0, max_active: int | None = None) -> None:
        """Report that all engines serve `version`: the groups trained by steps up to it return their credits. `epoch`:
        as in `settle`. `max_active`: most groups under way from now on; None: as many as keep the bound."""
        await self.link.call("served", version, epoch, max_active)

    async def last_batch(self, columns: Sequence[str] | None = None) -> Rows:
        """Return the rows of the batch trained last (none before the first), by row id. `columns`: None for all."""
        granted = await self.link.call("last_batch", None if columns is None else list(columns))
        return await self._rows(granted)

    async def snapshot(
        self, root: str, number: int, keep: int = 2, is_apart: bool = False, timeout_s: float = 3600.0
    ) -> str:
        """Write the store's state of the last `cut`, or of this moment, below `root`. Returns the path. `keep`: so many
        of the newest snapshots stay. `is_apart`: of this moment, and the last `cut` stays for another call.
        `timeout_s`: the store gives the writing up then. Restored by `Store(..., restore=path)`."""
        return str(await self.link.call("snapshot", root, number, keep, is_apart, timeout_s))

    async def batch_ready(self) -> bool:
        """Wait until as many groups are complete as the next step takes. Returns False when the store is closed."""
        return bool(await self.link.call("batch_ready"))

    async def cut(self) -> int:
        """Take the store's state of this moment, for the next `snapshot` to write. Returns how many groups were put so
        far."""
        return int(await self.link.call("cut"))

    async def stats(self) -> dict[str, float]:
        """Return numbers for the metrics: store/*, dropped/*, completed/*, staleness/*; counts are cumulative."""
        return dict(await self.link.call("stats"))

    async def describe(self) -> dict[str, Any]:
        """Return rows by stage and state, the oldest group, owners of leases, waiting requests, and the last drops."""
        return dict(await self.link.call("describe"))

    async def work(self) -> dict[str, Any]:
        """Return which worker has worked on what since any client's last call: see `WorkLog.take`."""
        work = dict(await self.link.call("work"))
        while work.pop("more"):
            more = dict(await self.link.call("work"))
            work = more | {kind: work[kind] + more[kind] for kind in ("leases", "admitted", "missed")}
        return work

    async def close(self, reason: str = "closed") -> None:
        """Close the store: waiting leases return None, waiting producers raise `StoreClosed`."""
        await self.link.call("close", reason)

    async def retire(self) -> None:
        """Ask for no more leases: requests that wait, and all later ones, return None. What is held may be finished."""
        self.has_retired = True
        if self._known is not None:  # else nothing was asked
            await self.link.call("retire", self.name)

    async def leave(self) -> None:
        """Leave the store as if this process had ended: what it holds goes back, and what waits for a store of another
        process raises `PartnerGone`. A second time changes nothing."""
        self.heartbeat.stop()
        await self.link.leave()

    async def spec(self) -> StoreSpec:
        """Return the store's columns, stages and bounds; asked for once."""
        if self._known is None:
            spec: StoreSpec = await self.link.call("spec")
            self._columns = {column.name: column for column in spec.columns}
            self._binary = {column.name for column in spec.columns if column.dtype == "binary"}
            self._stages = {stage.name: stage for stage in spec.stages}
            self.heartbeat.begin(self.link.lease_renewer(), spec.lease_timeout_s)
            self._known = spec
        return self._known

    async def _ask(self, request: LeaseRequest) -> list[Lease] | None:
        """Ask for leases; None when the store has closed. Rows on a node that does not answer go back, and are asked
        for again for as long as a lease lasts: the store may not know yet that it is gone."""
        spec, unreadable_since = self._known or await self.spec(), 0.0
        while True:
            try:
                return await self._ask_once(request)
            except (RowsUnreachable, RowsLost):
                unreadable_since = unreadable_since or time.monotonic()
                if time.monotonic() - unreadable_since > spec.lease_timeout_s:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _ask_once(self, request: LeaseRequest) -> list[Lease] | None:
        """Ask once. Whatever goes wrong, no request is left waiting and nothing is left leased."""
        if self.has_retired:
            return None
        request = replace(request, client=self.name, ticket=next(self._tickets))
        self.heartbeat.asked(request.ticket)
        try:
            granted: list[Grant] | None = await self.link.call("lease", request)
            if granted is None:
                return None
            leases = [Lease(one.lease_id, request.stage, rows, one.version) for one, rows in await self.read(granted)]
            for lease in leases:
                self.heartbeat.hold(lease.id, ids_of(lease.rows.row_ids))
            return leases
        except BaseException:
            undoing = asyncio.ensure_future(self._withdraw(request))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise
        finally:
            self.heartbeat.answered(request.ticket)

    async def _withdraw(self, request: LeaseRequest) -> None:
        """Withdraw a request whose answer has no reader any more: what it brings, or would bring, goes back. If the
        store is gone, or has refused the request, there is nothing to go back."""
        with suppress(StoreError, WorkerDied):
            await self._calls.call("withdraw", request.stage, request.client, request.ticket)

    async def read(self, granted: list[Grant]) -> list[tuple[Grant, Rows]]:
        """Read all payloads, or tell the store that none is read."""
        read: list[tuple[Grant, Rows]] = []
        try:
            for one in granted:
                read.append((one, await self._rows(one)))
        finally:
            for one in granted[len(read) + 1 :]:  # after one that cannot be read
                self.link.skip(one.payload.refs)
        return read

    async def _rows(self, granted: Grant) -> Rows:
        return assemble(await self.link.fetch(granted.payload), granted.names)

    def _encode(
        self, spec: StoreSpec, columns: Values, rows: Sequence[int]
    ) -> tuple[pa.RecordBatch, Facts, SegmentSlot | None]:
        """Encode columns. Large ones are joined in shared memory, where that can be; blobs are put there afterwards,
        when it is known which of them are equal."""
        has_blobs = not self._binary.isdisjoint(columns)
        slot = None if has_blobs else self._reserve(spec, size_of(columns))
        allocate = None if slot is None else slot.take
        try:
            batch, facts = encode(self._columns, columns, rows, allocate, by_turn=spec.old_turns_are_context)
        except StoreError:
            if slot is not None:
                slot.give_back()
            raise
        return batch, facts, self._reserve(spec, batch.nbytes) if has_blobs else slot

    def _reserve(self, spec: StoreSpec, size: int) -> SegmentSlot | None:
        return self.link.reserve(size + size // 32 + OVERHEAD_BYTES) if size > spec.inline_bytes else None
