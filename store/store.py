"""The streaming store: the ledger's decisions and the blocks' data behind calls that wait. In-process or a Ray actor.

    producers  ─ put ───────▶ ┌───────┐ ─ lease ────────▶ workers
                              │ Store │ ◀─ write, drop ── workers
    controller ─ published ─▶ └───────┘ ─ lease_shared ─▶ trainer ranks

Spoken to through `store/client.py` only. Who waits is woken one after the other when its stage may have become ready,
so nobody polls and first come is first served. All calls must come from one event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.store.blocks import Block, Blocks, Payload
from penstock.store.errors import MissingColumn, StoreClosed, StoreError, UnknownColumn
from penstock.store.group import Facts
from penstock.store.ledger import Ledger
from penstock.store.report import describe, stats
from penstock.store.schema import check_batch
from penstock.store.spec import StoreSpec
from penstock.store.turns import Turns

Clock = Callable[[], float]


@dataclass(frozen=True)
class Write:
    """One write on its way: the columns of `batch`, one row for each of `row_ids`."""

    lease_id: int
    stage: str
    row_ids: list[int]
    batch: pa.RecordBatch
    facts: Facts


@dataclass(frozen=True)
class Granted:
    """A lease on its way to its owner."""

    lease_id: int
    stage: str
    names: tuple[str, ...]
    payload: Payload
    version: int = 0


class Store:
    """Groups come in, are leased, written and trained, and go.

    Lifecycle: made with its spec, used until `close`, after which waiting calls return None or raise `StoreClosed`.

        store = Store(spec)
        client = StoreClient(store)
        groups = await client.put_groups([{"prompt_ids": [1, 2, 3], "task": "{}"}])

    Calls that change something never wait in between: each is one event of the ledger.
    """

    def __init__(
        self, spec: StoreSpec, clock: Clock = time.monotonic, keep: Callable[[pa.RecordBatch], Any] | None = None
    ) -> None:
        """`clock`: seconds. `keep`: takes a batch larger than `spec.inline_bytes` and returns a reference that
        consumers can read it by (Ray's object store). None: all batches stay here.
        """
        self._spec = spec
        self._clock = clock
        self._keep = keep
        self.ledger = Ledger(spec)
        self._blocks = Blocks(spec.columns, spec.group_size)
        self._columns = {column.name: column for column in spec.columns}
        self._reads = {stage.name: stage.reads for stage in spec.stages}
        self._producers = Turns(self._schedule)
        self._consumers = {stage.name: Turns(self._schedule) for stage in spec.stages}
        self._ranks = {stage.name: Turns(self._schedule) for stage in spec.stages}
        self._errors: deque[str] = deque(maxlen=20)
        self._closed: str | None = None
        self._pump_due = False
        self._timer: asyncio.TimerHandle | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that the last event came from: all come from one."""

    async def spec(self) -> StoreSpec:
        self.loop = asyncio.get_running_loop()
        return self._spec

    async def put(self, batch: pa.RecordBatch, facts: Facts) -> list[int]:
        """One group for each row of the batch, admitted as credits allow; their numbers. Raises `StoreClosed`."""
        names, num_groups = batch.schema.names, len(facts.row_bytes)
        self._check_source(names)
        check_batch(self._columns, batch, num_groups)
        block = self._block(batch)
        admitted: list[int] = []

        def admit() -> list[int] | None:
            before = len(admitted)
            while len(admitted) < num_groups:
                number = len(admitted)
                group = self.ledger.admit(
                    facts.row_bytes[number], _at(facts.prompt_tokens, number), _at(facts.response_tokens, number)
                )
                if group is None:
                    break
                self._blocks.add_group(group, block, number, names)
                admitted.append(group)
            if len(admitted) > before:
                self._changed()
            return admitted if len(admitted) == num_groups else None

        done = await self._producers.wait(admit)
        if done is None:
            raise StoreClosed(
                f"the store is closed ({self._closed}); {num_groups - len(admitted)} groups were not admitted."
            )
        return done

    async def lease(self, stage: str, max_units: int, owner: str) -> Granted | None:
        """Waits for at least one free unit. None when the store is closed."""
        self.ledger.residents.stage(stage)

        def take() -> Granted | None:
            lease = self.ledger.lease(stage, max_units, owner, self._clock())
            return None if lease is None else self._grant(lease.id, stage, self.ledger.rows_of(lease))

        return await self._consumers[stage].wait(take)

    async def lease_shared(
        self, stage: str, number: int, rank: int, num_ranks: int, max_units: int, owner: str
    ) -> Granted | None:
        """This rank's share of a round. Waits until the round is formed. None when the store is closed."""
        self.ledger.residents.stage(stage)

        def take() -> Granted | None:
            made = self.ledger.lease_shared(stage, number, num_ranks, max_units, owner, self._clock())
            if self.ledger.residents.freed:  # stale groups were evicted
                self._changed()
            if made is None:
                return None
            return self._grant(made.lease_id, stage, self.ledger.share(made, rank), made.version)

        return await self._ranks[stage].wait(take)

    async def write(self, writes: list[Write]) -> list[StoreError | None]:
        """Each write stands for itself: its error, or None. See `Ledger.write`."""
        results: list[StoreError | None] = []
        for one in writes:
            try:
                self._write(one)
                results.append(None)
            except StoreError as error:
                results.append(error)
        self._changed()
        return results

    async def drop(self, lease_id: int, stage: str, row_ids: list[int], reason: str, detail: str) -> None:
        self.ledger.drop(lease_id, stage, row_ids, reason)
        self._errors.append(
            f"{reason}: stage {stage}, {len(row_ids)} row(s) from {row_ids[:1]}: {detail}" if detail else reason
        )
        self._changed()

    async def release(self, lease_id: int) -> None:
        self.ledger.release(lease_id)
        self._changed()

    async def renew(self, lease_id: int) -> None:
        self.ledger.renew(lease_id, self._clock())

    async def abandon(self, owner: str) -> int:
        """Everything that a dead owner holds goes back; how many leases that were."""
        lost = self.ledger.abandon(owner)
        self._changed()
        return lost

    async def complete_shared(self, lease_id: int, rank: int) -> None:
        self.ledger.complete_shared(lease_id, rank)
        self._changed()

    async def published(self, version: int) -> None:
        self.ledger.published(version)
        self._changed()

    async def last_batch(self, names: list[str] | None) -> Granted:
        """The batch trained last. `names`: None for all columns that its rows have. Raises `UnknownColumn`."""
        rows = self.ledger.rounds.last_batch
        chosen = tuple(self._blocks.columns_of(rows) if names is None else names)
        for name in chosen:
            if name not in self._columns:
                raise UnknownColumn(f"column {name!r} is not in the dataflow; it has {', '.join(self._columns)}.")
        return self._grant(-1, "", rows, names=chosen)

    async def stats(self) -> dict[str, float]:
        numbers = stats(self.ledger)
        numbers["store/waiting_producers"] = len(self._producers)
        numbers["store/waiting_consumers"] = sum(map(len, (*self._consumers.values(), *self._ranks.values())))
        numbers["store/blocks"] = self._blocks.num_blocks
        return numbers

    async def describe(self) -> dict[str, Any]:
        waiters = {name: len(self._consumers[name]) + len(self._ranks[name]) for name in self._consumers}
        return describe(self.ledger, self._clock()) | {
            "waiting": waiters | {"put": len(self._producers)},
            "blocks": {"count": self._blocks.num_blocks, "bytes": self._blocks.bytes},
            "closed": self._closed,
        }

    async def errors(self) -> list[str]:
        return list(self._errors)

    async def close(self, reason: str) -> None:
        """Waiting calls end; results under leases are still taken. A second time changes nothing."""
        if self._closed is None:
            self._closed = reason
        if self._timer is not None:
            self._timer.cancel()
        for turns in (self._producers, *self._consumers.values(), *self._ranks.values()):
            turns.close()

    def _write(self, one: Write) -> None:
        names = one.batch.schema.names
        self.ledger.check_columns(one.stage, names)
        check_batch(self._columns, one.batch, len(one.row_ids))
        kept = self.ledger.write(one.lease_id, one.stage, one.row_ids, names, one.facts, self._clock())
        if kept and names:
            self._blocks.add_rows(one.row_ids, kept, self._block(one.batch), names)

    def _block(self, batch: pa.RecordBatch) -> Block:
        """A large batch is kept where consumers read it without asking this process, and owned by this process: a
        producer that dies takes nothing along.
        """
        if self._keep is None or batch.nbytes <= self._spec.inline_bytes:
            return Block(batch, None, batch.nbytes)
        return Block(None, self._keep(batch), batch.nbytes)

    def _grant(
        self, lease_id: int, stage: str, rows: list[int], version: int = 0, names: tuple[str, ...] | None = None
    ) -> Granted:
        names = self._reads[stage] if names is None else names
        self._schedule()
        return Granted(lease_id, stage, names, self._blocks.gather(rows, names), version)

    def _check_source(self, names: list[str]) -> None:
        if self._closed is not None:
            raise StoreClosed(f"the store is closed ({self._closed}) and takes no more groups.")
        for name in self._spec.source_columns:
            if name not in names:
                raise MissingColumn(
                    f"a group lacks source column {name!r}. Give {', '.join(self._spec.source_columns)} for each."
                )
        for name in names:
            if name not in self._spec.source_columns:
                raise UnknownColumn(
                    f"the source writes no column {name!r}, only {', '.join(self._spec.source_columns)}."
                )

    def _changed(self) -> None:
        """After every event: let go of data that is over, and look who may go on."""
        freed = self.ledger.residents.freed
        for group, mask in freed:
            self._blocks.free(group, mask)
        freed.clear()
        self._schedule()

    def _schedule(self) -> None:
        if not self._pump_due:
            self._pump_due = True
            self.loop = asyncio.get_running_loop()
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Give the first in each queue its turn if there may be something for it, and all ranks theirs."""
        self._pump_due = False
        for name, consumers in self._consumers.items():
            if self.ledger.residents.readiness.by_name[name].num_free:
                consumers.wake_first()
        for ranks in self._ranks.values():
            ranks.wake_all()
        self._producers.wake_first()
        self._arm()

    def _arm(self) -> None:
        """One timer, for the lease that may expire next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.ledger.next_deadline()
        if deadline is not None and self.loop is not None and self._closed is None:
            self._timer = self.loop.call_later(max(0.0, deadline - self._clock()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        self.ledger.expire(self._clock())
        self._changed()


def _at(values: list[int] | None, position: int) -> int:
    return values[position] if values is not None else 0
