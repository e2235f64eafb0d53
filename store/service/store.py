"""The streaming store: the ledger's decisions and the blocks' data behind calls that wait. In-process or a Ray actor.

    producers  ─ put ───────▶ ┌───────┐ ─ lease ────────▶ workers
                              │ Store │ ◀─ write, drop ── workers
    controller ─ published ─▶ └───────┘ ─ lease_shared ─▶ trainer ranks

Spoken to through `client/client.py` only. Who waits is woken one after the other when its stage may have become ready,
so nobody polls and first come is first served. All calls must come from one event loop.
"""

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.store.data.blocks import Blocks
from penstock.store.data.intake import Intake
from penstock.store.data.layout import Parcel
from penstock.store.data.segments import Segments
from penstock.store.errors import LeaseExpired, MissingColumn, StoreClosed, StoreError, UnknownColumn
from penstock.store.ledger.group import Facts
from penstock.store.ledger.leases import HeldLease
from penstock.store.ledger.ledger import Ledger, check_group_bytes
from penstock.store.service import snapshot
from penstock.store.service.calls import WITHDRAWN, Ask, Granted, Result, Write
from penstock.store.service.report import describe, stats
from penstock.store.service.server import Endpoint, Server
from penstock.store.service.sharing import PATIENCE_S, Sharing
from penstock.store.service.wait_queue import WaitQueue
from penstock.store.spec import StoreSpec

Clock = Callable[[], float]
SWEEP_AT = 64
"""Leases of a client after which those that are over are forgotten."""
STANDSTILL_S = 0.1
"""Lateness of a timer that tells that the store's process stood still."""


