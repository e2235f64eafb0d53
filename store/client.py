"""How workers speak to the store, in-process or as a Ray actor: the same calls and few round trips.

A worker's loop, which is what every stage looks like:

    client = StoreClient(handle)
    while (lease := await client.lease("reward", max_units=16, owner="reward-0")) is not None:
        scores = score(lease.rows.strings("response_text"))
        await client.write(lease, lease.rows.row_ids, {"reward": scores})
"""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from penstock.algorithms.columns import Column
from penstock.conf.errors import suggest
from penstock.store.blocks import assemble
from penstock.store.errors import MissingColumn, StoreError, UnknownColumn
from penstock.store.rows import Rows
from penstock.store.schema import encode
from penstock.store.spec import StoreSpec
from penstock.store.store import Granted, Store, Write
from penstock.store.transport import link_to

T = TypeVar("T")


@dataclass(frozen=True)
class Lease:
    """Rows to compute for a stage. `rows` has the columns that the stage reads."""

    id: int
    stage: str
    rows: Rows


@dataclass(frozen=True)
class SharedLease(Lease):
    """This rank's share of a round; `rows` may be empty. `version`: updates before this one (train)."""

    round: int = 0
    rank: int = 0
    version: int = 0


Values = dict[str, Any]
"""By column one value a row: a list or `[N]` array; for ragged columns a list of lists or of `[T_i]` arrays."""
Outgoing = tuple[Write, "asyncio.Future[None]"]


class StoreClient:
    """A worker's end of the store. Not thread-safe: one for each event loop.

    Every method raises the store's typed errors (`store/errors.py`); a refused call has changed nothing.
    """

    def __init__(self, handle: "Store | Any") -> None:
        """`handle`: a `Store` in this process, or the handle of the Ray actor around one."""
        self._link = link_to(handle)
        self._known: StoreSpec | None = None
        self._columns: dict[str, Column] = {}
        self._outbox: list[Outgoing] = []
        self._flight: asyncio.Task[list[StoreError | None]] | None = None

    async def put_groups(self, groups: Sequence[Values]) -> list[int]:
        """Admit groups, each with the source's columns given once; waits for credits until all are in. Their numbers.

        Raises `StoreClosed`, `MissingColumn`, `UnknownColumn`, `WrongType`, `WrongLength`, `NotFinite`, `TooLarge`.
        """
        if not groups:
            return []
        spec = await self.spec()
        values = _by_column(groups, spec.source_columns)
        batch, facts = encode(self._columns, values, list(range(len(groups))))
        return list(await self._link.call("put", batch, facts))

    async def lease(self, stage: str, max_units: int, owner: str) -> Lease | None:
        """At least one unit and up to `max_units` (samples or groups, as the stage's is), of the oldest groups. Waits.

        None when the store is closed. `owner`: who it is, for `describe` and `abandon`.
        """
        granted = await self._link.call("lease", stage, max_units, owner)
        return granted and Lease(granted.lease_id, stage, await self._rows(granted))

    async def lease_shared(
        self, stage: str, round: int, rank: int, num_ranks: int, max_units: int = 1, owner: str = ""
    ) -> SharedLease | None:
        """This rank's rows of a round that all ranks ask for by the same number; waits until it is formed.

        The train stage gives exactly `groups_per_step` whole groups, whatever `max_units`. Rows are balanced over
        ranks by tokens and ordered by row id. Asking again gives the same rows, less those finished since. None when
        the store is closed.
        """
        granted = await self._link.call(
            "lease_shared", stage, round, rank, num_ranks, max_units, owner or f"{stage} ranks"
        )
        if granted is None:
            return None
        return SharedLease(granted.lease_id, stage, await self._rows(granted), round, rank, granted.version)

    async def complete_shared(self, lease: SharedLease) -> None:
        """This rank has trained its rows. They end when all ranks have said so; saying it twice is harmless."""
        await self._link.call("complete_shared", lease.id, lease.rank)

    async def write(self, lease: Lease, row_ids: "Sequence[int] | np.ndarray", columns: Values) -> None:
        """Results of some rows of a lease.

        A row is complete once it has all columns of the stage; the lease ends with its last row. Writing a row again
        changes nothing. Calls made while one is under way are sent together. Raises
        `LeaseExpired` if the rows went to another, and what `encode` raises for values that do not fit.
        """
        write = await self._prepare(lease, row_ids, columns)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outbox.append((write, future))
        if self._flight is None:
            self._take_off()
        await future

    async def drop(self, lease: Lease, row_ids: "Sequence[int] | np.ndarray", reason: str, detail: str = "") -> None:
        """These rows end here, counted under dropped/<reason>; `detail` is kept for `errors`."""
        await self._link.call("drop", lease.id, lease.stage, _ids(row_ids), reason, detail)

    async def release(self, lease: Lease) -> None:
        """Give the unfinished rows back. Of a train lease: its update was lost, and its groups form a batch again."""
        await self._link.call("release", lease.id)

    async def renew(self, lease: Lease) -> None:
        """Start the lease's time anew; writes do so too. Raises `LeaseExpired`."""
        await self._link.call("renew", lease.id)

    async def abandon(self, owner: str) -> int:
        """An owner died: its leases (except a batch in training) go back at once. How many they were."""
        return int(await self._link.call("abandon", owner))

    async def published(self, version: int) -> None:
        """All engines serve `version`: the groups trained by updates up to it return their credits."""
        await self._link.call("published", version)

    async def last_batch(self, columns: Sequence[str] | None = None) -> Rows:
        """The rows of the batch trained last (none before the first), by row id. `columns`: None for all."""
        return await self._rows(await self._link.call("last_batch", None if columns is None else list(columns)))

    async def stats(self) -> dict[str, float]:
        """Numbers for the metrics: store/*, dropped/*, completed/*, staleness/*; counts are cumulative."""
        return dict(await self._link.call("stats"))

    async def describe(self) -> dict[str, Any]:
        """Rows by stage and state, the oldest group, who holds which lease, who waits for what."""
        return dict(await self._link.call("describe"))

    async def errors(self) -> list[str]:
        """Details of the last few drops."""
        return list(await self._link.call("errors"))

    async def close(self, reason: str = "closed") -> None:
        """Waiting leases return None, waiting producers raise `StoreClosed`."""
        await self._link.call("close", reason)

    async def spec(self) -> StoreSpec:
        """The store's columns, stages and bounds; asked for once."""
        if self._known is None:
            spec: StoreSpec = await self._link.call("spec")
            self._columns = {column.name: column for column in spec.columns}
            self._known = spec
        return self._known

    async def _rows(self, granted: Granted) -> Rows:
        return assemble(granted.payload, granted.names, await self._link.fetch(granted.payload.refs))

    async def _prepare(self, lease: Lease, row_ids: "Sequence[int] | np.ndarray", columns: Values) -> Write:
        await self.spec()
        rows = _ids(row_ids)
        for name in columns:
            if name not in self._columns:
                raise UnknownColumn(
                    f"stage {lease.stage!r} writes column {name!r}, which the dataflow "
                    f"lacks{suggest(name, self._columns)}"
                )
        batch, facts = encode(self._columns, columns, rows)
        return Write(lease.id, lease.stage, rows, batch, facts)

    def _take_off(self) -> None:
        """Send all writes that have gathered, in one call."""
        sent, self._outbox = self._outbox, []
        flight = asyncio.get_running_loop().create_task(self._link.call("write", [write for write, _ in sent]))
        flight.add_done_callback(lambda flight: self._landed(sent, flight))
        self._flight = flight

    def _landed(self, sent: list[Outgoing], flight: "asyncio.Task[list[StoreError | None]]") -> None:
        """The call has ended, perhaps with the store's process: every writer hears how."""
        self._flight = None
        if self._outbox:
            self._take_off()
        failure = asyncio.CancelledError() if flight.cancelled() else flight.exception()
        results = [failure] * len(sent) if failure is not None else flight.result()
        for (_, future), error in zip(sent, results, strict=True):
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


