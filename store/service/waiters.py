"""Calls that wait in the store: puts for credits, consumers for leases, ranks for rounds. No caller polls.

    event of the ledger ─ Effects ─▶ Waiters.carry_out ─▶ blocks: values are freed at once
                                         └─ soon ─▶ puts, consumers and ranks: those that may have something to do

Each kind of call has a `WaitQueue`: woken one after the other, first come first served. Callers are woken once for all
events of a turn of the event loop, and then the timers are set: for the lease that expires next, and for the next group
that becomes a straggler. Which consumer is next, and how much it gets, is decided in `sharing.py`; of two that are
equally entitled, the one on the node of the next rows is chosen. None waits for that, and no row overtakes another.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from penstock.store.data.block_index import BlockIndex, CellPlace, ValueBlock
from penstock.store.data.codec import SentBatch
from penstock.store.data.segments import Intake, Segments
from penstock.store.errors import MissingColumn, StoreClosed, StoreError, UnknownColumn
from penstock.store.ledger.admission import check_group_bytes
from penstock.store.ledger.group import Facts, bits
from penstock.store.ledger.leases import HeldLease
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.outcomes import Outcome
from penstock.store.ledger.readiness import StageQueue
from penstock.store.ledger.residents import Effects
from penstock.store.service.sharing import PATIENCE_S, Allotment, Clients
from penstock.store.service.wire import WITHDRAWN, Grant, LeaseRequest

T = TypeVar("T")
CALLERS_EXAMINED = 64
"""Number of waiting callers, the first ones, that are looked at when one is chosen."""
GROUPS_EXAMINED = 4
"""Number of groups looked at, at the head of a stage's queue; the first ones may have gone, until a client leases."""
STANDSTILL_S = 0.1
"""Lateness of a timer, in seconds, that tells that the store's process stood still."""
Superseded = tuple[int, int]
"""A lease and a group of it that another lease has written first."""


@dataclass(eq=False)
class WaitingCall:
    """A call that waits. `turn` becomes true when it may try, false when it was withdrawn."""

    turn: "asyncio.Future[bool]"
    client: Hashable
    ticket: int
    request: Any
    """The thing that it waits for, to choose among those that wait."""


