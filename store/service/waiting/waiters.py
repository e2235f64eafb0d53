"""Waiters: all callers of a store that wait, for leases and rounds by stage, for credits, or to hear of superseded
leases; the pump that wakes them, and the timer that expires leases.

    event of the ledger ─ Effects ─▶ carry_out ─▶ blocks
                                         └─ soon ─▶ consumers, ranks, puts: those that there may be something for

What events ask for is carried out: values are freed at once, callers woken once for all events of a turn of the loop.
Waiting callers use the pump too, when what they wait for may have changed.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from penstock.store.data.blocks import Blocks
from penstock.store.errors import StoreError
from penstock.store.ledger.effects import Effects
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.outcomes import Outcome
from penstock.store.service.clients import Clients
from penstock.store.service.waiting.consumers import Consumers, Locality, StragglerTimer
from penstock.store.service.waiting.puts import Puts
from penstock.store.service.waiting.wait_queue import WaitQueue

T = TypeVar("T")
Superseded = tuple[int, int]
"""A lease and a group of it that another lease has written first."""
STANDSTILL_S = 0.1
"""Lateness of a timer, in seconds, that tells that the store's process stood still."""


class Pump:
    """The execution of effects. Lifecycle: `connect` once, then `carry_out` after each event."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._due = Effects()
        """Effects whose callers are to be woken at the end of this turn of the event loop."""
        self._is_scheduled = False

    def connect(
        self,
        consumers: Sequence[Consumers],
        ranks: "Sequence[WaitingRanks]",
        wake_puts: Callable[[], None],
        after_events: Callable[[], None],
        superseded: Callable[[list[Superseded]], None],
    ) -> None:
        """Connect the waiting callers. `consumers`, `ranks`: in the order of the stages. `after_events`: called after
        each wake-up. `superseded`: told of leases that are superseded."""
        self._consumers, self._ranks = consumers, ranks
        self._wake_puts, self._after_events, self._superseded = wake_puts, after_events, superseded
        self.every_stage = (1 << len(consumers)) - 1

    def carry_out(self, effects: Effects) -> None:
        """Free the values now, wake the callers soon."""
        for group, mask in effects.freed:
            self._blocks.free(group, mask)
        for group, columns in effects.cleared:
            self._blocks.clear(group, columns)
        if effects.superseded:
            self._superseded(effects.superseded)
        due = self._due
        due.stages |= effects.stages
        due.rounds |= effects.rounds
        due.credits |= effects.credits
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._wake)

    def schedule(self) -> None:
        """Schedule a wake-up that no event has asked for; the deadline of a lease may be nearer."""
        self.carry_out(Effects())

    def wake_stage(self, index: int) -> None:
        """Wake a stage for what the ledger does not know: a caller came or left, or is waited for no more."""
        self.carry_out(Effects(stages=1 << index))

    def wake_all_stages(self) -> None:
        self.carry_out(Effects(stages=self.every_stage))

    def wake_puts(self) -> None:
        self.carry_out(Effects(credits=True))

    def _wake(self) -> None:
        self._is_scheduled = False
        due, self._due = self._due, Effects()
        for index, (consumers, ranks) in enumerate(zip(self._consumers, self._ranks, strict=True)):
            moved = bool(due.rounds >> index & 1)
            if due.stages >> index & 1:
                consumers.wake()
            if moved or due.stages >> index & 1:
                ranks.wake(moved=moved)
        if due.credits:
            self._wake_puts()
        self._after_events()


class Expiry:
    """A timer for the next deadline. Lifecycle: `arm` after any event, `cancel`."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float], carry_out: Callable[[Effects], None]) -> None:
        """Prepare the timer. `carry_out`: called after leases may have expired."""
        self._ledger, self._clock, self._carry_out = ledger, clock, carry_out
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        """The time at which the timer fires, by the clock."""
        self._patient_until = 0.0
        """The time before which nothing expires, by the clock."""

    def arm(self) -> None:
        """Set the timer. One that is too early stays: most leases end long before, and it costs a look at the next
        deadline."""
        deadline = self._ledger.next_deadline()
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
    """The waiting callers of a store, and its timers. Lifecycle: made before the first call, then told which clients
    leave, `close`."""

    def __init__(
        self,
        ledger: Ledger,
        clients: Clients,
        puts: Puts,
        pump: Pump,
        locality: Locality | None,
        clock: Callable[[], float],
    ) -> None:
        """Connect the pump. `locality`: None in a run on one node."""
        self._clients, self._puts, self._pump = clients, puts, pump
        self._expiry = Expiry(ledger, clock, pump.carry_out)
        self._stragglers = StragglerTimer(ledger, clock, pump.wake_stage)
        self._is_closed = False
        self.superseded = SupersededLeases(clients)
        self.outcomes = AskedOutcomes(ledger)
        self.consumers: dict[str, Consumers] = {}
        self.ranks: dict[str, WaitingRanks] = {}
        for index, stage in enumerate(ledger.spec.stages):
            schedule = partial(pump.wake_stage, index)
            self.consumers[stage.name] = Consumers(stage.name, ledger, clients, schedule, locality, self._stragglers)
            self.ranks[stage.name] = WaitingRanks(stage.name, ledger, schedule)
        consumers, ranks = list(self.consumers.values()), list(self.ranks.values())
        self._queues: list[Consumers | WaitingRanks] = [*consumers, *ranks]
        pump.connect(consumers, ranks, puts.wake, self._after_events, self.superseded.tell)

    def __len__(self) -> int:
        """Number of calls that wait for leases and rounds."""
        return sum(map(len, self._queues))

    def left(self, client: str) -> None:
        """Remove a client that has left: it waits for nothing, and the others share without it."""
        self._puts.left(client)
        self.superseded.left(client)
        self.retire(client)

    def retire(self, client: str) -> None:
        """Remove a client from those that wait for leases: it will not ask for any again."""
        for consumers in self.consumers.values():
            consumers.left(client)
            consumers.withdraw(client)
        self._pump.wake_all_stages()

    def describe(self) -> dict[str, Any]:
        """Return how many calls wait for what, and whose they are."""
        waiting = {name: len(self.consumers[name]) + len(self.ranks[name]) for name in self.consumers}
        owners = self._clients.owners()
        who = {name: [owners.get(one, "?") for one in some.waiting] for name, some in self.consumers.items()}
        return {"waiting": waiting | {"put": len(self._puts)}, "waiters": who}

    def _after_events(self) -> None:
        self.outcomes.wake()
        if not self._is_closed:
            self._expiry.arm()
            self._stragglers.arm()

    def close(self, reason: str) -> None:
        self._is_closed = True
        self._expiry.cancel()
        self._stragglers.cancel()
        self._puts.close(reason)
        self.superseded.close()
        self.outcomes.close()
        for queue in self._queues:
            queue.close()


