"""A virtual clock with its events, and the store's part of a simulated run: its ledger, and the order of those that
wait.

    event at its time ─▶ ledger ─ Effects ─▶ settle: consumers, rounds, prompts that may continue ─▶ further events

All events of one moment happen before anybody is woken, as in a turn of the store's loop.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from penstock.store.ledger.group import Facts
from penstock.store.ledger.leases import HeldLease
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.residents import Effects
from penstock.store.service.sharing import PATIENCE_S, Allotment, Clients
from penstock.store.service.waiters import CALLERS_EXAMINED, StragglerTimer
from penstock.store.service.wire import LeaseRequest
from penstock.store.service.work_log import WorkLog
from penstock.store.spec import StoreSpec

Action = Callable[[Any], None]


class Clock:
    """Events in the order of their time, and of those at one time in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the run began, if nobody were in another's way."""
        self.pace = 1.0
        """How many times as long everything takes from now on, since members share cores."""
        self.num_events = 0
        self._lost_s = 0.0
        self._events: list[tuple[float, int, Action, Any]] = []
        self._num_set = 0

    def at(self, time: float, action: Action, argument: Any = None) -> None:
        """Have `action(argument)` called at a time, which is not before now. What must not happen any more the action
        finds out itself."""
        self._num_set += 1
        heapq.heappush(self._events, (time, self._num_set, action, argument))

    @property
    def passed_s(self) -> float:
        """Seconds since the run began, with those that members lost to each other."""
        return self.now + self._lost_s

    def step(self) -> bool:
        """Let all that is to happen next at one time happen. Returns False if nothing is."""
        events = self._events
        if not events:
            return False
        now = events[0][0]
        if self.pace != 1.0:
            self._lost_s += (now - self.now) * (self.pace - 1.0)
        self.now = now
        while events and events[0][0] == now:
            _, _, action, argument = heapq.heappop(events)
            self.num_events += 1
            action(argument)
        return True


class Asking(NamedTuple):
    """A request that waits, and what takes the leases that it gets."""

    request: LeaseRequest
    given: Callable[[list[HeldLease]], None]


@dataclass(slots=True)
class GroupNote:
    """What is kept of a group beside the ledger, for the account of the run."""

    written: dict[str, float] = field(default_factory=dict)
    """Time at which each stage wrote last."""
    version_sums: list[int] | None = None
    """Sum of the versions of each sample's tokens."""