class SyncStoreClient:
    """The same for code that does not await: trainer ranks. Blocks its thread, which must have no running event loop.

    Around a `Store` in this process it must be used from another thread than the store's loop.
    """

    def __init__(self, handle: "Store | Any") -> None:
        self._client = StoreClient(handle)
        self._store = handle if isinstance(handle, Store) else None
        self._loop: asyncio.AbstractEventLoop | None = None

    def lease(self, stage: str, max_units: int, owner: str) -> Lease | None:
        return self._run(self._client.lease(stage, max_units, owner))

    def lease_shared(
        self, stage: str, round: int, rank: int, num_ranks: int, max_units: int = 1, owner: str = ""
    ) -> SharedLease | None:
        return self._run(self._client.lease_shared(stage, round, rank, num_ranks, max_units, owner))

    def write(self, lease: Lease, row_ids: "Sequence[int] | np.ndarray", columns: Values) -> None:
        self._run(self._client.write(lease, row_ids, columns))

    def drop(self, lease: Lease, row_ids: "Sequence[int] | np.ndarray", reason: str, detail: str = "") -> None:
        self._run(self._client.drop(lease, row_ids, reason, detail))

    def release(self, lease: Lease) -> None:
        self._run(self._client.release(lease))

    def renew(self, lease: Lease) -> None:
        self._run(self._client.renew(lease))

    def complete_shared(self, lease: SharedLease) -> None:
        self._run(self._client.complete_shared(lease))

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        if self._store is None:
            self._loop = self._loop or asyncio.new_event_loop()
            return self._loop.run_until_complete(call)
        loop = self._store.loop
        if loop is None or not loop.is_running():
            call.close()
            raise StoreError("this store serves no event loop yet: call it once from the loop that it is to live in.")
        return asyncio.run_coroutine_threadsafe(call, loop).result()


def _ids(row_ids: "Sequence[int] | np.ndarray") -> list[int]:
    return [int(row) for row in row_ids]


def _by_column(groups: Sequence[Values], source: Sequence[str]) -> dict[str, list[Any]]:
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