class WaitingRanks:
    """The ranks of one stage. Lifecycle: `wait` for each call, `wake` whenever a round may be there, `close`."""

    def __init__(self, stage: str, ledger: Ledger, schedule: Callable[[], None]) -> None:
        """Prepare the queue. `schedule`: has `wake` called soon."""
        self._ledger, self._name = ledger, stage
        self._queue = WaitQueue(schedule)

    def __len__(self) -> int:
        """Number of calls that wait."""
        return len(self._queue)

    async def wait(self, attempt: Callable[[], T | None]) -> T | None:
        """Return the first result of `attempt`, which is tried at once: each rank is after a round of its own. None
        when closed."""
        return await self._queue.wait(attempt, at_once=True)

    def wake(self, *, moved: bool) -> None:
        """Wake all, when a round can be formed, or one has `moved`: it was formed, ended or taken back."""
        stage = self._ledger.residents.stage(self._name)
        if len(self._queue) and (moved or self._ledger.rounds.may_form(stage)):
            self._queue.wake_all()

    def close(self) -> None:
        self._queue.close()


class SupersededLeases:
    """The superseded leases that clients wait to hear of: engines that sample a group which another engine has written
    first are told, and stop. See `ledger/stragglers.py`. Lifecycle: `wait` and `tell` in any order, `left` for each
    client, `close`."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._queue = WaitQueue(lambda: None)
        self._due: dict[str, list[Superseded]] = {}
        """Superseded leases that a client has not been told of yet, by client."""

    def tell(self, superseded: list[Superseded]) -> None:
        for lease_id, group in superseded:
            if (client := self._clients.of_lease(lease_id)) is not None:
                self._due.setdefault(client, []).append((lease_id, group))
        if superseded:
            self._queue.wake_all()

    async def wait(self, client: str) -> list[Superseded] | None:
        """Wait for leases that were superseded since the last time. None once closed."""
        return await self._queue.wait(lambda: self._due.pop(client, None), client, at_once=True)

    def left(self, client: str) -> None:
        self._due.pop(client, None)
        self._queue.withdraw(client)

    def close(self) -> None:
        self._queue.close()


class AskedOutcomes:
    """Calls of the source that wait for outcomes of earlier groups (`ledger/outcomes.py`). Lifecycle: `wait` for each
    call, `wake` after any event, `close`."""

    def __init__(self, ledger: Ledger) -> None:
        self._residents = ledger.residents
        self._queue = WaitQueue(lambda: None)

    async def wait(self, first: int, end: int) -> list[Outcome | None] | None:
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

        return await self._queue.wait(look, at_once=True)

    def wake(self) -> None:
        self._queue.wake_all()

    def close(self) -> None:
        self._queue.close()