class WaitQueue:
    """A queue of callers. One that is woken tries; if it succeeds there may be something for the next one too, so
    `pass_on` is called.

    A caller keeps its place until it has succeeded. One that is cancelled, withdrawn or refused has taken nothing,
    since it only tries in its own turn, and its turn is passed on. Lifecycle: `wait` for each call, `wake_first` or
    `wake_all` when something may have changed, `close`.
    """

    def __init__(self, pass_on: Callable[[], None] = lambda: None, *, at_once: bool = False) -> None:
        """Make an empty queue. `pass_on`: called when another caller may have a turn; it ends in `wake_first` or
        `wake_all`. `at_once`: a call is tried as it comes even if others wait, which are after something else."""
        self._pass_on, self._at_once = pass_on, at_once
        self._queue: dict[WaitingCall, None] = {}
        self._closed: str | None = None
        """The reason that it was closed with."""
        self._woken: WaitingCall | None = None
        """The caller that is about to try."""
        self._missed = False
        """True if a caller was to be woken while another had the turn."""

    def __len__(self) -> int:
        """Number of callers that wait."""
        return len(self._queue)

    @property
    def clients(self) -> list[Hashable]:
        """Clients of the callers that wait, in order."""
        return [waiting.client for waiting in self._queue]

    @property
    def requests(self) -> list[Any]:
        """Requests of the first that wait, in order."""
        return [waiting.request for waiting in itertools.islice(self._queue, CALLERS_EXAMINED)]

    async def wait(
        self,
        attempt: Callable[[], T | None],
        client: Hashable = None,
        ticket: int = 0,
        request: Any = None,
    ) -> T | None:
        """Return the first result of `attempt` that is not None; it is tried now, and when it is this caller's turn.

        None once closed or withdrawn. `client` and `ticket` name the caller, for `withdraw`.
        """
        if self._closed is not None:
            return None
        if not self._queue or self._at_once:
            result = attempt()
            if result is not None:
                return result
        waiting = WaitingCall(asyncio.get_running_loop().create_future(), client, ticket, request)
        self._queue[waiting] = None
        if len(self._queue) > 1:
            self._pass_on()
        try:
            # It may have been withdrawn since its turn was given.
            while await waiting.turn and waiting in self._queue and self._closed is None:
                self._end_turn(waiting)
                waiting.turn = asyncio.get_running_loop().create_future()
                result = attempt()
                if result is not None:
                    return result
                if self._missed:
                    self._pass_on()
            return None
        finally:
            self._end_turn(waiting)
            self._queue.pop(waiting, None)
            if self._closed is None:
                self._pass_on()

    def withdraw(self, client: Hashable, ticket: int | None = None) -> int:
        """Have the calls of `client` (that of one ticket, or all) give up their places. Returns how many they were."""
        leaving = [waiting for waiting in self._queue if waiting.client == client and ticket in (None, waiting.ticket)]
        for waiting in leaving:
            del self._queue[waiting]
            _wake(waiting, goes_on=False)
        return len(leaving)

    def wake_first(self, priority: Callable[[Any], Any] | None = None) -> None:
        """Let one caller try, unless another is about to. `priority`: of a request; the lowest is chosen, the first of
        several. None: the first of all."""
        self._missed = self._woken is not None
        if self._queue and not self._missed:
            first = itertools.islice(self._queue, CALLERS_EXAMINED if priority else 1)
            self._woken = min(first, key=lambda one: priority(one.request) if priority else 0)
            _wake(self._woken)

    def wake_all(self) -> None:
        for waiting in self._queue:
            _wake(waiting)

    def close(self, reason: str) -> None:
        """Close the queue: all that wait, now or later, get None."""
        self._closed = reason
        self.wake_all()

    def _end_turn(self, waiting: WaitingCall) -> None:
        if self._woken is waiting:
            self._woken = None


def _wake(waiting: WaitingCall, *, goes_on: bool = True) -> None:
    if not waiting.turn.done():
        waiting.turn.set_result(goes_on)


@dataclass
class _PutUnderWay:
    """A client's put that waits."""

    withdrawn: set[int] = field(default_factory=set)
    """Tickets of the groups that were withdrawn."""
    has_left: bool = False
    """True once the client has left."""


