"""The streaming store: the ledger's decisions and the blocks' data behind calls that wait. In-process or a Ray actor.

    producers  ─ put ───────▶ ┌───────┐ ─ lease ────────▶ workers
                              │ Store │ ◀─ write, drop ── workers
    controller ─ served ────▶ └───────┘ ─ lease_shared ─▶ trainer ranks

Workers call it through `client/store_client.py` only. Callers that wait are woken one after the other when their stage
may have become ready, so none polls and first come is first served. All calls must come from one event loop.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from penstock.metering.meters import Meters
from penstock.store.data.block_index import BlockIndex, gather
from penstock.store.data.codec import InlineBatch, SentBatch
from penstock.store.data.segments import Intake, Segments
from penstock.store.epoch import Epoch
from penstock.store.errors import LeaseExpired, StoreError, UnknownColumn
from penstock.store.ledger.group import Facts
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.outcomes import Outcome
from penstock.store.service import snapshot
from penstock.store.service.sharing import Clients
from penstock.store.service.snapshot import SnapshotWriter
from penstock.store.service.store_server import Endpoint, StorePort, StoreServer
from penstock.store.service.store_stats import StoreMeter, describe, of_segments, of_server, stats
from penstock.store.service.waiters import Locality, Waiters
from penstock.store.service.wire import Call, Grant, LeaseRequest, Result, WriteRequest, calls_of
from penstock.store.service.work_log import WorkLog
from penstock.store.spec import StoreSpec

Clock = Callable[[], float]
LAST_DROPS = 20
"""Number of drops whose details from the workers are kept for `describe`."""


class Store:
    """A store: groups are put, leased, written, trained and freed.

    Lifecycle: made with its spec, used until `close`, after which waiting calls return None or raise `StoreClosed`.

        store = Store(spec)
        client = StoreClient(store)
        groups = await client.put_groups([{"prompt_ids": [1, 2, 3], "task": "{}"}])

    Calls that change something are one event of the ledger each, and wait for nothing in between. A call with a batch
    that must be written or moved to disk waits for that before.
    """

    def __init__(
        self,
        spec: StoreSpec,
        clock: Clock = time.monotonic,
        segments: Segments | None = None,
        node: str = "",
        restore: str | Path | None = None,
        port: StorePort | None = None,
        meters: Meters | None = None,
    ) -> None:
        """Set the store up. `clock`: seconds. `segments`: where batches larger than `spec.inline_bytes` lie; None:
        here, with all other batches. `node`, `port`: the machine, and its port for other machines, for `endpoint`.
        `restore`: a snapshot, or a directory of them, to resume from; raises `CorruptSnapshot`, `StoreError`. `meters`:
        for what it measures, once it is served.
        """
        self._spec = spec
        self._clock = clock
        self.segments = segments
        self._intake = Intake(spec, segments)
        self.blocks = BlockIndex(spec.columns, spec.group_size, self._intake.free)
        loaded = None if restore is None else snapshot.load(restore, spec)
        self.ledger = Ledger(spec) if loaded is None else loaded.ledger
        if loaded is not None:
            snapshot.refill(self.blocks, loaded, lambda batch: self._intake.block(InlineBatch(batch), batch.num_rows))
        self._reads = {stage.name: stage.reads for stage in spec.stages}
        self._node, self._port = node, port
        self._server: StoreServer | None = None
        self._clients = Clients(self.ledger)
        self._work = WorkLog()
        crosses_nodes = segments is not None and segments.nodes.by_id
        locality = Locality(self.ledger, self.blocks, segments) if segments is not None and crosses_nodes else None
        self._waiters = waiters = Waiters(
            self.ledger, self._clients, self.blocks, self._intake, locality, clock, self._work.admitted
        )
        self.puts, self.consumers, self._ranks = waiters.puts, waiters.consumers, waiters.ranks
        self._carry_out = waiters.carry_out
        self._last_drops: deque[str] = deque(maxlen=LAST_DROPS)
        self._closed: str | None = None
        self._epoch = Epoch()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that the store lives in."""
        self._saving = SnapshotWriter(self.ledger, self.blocks, segments)
        self._losing: asyncio.Task[None] | None = None
        """The task that loses what lay on nodes that are gone, some groups at a time."""
        self.meter = StoreMeter(self.ledger, meters or Meters())

    async def spec(self) -> StoreSpec:
        self.loop = asyncio.get_running_loop()
        return self._spec

    async def endpoint(self) -> Endpoint:
        """Return where other processes can call; listens from the first time on. Raises `StoreError` if it cannot."""
        assert self.segments is not None
        if self._server is None:
            path = self.segments.directory / "socket"
            self._server = StoreServer(self, calls_of(Store), self.segments, path, self._port)
            await self._server.start()
            self.meter.start()
        return self._server.endpoint(self._node)

    async def left(self, client: str) -> None:
        """Give back what a client held; its process has ended."""
        self._release_all(self._clients.left(client))
        self._waiters.left(client)
        if self.segments is not None:
            await self.segments.left(client)

    async def many(self, calls: list[Call]) -> list[Result]:
        """Carry out several calls of one message; each stands for itself. They wait for no other client, and for files
        of large batches at most."""
        results: list[Result] = []
        for method, arguments in calls:
            try:
                results.append((await getattr(self, method)(*arguments), None))
            except StoreError as error:
                results.append((None, error))
            except Exception as error:  # noqa: BLE001 - a fault of this call; all other calls are carried out
                results.append((None, StoreError(f"{type(error).__name__}: {error}")))
        return results

    async def put(
        self, names: list[str], sent: SentBatch, facts: Facts, client: str = "", tickets: Sequence[int] = ()
    ) -> list[int]:
        """Admit one group for each row of the batch, as credits allow. Returns their numbers. Raises `StoreClosed`, and
        before any is admitted `MissingColumn`, `UnknownColumn`, `TooLarge`.

        `tickets`: of each group, for `withdraw_put`; one that was withdrawn in time has the number `WITHDRAWN`.
        `client` has one call of this kind under way at a time.
        """
        return await self.puts.put(names, sent, facts, client, tickets)

    async def withdraw_put(self, client: str, ticket: int) -> None:
        """Withdraw the groups of that ticket that are not admitted yet. Those that are stay."""
        self.puts.withdraw_groups(client, ticket)

    async def become_source(self, client: str) -> int:
        """Make this client the only source of groups: what other clients have put and is not admitted yet never will
        be. Returns how many groups were put so far, which is final."""
        self.puts.become_source(client)
        return self.ledger.residents.next_group

    async def outcomes(self, first: int, end: int) -> list[Outcome | None] | None:
        """Wait for the outcomes of the groups from `first` to before `end`: None for one without rewards, or of long
        ago. None when the store is closed. Raises `StoreError` in a run without a curriculum."""
        return await self._waiters.outcomes.of(first, end)

    async def lease(self, request: LeaseRequest) -> list[Grant] | None:
        """Wait for at least one free unit, and lease it. None when the store is closed, or the request was
        withdrawn."""
        self.ledger.residents.stage(request.stage)
        consumers = self.consumers[request.stage]
        if not self._clients.note_request(request):
            return None

        def take() -> list[Grant] | None:
            leases = consumers.take(request, self._clock())
            for lease in leases:
                self._work.granted(lease.id, request.stage, request.owner)
            version = self.ledger.residents.credits.served_version
            grants = [self._grant(lease.id, request.stage, self.ledger.rows_of(lease), version) for lease in leases]
            return grants or None

        asked = self._clock()
        granted = await consumers.lease(take, request)
        if granted is not None:
            self.meter.waited(request.stage, self._clock() - asked)
        return granted

    async def superseded(self, client: str) -> list[tuple[int, int]] | None:
        """Wait until other clients have written groups that this client holds. Returns leases and groups; None once
        closed."""
        return await self._waiters.superseded.next_of(client)

    async def withdraw(self, stage: str, client: str, ticket: int) -> None:
        """Withdraw the request of that ticket: its call returns None, and what it was given goes back."""
        self.ledger.residents.stage(stage)
        self.consumers[stage].withdraw(client, ticket)
        self._release_all(self._clients.leases_for(client, (ticket,)))

    async def retire(self, client: str) -> None:
        """Retire a client, which asks for no more leases: its requests return None, and the rest share without it. What
        it holds stays."""
        self._waiters.retire(client)

    async def lease_shared(
        self, stage: str, number: int, rank: int, num_ranks: int, max_units: int, owner: str
    ) -> Grant | None:
        """Lease this rank's share of round `number`. Waits until it is formed. None when the store is closed, but for a
        round that another rank has already begun: that one waits for this rank in a collective.
        """
        self.ledger.residents.stage(stage)

        def take() -> Grant | None:
            if self._closed is not None and not self.ledger.rounds.has_formed(stage, number):
                return None
            made, effects = self.ledger.lease_shared(stage, number, num_ranks, max_units, owner, self._clock())
            self._carry_out(effects)
            if made is None:
                return None
            self._work.granted(made.lease_id, stage, owner)
            return self._grant(made.lease_id, stage, self.ledger.rows_of_rank(made, rank), made.version)

        asked = self._clock()
        granted = await self._ranks[stage].wait(take)
        if granted is None:
            return take()
        self.meter.waited(stage, self._clock() - asked)
        return granted

    async def settle(self, stage: str, epoch: int | None) -> int:
        """Take back what a stage's rounds had under way, see `Ledger.settle`. `epoch`: the command's that asks; None: a
        worker asks. Raises `TakenOver` for an older one, as other calls that have one."""
        if epoch is not None:
            self._epoch.check(epoch)
        number, effects = self.ledger.settle(stage)
        self._carry_out(effects)
        return number

    async def batch_ready(self) -> bool:
        """Wait until as many groups are complete as the next step takes. Returns False when the store is closed."""
        train = self.ledger.residents.train
        assert train is not None

        def look() -> bool | None:
            return True if self.ledger.rounds.may_form(train) else None

        return bool(await self._ranks[train.name].wait(look))

    async def write(self, one: WriteRequest) -> None:
        """Write results: see `Ledger.write`."""
        block = self._intake.block(await self._intake.ready(one.sent), len(one.row_ids))
        self.blocks.pin(block)
        try:
            kept, effects = self.ledger.write(one.lease_id, one.stage, one.row_ids, one.names, one.facts, self._clock())
            self.blocks.add_rows(one.row_ids, kept, block, one.names)
            groups = {row // self._spec.group_size for row in one.row_ids}
            self._work.wrote(one.lease_id, groups, len(one.row_ids))
            self._carry_out(effects)
        finally:
            self.blocks.unpin(block)

    async def drop(self, lease_id: int, stage: str, row_ids: list[int], reason: str, detail: str) -> None:
        self._carry_out(self.ledger.drop(lease_id, stage, row_ids, reason))
        rows = f"row {row_ids[0]}" if len(row_ids) == 1 else f"{len(row_ids)} rows from {min(row_ids, default=0)}"
        self._last_drops.append(f"{stage}, {rows}: {reason}" + (f": {detail}" if detail else ""))

    async def release(self, lease_id: int) -> None:
        self._carry_out(self.ledger.release(lease_id))

    async def renew(self, lease_ids: list[int], client: str = "", tickets: Sequence[int] = ()) -> list[int]:
        """Restart the leases' time. Returns those that are over. `tickets`: requests of the client that it has no
        answer to yet; what they were given is renewed as well."""
        over = []
        for lease_id in self._clients.leases_for(client, tickets):
            if lease_id in self.ledger.residents.leases.held:
                self.ledger.renew(lease_id, self._clock())
        for lease_id in lease_ids:
            try:
                self.ledger.renew(lease_id, self._clock())
            except LeaseExpired:
                over.append(lease_id)
        return over

    async def abandon(self, owner: str) -> int:
        """Take back everything that a dead owner holds; its clients wait for nothing more. Returns how many leases it
        had. A new owner of that name speaks through a new client."""
        for client in self._clients.forget_owner(owner):
            self._waiters.left(client)
        lost, effects = self.ledger.abandon(owner)
        self._carry_out(effects)
        return lost

    async def lost(self, node: str) -> None:
        """Note that a node, by Ray's id, is gone: what lay there is made again, and nothing is taken from there any
        more. See `ledger/lost_values.py`."""
        lost = self.segments.node_lost(node) if self.segments is not None else None
        if lost is not None:
            self._intake.lost_nodes.add(lost)
            self.blocks.mark_gone(lambda placed: placed.node == lost)
            self._losing = asyncio.get_running_loop().create_task(self._lose(self._losing))
        if self._losing is not None:
            await asyncio.shield(self._losing)  # it continues if the caller is cancelled

    async def _lose(self, before: "asyncio.Task[None] | None") -> None:
        if before is not None:
            await asyncio.wait([before])
        for cells in self.blocks.lost_cells():
            self._carry_out(self.ledger.lost(cells, self._clock()))
            await asyncio.sleep(0)  # who is given lost rows meanwhile cannot read them, and asks again

    async def catch_up(self, steps: list[list[int]], version: int, epoch: int) -> None:
        """Catch up a store that was restored in another one's place. `steps`: rows that were trained since what it
        knows, by step. `version`: the newest that every engine serves. See `Ledger.catch_up`."""
        self._epoch.check(epoch)
        self._carry_out(self.ledger.catch_up(steps, version))

    async def complete_shared(self, lease_id: int, rank: int) -> None:
        self._carry_out(self.ledger.complete_shared(lease_id, rank))

    async def served(self, version: int, epoch: int, max_active: int | None) -> None:
        self._epoch.check(epoch)
        self._carry_out(self.ledger.served(version, max_active))

    async def last_batch(self, names: list[str] | None) -> Grant:
        """Return the batch trained last, less rows that are lost. `names`: None for all that they have. Raises
        `UnknownColumn`."""
        rows = self.ledger.last_batch()
        chosen = tuple(self.blocks.columns_of(rows) if names is None else names)
        for name in chosen:
            if name not in self._intake.columns:
                there = ", ".join(self._intake.columns)
                raise UnknownColumn(f"column {name!r} is not in the dataflow; it has {there}.")
        return self._grant(-1, "", rows, names=chosen)

    async def cut(self) -> int:
        """Take the state of this moment, for the next `snapshot` to write. Returns how many groups were put so far."""
        self._saving.cut()
        return self.ledger.residents.next_group

    async def snapshot(
        self, root: str, number: int, keep: int = 2, is_apart: bool = False, timeout_s: float = 3600.0
    ) -> str:
        """Write the state of the last `cut`, or else of this moment, as `ROOT/snapshot-<number>`, while calls are
        served. Returns its path. `keep`: so many of the newest stay. `is_apart`: of this moment, whatever was cut.
        `timeout_s`: the writing ends then, and nothing of it stays. See `snapshot.py`.
        """
        return await self._saving.write(root, number, keep, is_apart, timeout_s)

    async def stats(self) -> dict[str, float]:
        numbers = stats(self.ledger)
        numbers["store/waiting_producers"] = len(self.puts)
        numbers["store/waiting_consumers"] = len(self._waiters)
        numbers["store/blocks"] = self.blocks.num_blocks
        if self.segments is not None:
            numbers |= of_segments(self.segments)
        if self._server is not None:
            numbers |= of_server(self._server)
        return numbers

    async def work(self) -> dict[str, Any]:
        """Return which worker has worked on what since the last call: see `WorkLog.take`."""
        return self._work.take(self.ledger.residents.leases.held)

    async def describe(self) -> dict[str, Any]:
        return {
            **await describe(self.ledger, self._clock(), self._work.since),
            **self._waiters.describe(),
            "blocks": {"count": self.blocks.num_blocks, "bytes": self.blocks.bytes},
            "closed": self._closed,
            "last_drops": list(self._last_drops),
            "process": {"pid": os.getpid(), "cpu_s": time.process_time()},
        }

    async def close(self, reason: str) -> None:
        """End waiting calls; results under leases are still taken. A second time changes nothing."""
        if self._closed is None:
            self._closed = reason
        self.meter.close()
        if self._server is not None:
            self._server.close()
        self._waiters.close(self._closed)

    async def end(self) -> None:
        """Remove what the store keeps in files: no client calls any more. A second time changes nothing."""
        await self.close("the run is over")
        if self.segments is not None:
            self.segments.close()

    def _grant(
        self, lease_id: int, stage: str, rows: list[int], version: int = 0, names: tuple[str, ...] | None = None
    ) -> Grant:
        names = self._reads[stage] if names is None else names
        self._waiters.schedule()
        return Grant(lease_id, stage, names, gather(self.blocks, rows, names), version)

    def _release_all(self, lease_ids: Iterable[int]) -> None:
        for lease_id in lease_ids:
            self._carry_out(self.ledger.release(lease_id))