class Store:
    """Groups come in, are leased, written and trained, and go.

    Lifecycle: made with its spec, used until `close`, after which waiting calls return None or raise `StoreClosed`.

        store = Store(spec)
        client = StoreClient(store)
        groups = await client.put_groups([{"prompt_ids": [1, 2, 3], "task": "{}"}])

    Calls that change something never wait in between: each is one event of the ledger.
    """

    def __init__(
        self,
        spec: StoreSpec,
        clock: Clock = time.monotonic,
        segments: Segments | None = None,
        node: str = "",
        restore: str | Path | None = None,
    ) -> None:
        """`clock`: seconds. `segments`: where batches larger than `spec.inline_bytes` lie; None: here, with all others.
        `node`: the machine, for `endpoint`. `restore`: a snapshot, or a directory of them, to go on from; raises
        `CorruptSnapshot`, `StoreError`.
        """
        self._spec = spec
        self._clock = clock
        self._segments = segments
        self._intake = Intake(spec, segments)
        self._node = node
        self._server: Server | None = None
        self._leases_of: dict[str, dict[int, int]] = {}
        """Client -> its leases, and the tickets of its wishes for them; swept now and then."""
        self.ledger = Ledger(spec)
        self._blocks = Blocks(spec.columns, spec.group_size, self._intake.let_go)
        self._reads = {stage.name: stage.reads for stage in spec.stages}
        self._producers = WaitQueue(self._schedule)
        self._consumers = {stage.name: WaitQueue(self._schedule) for stage in spec.stages}
        self._ranks = {stage.name: WaitQueue(self._schedule) for stage in spec.stages}
        self._puts: dict[str, set[int]] = {}
        """Client whose put waits -> tickets of it that are withdrawn."""
        self._heard: Counter[str] = Counter()
        """Stage -> `Rounds.moves` that its ranks have heard of."""
        self._sharing = {stage.name: Sharing() for stage in spec.stages}
        self._patience: dict[str, asyncio.TimerHandle] = {}
        """Stage -> until when units are kept for consumers that are not there."""
        self._clients: dict[str, set[str]] = {}
        """Owner -> its clients that have asked for leases."""
        self._gone: set[str] = set()
        """Clients whose owner is known to be dead: what they asked for on their way is not given."""
        self._errors: deque[str] = deque(maxlen=20)
        self._closed: str | None = None
        self._pump_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._patient_until = 0.0
        """By the clock: nothing expires before."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop that the last event came from: all come from one."""
        self._cut: tuple[snapshot.Cut, dict[Any, Any]] | None = None
        if restore is not None:
            loaded = snapshot.load(restore, spec)
            self.ledger = loaded.ledger
            snapshot.refill(self._blocks, loaded, lambda batch: self._intake.block(batch, batch.num_rows))

    async def spec(self) -> StoreSpec:
        self.loop = asyncio.get_running_loop()
        return self._spec

    async def endpoint(self) -> Endpoint:
        """Where processes of this machine can call; listens from the first time on."""
        assert self._segments is not None
        if self._server is None:
            self._server = Server(self, self._segments, self._segments.directory / "socket")
            await self._server.start()
        places = (str(self._segments.directory), str(self._segments.spill))
        return Endpoint(self._node, str(self._server.path), places)

    async def left(self, client: str) -> None:
        """A client's process has ended: what it held goes back."""
        self._release_all(self._leases_of.pop(client, ()))
        for sharing in self._sharing.values():
            sharing.gone(client)
        if self._segments is not None:
            self._segments.left(client)
        for clients in self._clients.values():
            clients.discard(client)
        self._gone.discard(client)
        self._changed()

    async def many(self, calls: list[tuple[str, tuple[Any, ...]]]) -> list[Result]:
        """Several calls that do not wait, in one message; each stands for itself."""
        results: list[Result] = []
        for method, arguments in calls:
            try:
                results.append((await getattr(self, method)(*arguments), None))
            except StoreError as error:
                results.append((None, error))
        return results

    async def put(
        self,
        names: list[str],
        parcel: Parcel,
        facts: Facts,
        client: str = "",
        tickets: Sequence[int] = (),
    ) -> list[int]:
        """One group for each row of the batch, admitted as credits allow; their numbers. Raises `StoreClosed`, and
        before any is admitted `MissingColumn`, `UnknownColumn`, `TooLarge`.

        `tickets`: of each group, for `withdraw_put`; one that was withdrawn in time has the number `WITHDRAWN`.
        `client` has one call of this kind under way at a time.
        """
        num_groups = len(facts.row_bytes)
        block = self._intake.block(parcel, num_groups)
        admitted: list[int] = []
        withdrawn = self._puts[client] = set[int]()

        def admit() -> list[int] | None:
            before = len(admitted)
            while len(admitted) < num_groups:
                number = len(admitted)
                if tickets and tickets[number] in withdrawn:
                    admitted.append(WITHDRAWN)
                    continue
                group = self.ledger.admit(
                    self._clock(),
                    facts.row_bytes[number],
                    _at(facts.prompt_tokens, number),
                    _at(facts.response_tokens, number),
                )
                if group is None:
                    break
                self._blocks.add_group(group, block, number, names)
                admitted.append(group)
            if len(admitted) > before:
                self._changed()
            return admitted if len(admitted) == num_groups else None

        self._blocks.pin(block)
        try:
            self._check_source(names)
            check_group_bytes(self._spec, facts.row_bytes)
            done = await self._producers.wait(admit)
        finally:
            if self._puts.get(client) is withdrawn:
                del self._puts[client]
            self._blocks.unpin(block)
        if done is None:
            raise StoreClosed(
                f"the store is closed ({self._closed}); {num_groups - len(admitted)} groups were not admitted."
            )
        return done

    async def withdraw_put(self, client: str, ticket: int) -> None:
        """The groups of that ticket that are not admitted yet never will be. Those that are stay."""
        if client in self._puts:
            self._puts[client].add(ticket)
            self._schedule()

    async def lease(self, ask: Ask) -> list[Granted] | None:
        """Waits for at least one free unit. None when the store is closed, or the wish was withdrawn."""
        self.ledger.residents.stage(ask.stage)
        if ask.client in self._gone:
            return None
        self._clients.setdefault(ask.owner, set()).add(ask.client)
        self._sharing[ask.stage].asked(ask)

        def take() -> list[Granted] | None:
            granted: list[Granted] = []
            share = self._share_of(ask)
            while share > 0 and len(granted) < max(1, ask.max_leases):
                max_units = min(share, ask.max_units)
                lease = self.ledger.lease(ask.stage, max_units, ask.owner, self._clock())
                if lease is None:
                    break
                share -= self._units_of(lease)
                self._sharing[ask.stage].took(ask.client, self._units_of(lease))
                self._swept(ask.client)[lease.id] = ask.ticket
                granted.append(self._grant(lease.id, ask.stage, self.ledger.rows_of(lease)))
            return granted or None

        return await self._consumers[ask.stage].wait(take, ask.client, ask.ticket, ask)

    async def withdraw(self, stage: str, client: str, ticket: int) -> None:
        """The wish of that ticket is no more: its call returns None, and what it was given goes back."""
        self.ledger.residents.stage(stage)
        self._consumers[stage].withdraw(client, ticket)
        self._release_all(self._given(client, (ticket,)))
        self._changed()

    async def lease_shared(
        self, stage: str, number: int, rank: int, num_ranks: int, max_units: int, owner: str, max_rounds: int = 1
    ) -> list[Granted] | None:
        """This rank's shares of the rounds from `number` on: of those that can be formed now, at most `max_rounds`.
        Waits until the first is formed. None when the store is closed, but for a round that another rank has already
        begun: that one waits for this rank in a collective.
        """
        self.ledger.residents.stage(stage)

        def take() -> list[Granted] | None:
            granted: list[Granted] = []
            while len(granted) < max(1, max_rounds):
                round = number + len(granted)
                if self._closed is not None and not self.ledger.has_formed(stage, round):
                    break
                made = self.ledger.lease_shared(stage, round, num_ranks, max_units, owner, self._clock())
                if self.ledger.residents.freed:  # stale groups were evicted
                    self._changed()
                if made is None:
                    break
                granted.append(self._grant(made.lease_id, stage, self.ledger.share(made, rank), made.version))
            return granted or None

        granted = await self._ranks[stage].wait(take, at_once=True)
        return take() if granted is None else granted

    async def batch_ready(self) -> bool:
        """Wait until as many groups are complete as the next update takes. False when the store is closed."""
        train = self.ledger.residents.train
        assert train is not None

        def look() -> bool | None:
            return True if self.ledger.rounds.may_form(train) else None

        return bool(await self._ranks[train.name].wait(look, at_once=True))

    async def write(self, one: Write) -> None:
        """See `Ledger.write`."""
        block = self._intake.block(one.parcel, len(one.row_ids))
        self._blocks.pin(block)
        try:
            kept = self.ledger.write(one.lease_id, one.stage, one.row_ids, one.names, one.facts, self._clock())
            self._blocks.add_rows(one.row_ids, kept, block, one.names)
        finally:
            self._blocks.unpin(block)
            self._changed()

    async def drop(self, lease_id: int, stage: str, row_ids: list[int], reason: str, detail: str) -> None:
        self.ledger.drop(lease_id, stage, row_ids, reason)
        self._errors.append(
            f"{reason}: stage {stage}, {len(row_ids)} row(s) from {row_ids[:1]}: {detail}" if detail else reason
        )
        self._changed()

    async def release(self, lease_id: int) -> None:
        self.ledger.release(lease_id)
        self._changed()

    async def renew(self, lease_ids: list[int], client: str = "", tickets: Sequence[int] = ()) -> list[int]:
        """Their time starts anew; those that are over are returned. `tickets`: wishes of the client that it has no
        answer to yet; what they were given is renewed as well."""
        over = []
        for lease_id in self._given(client, tickets):
            if lease_id in self.ledger.residents.leases.held:
                self.ledger.renew(lease_id, self._clock())
        for lease_id in lease_ids:
            try:
                self.ledger.renew(lease_id, self._clock())
            except LeaseExpired:
                over.append(lease_id)
        return over

    async def abandon(self, owner: str) -> int:
        """Everything that a dead owner holds goes back, and its clients wait for nothing more; how many leases it
        had. A new owner of that name speaks through a new client."""
        clients = self._clients.pop(owner, set())
        self._gone |= clients
        for client in clients:
            for sharing in self._sharing.values():
                sharing.gone(client)
            for turns in self._consumers.values():
                turns.withdraw(client)
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
            if name not in self._intake.columns:
                there = ", ".join(self._intake.columns)
                raise UnknownColumn(f"column {name!r} is not in the dataflow; it has {there}.")
        return self._grant(-1, "", rows, names=chosen)

    async def cut(self) -> int:
        """Take the state of this moment, for the next `snapshot` to write. Groups put so far."""
        # Mapped now: the rows may end, and their segments go, while it is written.
        mapped = {placed: self._segments.open(placed) for placed in self._blocks.refs()} if self._segments else {}
        self._cut = snapshot.cut(self._spec, self.ledger, self._blocks), mapped
        return self.ledger.residents.next_group

    async def snapshot(self, root: str, number: int, keep: int = 2) -> str:
        """Write the state of the last `cut`, or else of this moment, as `ROOT/snapshot-<number>`, and go on meanwhile;
        its path. `keep`: so many of the newest stay. See `snapshot.py`.
        """
        if self._cut is None:
            await self.cut()
        assert self._cut is not None
        (state, mapped), self._cut = self._cut, None
        try:
            return str(await asyncio.to_thread(snapshot.write, root, number, state, mapped.__getitem__, keep=keep))
        except OSError as error:
            raise StoreError(f"{root}: the store's snapshot cannot be written: {error}") from None

    async def stats(self) -> dict[str, float]:
        numbers = stats(self.ledger)
        numbers["store/waiting_producers"] = len(self._producers)
        numbers["store/waiting_consumers"] = sum(map(len, (*self._consumers.values(), *self._ranks.values())))
        numbers["store/blocks"] = self._blocks.num_blocks
        if self._segments is not None:
            numbers["store/shared_bytes"] = self._segments.bytes
            numbers["store/spilled_bytes"] = self._segments.spilled_bytes
        if self._server is not None:
            numbers["store/refused_connections"] = self._server.refused
        return numbers

    async def describe(self) -> dict[str, Any]:
        waiters = {name: len(self._consumers[name]) + len(self._ranks[name]) for name in self._consumers}
        owners = {client: owner for owner, clients in self._clients.items() for client in clients}
        return describe(self.ledger, self._clock()) | {
            "waiting": waiters | {"put": len(self._producers)},
            "waiters": {
                name: [owners.get(str(client), "?") for client in turns.clients]
                for name, turns in self._consumers.items()
            },
            "blocks": {"count": self._blocks.num_blocks, "bytes": self._blocks.bytes},
            "closed": self._closed,
            "process": {"pid": os.getpid(), "cpu_s": time.process_time()},
        }

    async def errors(self) -> list[str]:
        return list(self._errors)

    async def close(self, reason: str) -> None:
        """Waiting calls end; results under leases are still taken. A second time changes nothing."""
        if self._closed is None:
            self._closed = reason
        for timer in (self._timer, *self._patience.values()):
            if timer is not None:
                timer.cancel()
        if self._server is not None:
            self._server.close()
        for turns in (self._producers, *self._consumers.values(), *self._ranks.values()):
            turns.close()

    async def end(self) -> None:
        """Nobody calls any more: what it keeps in files goes. A second time changes nothing."""
        await self.close("the run is over")
        if self._segments is not None:
            self._segments.close()

    def _grant(
        self, lease_id: int, stage: str, rows: list[int], version: int = 0, names: tuple[str, ...] | None = None
    ) -> Granted:
        names = self._reads[stage] if names is None else names
        self._schedule()
        return Granted(lease_id, stage, names, self._blocks.gather(rows, names), version)

    def _given(self, client: str, tickets: Sequence[int]) -> list[int]:
        """Leases that a client was given for some of its wishes; they may be over."""
        return [lease_id for lease_id, ticket in self._leases_of.get(client, {}).items() if ticket in tickets]

    def _release_all(self, lease_ids: Iterable[int]) -> None:
        for lease_id in lease_ids:
            self.ledger.release(lease_id)

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
        """Give one in each queue its turn if there may be something for it, and the ranks that can go on theirs."""
        self._pump_due = False
        for name, consumers in self._consumers.items():
            if self.ledger.residents.readiness.by_name[name].num_free:
                consumers.wake_first(self._rank)
            elif name in self._patience:
                self._patience.pop(name).cancel()
        for name, ranks in self._ranks.items():
            self._wake_ranks(name, ranks)
        self._producers.wake_first()
        self._arm()

    def _wake_ranks(self, name: str, ranks: WaitQueue) -> None:
        """All of a stage, when a round of it can be formed, or has been formed or ended."""
        rounds = self.ledger.rounds
        stage, moves = self.ledger.residents.stage(name), rounds.moves[name]
        if len(ranks) and (moves != self._heard[name] or rounds.may_form(stage)):
            ranks.wake_all()
        self._heard[name] = moves

    def _share_of(self, ask: Ask) -> int:
        """Units of what is free now that this one may take. 0 with units free: they are kept for others, which come
        or are given up soon."""
        free = self.ledger.residents.stage(ask.stage).num_free
        if not free:
            return 0
        wishes = self._consumers[ask.stage].wishes
        share = self._sharing[ask.stage].share(free, ask, wishes, partial(self._held_by, ask.stage))
        if not share and ask.stage not in self._patience:
            loop = asyncio.get_running_loop()
            self._patience[ask.stage] = loop.call_later(PATIENCE_S, self._lose_patience, ask.stage)
        return share

    def _lose_patience(self, stage: str) -> None:
        del self._patience[stage]
        self._sharing[stage].expect_only(str(client) for client in self._consumers[stage].clients)
        self._schedule()

    def _held_by(self, stage: str, client: str) -> int:
        """Units of a stage that a client works on."""
        held = self.ledger.residents.leases.held
        index = self.ledger.residents.stage(stage).index
        living = (held[lease] for lease in self._swept(client) if lease in held)
        return sum(self._units_of(lease) for lease in living if lease.stage == index)

    def _swept(self, client: str) -> dict[int, int]:
        """Leases of a client, without most of those that are over."""
        leases = self._leases_of.setdefault(client, {})
        if len(leases) > SWEEP_AT:
            held = self.ledger.residents.leases.held
            leases = self._leases_of[client] = {lease: ticket for lease, ticket in leases.items() if lease in held}
        return leases

    def _units_of(self, lease: HeldLease) -> int:
        if self._spec.stages[lease.stage].unit == "sample":
            return sum(mask.bit_count() for mask in lease.open.values())
        return len(lease.open)

    def _rank(self, ask: Ask) -> tuple[float, int]:
        return self._sharing[ask.stage].rank(ask, self._held_by(ask.stage, ask.client))

    def _arm(self) -> None:
        """One timer, for the lease that may expire next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.ledger.next_deadline()
        if deadline is not None and self.loop is not None and self._closed is None:
            due = max(deadline, self._patient_until)
            self._timer = self.loop.call_later(max(0.0, due - self._clock()), self._expire, due)

    def _expire(self, due: float) -> None:
        """A lease's deadline has come. If this process stood still until long after it, renewals lie unread: they come
        first."""
        self._timer = None
        if self._clock() - due > STANDSTILL_S and due > self._patient_until:
            self._patient_until = self._clock() + STANDSTILL_S
            self._arm()
            return
        self.ledger.expire(self._clock())
        self._changed()


def _at(values: list[int] | None, position: int) -> int:
    return values[position] if values is not None else 0