class PutQueue(WaitQueue):
    """The puts of all clients. Lifecycle: `put` in any number of clients, `wake_first` when a group may be admitted,
    `close`: puts that wait, and those that come, raise `StoreClosed`."""

    def __init__(
        self,
        ledger: Ledger,
        blocks: BlockIndex,
        intake: Intake,
        clock: Callable[[], float],
        waiters: "Waiters",
        admitted: Callable[[int], None],
    ) -> None:
        """Prepare the queue. `waiters`: those of the store, for the effects of an admission and to have `wake` called.
        `admitted`: called with each group."""
        super().__init__(waiters.wake_puts)
        self._spec, self._ledger = ledger.spec, ledger
        self._blocks, self._intake = blocks, intake
        self._clock, self._waiters, self._admitted = clock, waiters, admitted
        self._under_way: dict[str, _PutUnderWay] = {}
        """Puts that wait, by client."""
        self._source: str | None = None
        """The only client that may put; None: any."""

    async def put(
        self, names: list[str], sent: SentBatch, facts: Facts, client: str, tickets: Sequence[int]
    ) -> list[int]:
        """Put groups: see `Store.put`."""
        mine = self._under_way[client] = _PutUnderWay()
        try:
            block = self._intake.block(await self._intake.ready(sent), len(facts.row_bytes))
            self._blocks.pin(block)
            try:
                return await self._admitted_all(names, block, facts, client, tickets, mine)
            finally:
                self._blocks.unpin(block)
        finally:
            if self._under_way.get(client) is mine:
                del self._under_way[client]

    async def _admitted_all(
        self, names: list[str], block: ValueBlock, facts: Facts, client: str, tickets: Sequence[int], mine: _PutUnderWay
    ) -> list[int]:
        num_groups = len(facts.row_bytes)
        admitted: list[int] = []

        def check() -> None:
            if reason := self._refusal(client, mine):
                raise StoreError(f"{num_groups - len(admitted)} groups were not admitted: {reason}.")

        def admit() -> list[int] | None:
            check()
            if block.is_gone:
                raise StoreError(
                    f"{num_groups - len(admitted)} groups waited to be admitted and are gone with the node that they "
                    "were on. Put them again."
                )
            while len(admitted) < num_groups:
                number = len(admitted)
                if tickets and tickets[number] in mine.withdrawn:
                    admitted.append(WITHDRAWN)
                    continue
                group, effects = self._ledger.admit(
                    self._clock(),
                    facts.row_bytes[number],
                    _at(facts.prompt_tokens, number),
                    _at(facts.response_tokens, number),
                )
                if group is None:
                    break
                self._blocks.add_group(group, block, number, names)
                self._waiters.carry_out(effects)
                self._admitted(group)
                admitted.append(group)
            return admitted if len(admitted) == num_groups else None

        self._check_source(names)
        check_group_bytes(self._spec.max_bytes, facts.row_bytes)
        check()
        done = await self.wait(admit, client)
        if done is None:
            check()
            raise StoreClosed(
                f"the store is closed ({self._closed}); {num_groups - len(admitted)} groups were not admitted."
            )
        return done

    def withdraw_groups(self, client: str, ticket: int) -> None:
        """Withdraw the groups of that ticket that are not admitted yet. Those that are stay."""
        if client in self._under_way:
            self._under_way[client].withdrawn.add(ticket)
            self._waiters.wake_puts()

    def become_source(self, client: str) -> None:
        """Admit no other client's groups from now on, nor what waits of theirs."""
        self._source = client
        for other in self._under_way.keys() - {client}:
            self.withdraw(other)

    def left(self, client: str) -> None:
        """Give up a put that no client waits for any more."""
        if client in self._under_way:
            self._under_way[client].has_left = True
            self.withdraw(client)

    @property
    def under_way(self) -> list[str]:
        """Clients whose put waits."""
        return list(self._under_way)

    def _refusal(self, client: str, under_way: _PutUnderWay) -> str:
        """The reason why no more of a client's groups are admitted, if that is so."""
        if self._source not in (None, client):
            return "another client is the source of groups now"
        return "the client has left" if under_way.has_left else ""

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


def _at(values: list[int] | None, position: int) -> int:
    return values[position] if values is not None else 0


class Locality:
    """The nodes of rows and of clients, in a run on several nodes."""

    def __init__(self, ledger: Ledger, blocks: BlockIndex, segments: Segments) -> None:
        self._ledger, self._blocks, self._segments = ledger, blocks, segments

    def node_of_next(self, stage: StageQueue) -> str | None:
        """The node of the next rows; None if they are in no file, or have gone."""
        oldest = heapq.nsmallest(GROUPS_EXAMINED, stage.queue)
        groups = (group for group in map(self._ledger.residents.groups.get, oldest) if group is not None)
        group = next((group for group in groups if group.free[stage.index]), None)
        if group is None:
            return None
        index = next(iter(bits(group.free[stage.index])))
        blocks = [self._block(group.id, index, name) for name in stage.spec.reads]
        largest = max(blocks, key=lambda block: block.nbytes, default=None)
        return largest.ref.node if largest is not None and largest.ref is not None else None

    def node_of(self, client: str) -> str:
        return self._segments.node_of(client)

    def _block(self, group: int, index: int, name: str) -> ValueBlock:
        found = self._blocks.place_of(group, range(index, index + 1), name)
        return found.block if isinstance(found, CellPlace) else found[0].block