class SimulatedStore:
    """Lifecycle: events by `admit`, `ask`, `write` and the ledger's own, whose effects go to `carry_out`; `settle`
    after the events of each moment."""

    def __init__(self, spec: StoreSpec, clock: Clock, log: WorkLog | None = None) -> None:
        """`log`: notes who works on what; None: nobody will read it."""
        self.ledger, self.clock, self._log = Ledger(spec), clock, log
        self.clients = Clients(self.ledger)
        self._allotments = [Allotment(stage.name, self.ledger, self.clients) for stage in spec.stages]
        self._asking: list[dict[str, Asking]] = [{} for _ in spec.stages]
        self._index = {stage.name: index for index, stage in enumerate(spec.stages)}
        self._patience: set[int] = set()
        """Stages whose free units are kept for consumers that are not there."""
        self._stragglers = StragglerTimer(self.ledger, lambda: clock.now, lambda stage: None)
        self._straggler_at = float("inf")
        self._due = Effects(credits=True)
        self.last_group = -1
        """The group of which something was written last."""
        self.notes: defaultdict[int, GroupNote] = defaultdict(GroupNote)
        """Notes of each group that has something written and is resident."""
        self.rounds: dict[str, Callable[[], None]] = {}
        """What looks for a round of a stage that all ranks share, by stage."""
        self.wake_prompts: Callable[[], None] = lambda: None
        self.superseded: Callable[[str, int, int], None] = lambda client, lease, group: None
        """Told of a client's lease and the group of it that another has written first."""

    # What members do.

    def admit(self, nbytes: int, prompt_tokens: int, response_tokens: int = 0) -> int | None:
        """Admit a group. Returns its number, None without a credit."""
        group, effects = self.ledger.admit(self.clock.now, nbytes, prompt_tokens, response_tokens)
        self.carry_out(effects)
        if group is not None and self._log is not None:
            self._log.admitted(group)
        return group

    def ask(self, request: LeaseRequest, given: Callable[[list[HeldLease]], None]) -> None:
        """Ask for leases. `given` is called with them in this request's turn."""
        index = self._index[request.stage]
        self.clients.note_request(request)
        self._allotments[index].note_request(request)
        self._asking[index][request.client] = Asking(request, given)
        self._due.stages |= 1 << index

    def retire(self, client: str) -> None:
        """Give nothing more to a member until it asks again: the others share without it."""
        for allotment, asking in zip(self._allotments, self._asking, strict=True):
            allotment.left(client)
            asking.pop(client, None)
        self._due.stages |= (1 << len(self._asking)) - 1

    def leave(self, client: str, owner: str) -> None:
        """Give back what a member had, which is gone."""
        self.retire(client)
        _, effects = self.ledger.abandon(owner)
        self.clients.left(client)
        self.carry_out(effects)

    def granted(self, lease_id: int, stage: str, owner: str) -> None:
        """Note a lease that all ranks of a stage share."""
        if self._log is not None:
            self._log.granted(lease_id, stage, owner)

    def write(self, lease: HeldLease, stage: str, rows: list[int], columns: Sequence[str], facts: Facts) -> None:
        now, size = self.clock.now, self.ledger.spec.group_size
        _, effects = self.ledger.write(lease.id, stage, rows, columns, facts, now)
        groups = {row // size for row in rows} if len(rows) > 1 else (rows[0] // size,)
        for self.last_group in groups:
            self.notes[self.last_group].written[stage] = now
        if self._log is not None:
            self._log.wrote(lease.id, groups, len(rows))
        self.carry_out(effects)

    # Who is woken.

    def carry_out(self, effects: Effects) -> None:
        """Note whom an event may have something for."""
        due = self._due
        due.stages |= effects.stages
        due.rounds |= effects.rounds
        due.credits |= effects.credits
        for group, _ in effects.freed:
            if group not in self.ledger.residents.groups:
                self.notes.pop(group, None)
        for lease_id, group in effects.superseded:
            if (client := self.clients.client_of(lease_id)) is not None:
                self.superseded(client, lease_id, group)

    def settle(self) -> None:
        """Wake waiting members until none can proceed at this moment."""
        while (due := self._due).stages or due.rounds or due.credits:
            self._due = Effects()
            stages, index = due.stages | due.rounds, 0
            if due.credits:
                self.wake_prompts()
            while stages:
                if stages & 1:
                    self._wake(index)
                stages >>= 1
                index += 1
        if self.ledger.spec.straggler_factor:
            self._arm()

    def _wake(self, index: int) -> None:
        allotment, asking = self._allotments[index], self._asking[index]
        stage = allotment.stage
        if look := self.rounds.get(stage.name):
            look()
        while asking and stage.num_free:
            requests = [one.request for one in islice(asking.values(), CALLERS_EXAMINED)]
            first = allotment.next_request(requests) if len(requests) > 1 else requests[0]
            if not self._give(allotment, asking, first, requests):
                self._be_patient(index)
                return
        if asking and self.ledger.spec.straggler_factor and stage is self.ledger.residents.sampling:
            while asking and (priority := self._stragglers.priority(allotment.held)) is not None:
                requests = [one.request for one in islice(asking.values(), CALLERS_EXAMINED)]
                if not self._give(allotment, asking, min(requests, key=priority), requests):
                    return

    def _give(
        self, allotment: Allotment, asking: dict[str, Asking], first: LeaseRequest, requests: list[LeaseRequest]
    ) -> bool:
        """Let a request try. `requests`: those that wait, it among them."""
        leases = allotment.take(first, requests, self.clock.now)
        if not leases:
            return False
        given = asking.pop(first.client).given
        if self._log is not None:
            for lease in leases:
                self._log.granted(lease.id, first.stage, first.owner)
        given(leases)
        return True

    def _be_patient(self, index: int) -> None:
        if index not in self._patience:
            self._patience.add(index)
            self.clock.at(self.clock.now + PATIENCE_S, self._lose_patience, index)

    def _lose_patience(self, index: int) -> None:
        self._patience.discard(index)
        if self._allotments[index].stage.num_free:
            self._allotments[index].expect_only(list(self._asking[index]))
            self._due.stages |= 1 << index

    def _arm(self) -> None:
        """Set an event for the next group that becomes a straggler."""
        sampling, at = self.ledger.residents.sampling, self.ledger.residents.stragglers.next_overdue()
        if sampling is not None and at is not None and at < self._straggler_at:
            self._straggler_at = at
            self.clock.at(max(at, self.clock.now), self._has_straggler, sampling.index)

    def _has_straggler(self, index: int) -> None:
        self._straggler_at = float("inf")
        self._stragglers.owners()  # notes all stragglers until now: no event is set for them again
        self._due.stages |= 1 << index