class StragglerTimer:
    """A timer for the next group that becomes a straggler, and the choice among engines that wait and may take it as
    well. `Stragglers` of the ledger decides which groups are stragglers. Lifecycle: `arm` after any event, `cancel`."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float], wake: Callable[[int], None]) -> None:
        """Prepare the timer. `wake`: of a stage, by number, soon; called when a group has become a straggler."""
        self._stragglers, self._clock, self._wake = ledger.residents.stragglers, clock, wake
        self._stage = ledger.residents.sampling if ledger.spec.straggler_factor else None
        self._timer: asyncio.TimerHandle | None = None

    def owners(self) -> set[str]:
        """Owners of the stragglers, which another engine may take."""
        return {lease.owner for _, lease in self._stragglers.overdue(self._clock())}

    def priority(self, held: Mapping[str, int]) -> Callable[[LeaseRequest], tuple[bool, int]] | None:
        """The priority of a request, the lowest is next: one that can take a group, and holds the fewest. None if there
        is nothing to take. `held`: units by client."""
        owners = self.owners()
        return (lambda request: (owners == {request.owner}, held.get(request.client, 0))) if owners else None

    def arm(self) -> None:
        if self._stage is None:
            return
        self.cancel()
        if (due := self._stragglers.next_overdue()) is not None:
            wait_s = max(0.0, due - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._due, self._stage.index)

    def _due(self, stage: int) -> None:
        self.owners()  # notes all stragglers until now: no timer is set for them again
        self._wake(stage)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ConsumerQueue(WaitQueue):
    """The consumers of one stage. Lifecycle: `lease` for each request, `wake` whenever the stage may have become ready,
    `close`."""

    def __init__(
        self,
        stage: str,
        ledger: Ledger,
        clients: Clients,
        schedule: Callable[[], None],
        locality: Locality | None,
        stragglers: StragglerTimer,
    ) -> None:
        """Prepare the queue. `schedule`: has `wake` called soon. `locality`: None in a run on one node."""
        super().__init__(schedule)
        self._allotment = Allotment(stage, ledger, clients)
        self._stage = self._allotment.stage
        self._stragglers = stragglers if self._stage is ledger.residents.sampling else None
        self._locality = locality
        self._patience: asyncio.TimerHandle | None = None
        """Timer until which units are kept for consumers that are not there."""

    async def lease(self, take: Callable[[], list[Grant] | None], request: LeaseRequest) -> list[Grant] | None:
        """Return what `take` gives in this request's turn. None when closed, or when it was withdrawn."""
        self._allotment.note_request(request)
        return await self.wait(take, request.client, request.ticket, request)

    def take(self, request: LeaseRequest, now: float) -> list[HeldLease]:
        """Lease what a request gets now. Nothing while units are free: they are kept for other consumers, which come or
        are given up soon."""
        leases = self._allotment.take(request, self.requests, now)
        if not leases and self._stage.num_free and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._end_patience)
        return leases

    def left(self, client: str) -> None:
        """Expect a client no more, and withdraw all of its requests."""
        self._allotment.left(client)
        self.withdraw(client)

    def wake(self) -> None:
        """Let the next request try, if something is free."""
        if self._stage.num_free:
            if self._queue:
                self.wake_first(self._priority())
        else:
            self._cancel_patience()
            priority = self._stragglers.priority(self._allotment.held) if self._stragglers is not None else None
            if priority is not None:
                self.wake_first(priority)

    def _priority(self) -> Callable[[LeaseRequest], tuple[float, bool, int]]:
        """Make the priority of requests for the next rows."""
        locality = self._locality if len(self._queue) > 1 else None
        node = locality.node_of_next(self._stage) if locality is not None else None

        def priority(request: LeaseRequest) -> tuple[float, bool, int]:
            is_remote = locality is not None and node is not None and locality.node_of(request.client) != node
            return self._allotment.priority(request, is_remote)

        return priority

    def close(self, reason: str) -> None:
        self._cancel_patience()
        super().close(reason)

    def _cancel_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _end_patience(self) -> None:
        self._patience = None
        self._allotment.expect_only([str(client) for client in self.clients])
        self._pass_on()


class RankQueue(WaitQueue):
    """The ranks of one stage, each of which is after a round of its own. Lifecycle: `wait` for each call, `wake`
    whenever a round may be there, `close`."""

    def __init__(self, stage: str, ledger: Ledger, schedule: Callable[[], None]) -> None:
        """Prepare the queue. `schedule`: has `wake` called soon."""
        super().__init__(schedule, at_once=True)
        self._rounds, self._stage = ledger.rounds, ledger.residents.stage(stage)

    def wake(self, *, moved: bool) -> None:
        """Wake all, when a round can be formed, or one has `moved`: it was formed, ended or taken back."""
        if self._queue and (moved or self._rounds.may_form(self._stage)):
            self.wake_all()


class SupersededQueue(WaitQueue):
    """Clients that wait to hear which of their leases are superseded: engines stop sampling a group that another engine
    has written first. See `Stragglers`. Lifecycle: `next_of` and `tell` in any order, `left` for
    each client, `close`."""

    def __init__(self, clients: Clients) -> None:
        super().__init__(at_once=True)
        self._clients = clients
        self._due: dict[str, list[Superseded]] = {}
        """Superseded leases that are not reported yet, by client."""

    def tell(self, superseded: list[Superseded]) -> None:
        for lease_id, group in superseded:
            if (client := self._clients.client_of(lease_id)) is not None:
                self._due.setdefault(client, []).append((lease_id, group))
        self.wake_all()

    async def next_of(self, client: str) -> list[Superseded] | None:
        """Wait for leases that were superseded since the last time. None once closed."""
        return await self.wait(lambda: self._due.pop(client, None), client)

    def left(self, client: str) -> None:
        self._due.pop(client, None)
        self.withdraw(client)


class OutcomeQueue(WaitQueue):
    """Calls of the source that wait for outcomes of earlier groups (`ledger/outcomes.py`). Lifecycle: `of` for
    each call, `wake_all` after any event, `close`."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(at_once=True)
        self._residents = ledger.residents

    async def of(self, first: int, end: int) -> list[Outcome | None] | None:
        """Return the outcomes of the groups from `first` to before `end`, once all are known. None when closed."""
        outcomes = self._residents.outcomes
        if outcomes is None:
            raise StoreError("outcomes of groups are kept in runs with data.curriculum.by alone.")
        known: list[Outcome | None] = []

        def look() -> list[Outcome | None] | None:
            for group in range(first + len(known), min(end, self._residents.next_group)):
                try:
                    known.append(outcomes.of(group, self._residents.groups.get(group)))
                except LookupError:
                    return None
            return known if len(known) >= end - first else None

        return await self.wait(look)


class Expiry:
    """A timer for the next deadline. Lifecycle: `arm` after any event, `cancel`."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float], carry_out: Callable[[Effects], None]) -> None:
        """Prepare the timer. `carry_out`: called after leases may have expired."""
        self._ledger, self._leases = ledger, ledger.residents.leases
        self._clock, self._carry_out = clock, carry_out
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """The time at which the timer fires, by the clock."""
        self._patient_until = 0.0
        """The time before which nothing expires, by the clock."""

    def arm(self) -> None:
        """Set the timer. One that is too early stays: most leases end long before, and it costs one check of the
        next deadline."""
        deadline = self._leases.next_deadline()
        if deadline is None:
            self.cancel()
            return
        due = max(deadline, self._patient_until)
        if self._timer is not None and self._due <= due:
            return
        self.cancel()
        self._due = due
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, due - self._clock()), self._expire, due)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, due: float) -> None:
        """Expire leases whose deadline has come. If this process stood still until long after it, renewals lie unread:
        they come first."""
        self._timer = None
        if self._clock() - due > STANDSTILL_S and due > self._patient_until:
            self._patient_until = self._clock() + STANDSTILL_S
            self.arm()
            return
        _, effects = self._ledger.expire(self._clock())
        self._carry_out(effects)


class Waiters:
    """The waiting calls of a store, and its timers. Lifecycle: made before the first call; `carry_out` after each event
    of the ledger, `left` for each client that has gone, `close`."""

    def __init__(
        self,
        ledger: Ledger,
        clients: Clients,
        blocks: BlockIndex,
        intake: Intake,
        locality: Locality | None,
        clock: Callable[[], float],
        admitted: Callable[[int], None],
    ) -> None:
        """Make the queues. `locality`: None in a run on one node. `admitted`: called with each group that is
        admitted."""
        self._clients, self._blocks = clients, blocks
        self._due = Effects()
        """Effects whose callers are to be woken at the end of this turn of the event loop."""
        self._is_scheduled = self._is_closed = False
        self._expiry = Expiry(ledger, clock, self.carry_out)
        self._stragglers = StragglerTimer(ledger, clock, self.wake_stage)
        self.puts = PutQueue(ledger, blocks, intake, clock, self, admitted)
        self.superseded = SupersededQueue(clients)
        self.outcomes = OutcomeQueue(ledger)
        self.consumers: dict[str, ConsumerQueue] = {}
        self.ranks: dict[str, RankQueue] = {}
        for index, stage in enumerate(ledger.spec.stages):
            name, schedule = stage.name, partial(self.wake_stage, index)
            self.consumers[name] = ConsumerQueue(name, ledger, clients, schedule, locality, self._stragglers)
            self.ranks[name] = RankQueue(name, ledger, schedule)
        self._by_stage = list(zip(self.consumers.values(), self.ranks.values(), strict=True))

    def __len__(self) -> int:
        """Number of calls that wait for leases and rounds."""
        return sum(len(consumers) + len(ranks) for consumers, ranks in self._by_stage)

    def carry_out(self, effects: Effects) -> None:
        """Free the values now, wake the callers soon."""
        for group, mask in effects.freed:
            self._blocks.free(group, mask)
        for group, columns in effects.cleared:
            self._blocks.clear(group, columns)
        if effects.superseded:
            self.superseded.tell(effects.superseded)
        due = self._due
        due.stages |= effects.stages
        due.rounds |= effects.rounds
        due.credits |= effects.credits
        self.schedule()

    def schedule(self) -> None:
        """Schedule a wake-up. One that no event has asked for sets the timers: the deadline of a lease may be
        nearer."""
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._wake)

    def wake_stage(self, index: int) -> None:
        """Wake a stage for what the ledger does not know: a caller came or left, or is not waited for any more."""
        self._due.stages |= 1 << index
        self.schedule()

    def wake_puts(self) -> None:
        self._due.credits = True
        self.schedule()

    def left(self, client: str) -> None:
        """Remove a client that has left: it waits for nothing, and the rest share without it."""
        self.puts.left(client)
        self.superseded.left(client)
        self.retire(client)

    def retire(self, client: str) -> None:
        """Remove a client from those that wait for leases: it will not ask for any again."""
        for index, (consumers, _) in enumerate(self._by_stage):
            consumers.left(client)
            self.wake_stage(index)

    def describe(self) -> dict[str, Any]:
        """Return how many calls wait for what, and whose they are."""
        waiting = {name: len(self.consumers[name]) + len(self.ranks[name]) for name in self.consumers}
        owners = self._clients.owners()
        who = {name: [owners.get(one, "?") for one in some.clients] for name, some in self.consumers.items()}
        return {"waiting": waiting | {"put": len(self.puts)}, "waiters": who}

    def close(self, reason: str) -> None:
        self._is_closed = True
        self._expiry.cancel()
        self._stragglers.cancel()
        for queue in (self.puts, self.superseded, self.outcomes, *self.consumers.values(), *self.ranks.values()):
            queue.close(reason)

    def _wake(self) -> None:
        self._is_scheduled = False
        due, self._due = self._due, Effects()
        for index, (consumers, ranks) in enumerate(self._by_stage):
            moved = bool(due.rounds >> index & 1)
            if is_due := due.stages >> index & 1:
                consumers.wake()
            if moved or is_due:
                ranks.wake(moved=moved)
        if due.credits:
            self.puts.wake_first()
        self._arm_timers()

    def _arm_timers(self) -> None:
        self.outcomes.wake_all()
        if not self._is_closed:
            self._expiry.arm()
            self._stragglers.arm()
