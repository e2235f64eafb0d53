"""Consumers that wait for leases of one stage: which is next, and how much of what is free it may take.

    free units, oldest first ─ the first one's largest column ─▶ node ─ Allotment.priority ─▶ which consumer is next

`allotment.py` decides; this file keeps the queue, and loses patience with consumers that are expected and do not come.
Of two consumers that are as good, the one on the node of the next rows gets them. None waits for that and no row
overtakes another: units go in their order and evenly, as ever.
"""

import asyncio
import heapq
from collections.abc import Callable, Mapping

from penstock.store.data.blocks import Block, Blocks, Place
from penstock.store.data.segments import Segments
from penstock.store.ledger.group import bits
from penstock.store.ledger.leases import HeldLease
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.readiness import StageQueue
from penstock.store.service.clients import Clients
from penstock.store.service.messages import Granted, LeaseRequest
from penstock.store.service.waiting.allotment import Allotment
from penstock.store.service.waiting.sharing import PATIENCE_S
from penstock.store.service.waiting.wait_queue import WaitQueue

LOOK = 4
"""Number of groups looked at, at the head of a stage's queue; the first ones may have gone, until a client leases."""


class Locality:
    """The nodes of rows and of clients, in a run on several nodes."""

    def __init__(self, ledger: Ledger, blocks: Blocks, segments: Segments) -> None:
        self._ledger, self._blocks, self._segments = ledger, blocks, segments

    def node_of_next(self, stage: StageQueue) -> str | None:
        """The node of the next rows; None if they are in no file, or have gone."""
        oldest = heapq.nsmallest(LOOK, stage.queue)
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

    def _block(self, group: int, index: int, name: str) -> Block:
        found = self._blocks.found(group, range(index, index + 1), name)
        return found.block if isinstance(found, Place) else found[0].block


class StragglerTimer:
    """A timer for the next group that becomes a straggler, and the choice among engines that wait and may take it as
    well. `ledger/stragglers.py` decides which groups are stragglers. Lifecycle: `arm` after any event, `cancel`."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float], wake: Callable[[int], None]) -> None:
        """Prepare the timer. `wake`: of a stage, by number, soon; called when a group has become a straggler."""
        self._ledger, self._clock, self._wake = ledger, clock, wake
        self._timer: asyncio.TimerHandle | None = None

    def owners(self) -> set[str]:
        """Owners of the stragglers, which another engine may take."""
        return {lease.owner for _, lease in self._ledger.residents.stragglers.overdue(self._clock())}

    def priority(self, held: Mapping[str, int]) -> Callable[[LeaseRequest], tuple[bool, int]] | None:
        """The priority of a request, the lowest is next: one that can take a group, and holds the fewest. None if there
        is nothing to take. `held`: units by client."""
        owners = self.owners()
        return (lambda request: (owners == {request.owner}, held.get(request.client, 0))) if owners else None

    def arm(self) -> None:
        self.cancel()
        stragglers, stage = self._ledger.residents.stragglers, self._ledger.residents.sampling
        if stage is not None and (due := stragglers.next_overdue()) is not None:
            wait_s = max(0.0, due - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._due, stage.index)

    def _due(self, stage: int) -> None:
        self.owners()  # notes all stragglers until now: no timer is set for them again
        self._wake(stage)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Consumers:
    """The consumers of one stage. Lifecycle: `wait` for each request, `wake` whenever the stage may have become ready,
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
        self._allotment = Allotment(stage, ledger, clients)
        self._stage = self._allotment.stage
        self._stragglers = stragglers if self._stage is ledger.residents.sampling else None
        self._schedule, self._locality = schedule, locality
        self._queue = WaitQueue(schedule)
        self._patience: asyncio.TimerHandle | None = None
        """Timer until which units are kept for consumers that are not there."""

    def __len__(self) -> int:
        """Number of requests that wait."""
        return len(self._queue)

    @property
    def waiting(self) -> list[object]:
        """Clients, in the order of their requests."""
        return list(self._queue.clients)

    async def wait(self, take: Callable[[], list[Granted] | None], request: LeaseRequest) -> list[Granted] | None:
        """Return what `take` gives in this request's turn. None when closed, or when it was withdrawn."""
        self._allotment.asked(request)
        return await self._queue.wait(take, request.client, request.ticket, request)

    def take(self, request: LeaseRequest, now: float) -> list[HeldLease]:
        """Lease what a request gets now. Nothing while units are free: they are kept for others, which come or are
        given up soon."""
        leases = self._allotment.take(request, self._queue.requests, now)
        if not leases and self._stage.num_free and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._lose_patience)
        return leases

    def withdraw(self, client: str, ticket: int | None = None) -> None:
        """Withdraw a client's request of that ticket, or all: their calls return None."""
        self._queue.withdraw(client, ticket)

    def left(self, client: str) -> None:
        """Expect a client no more."""
        self._allotment.left(client)

    def wake(self) -> None:
        """Let the next request try, if something is free."""
        if self._stage.num_free:
            self._queue.wake_first(self._priority())
        else:
            self._be_patient_again()
            priority = self._stragglers.priority(self._allotment.held) if self._stragglers is not None else None
            if priority is not None:
                self._queue.wake_first(priority)

    def _priority(self) -> Callable[[LeaseRequest], tuple[float, bool, int]]:
        """Make the priority of requests for the next rows."""
        locality = self._locality if len(self) > 1 else None
        node = locality.node_of_next(self._stage) if locality is not None else None

        def priority(request: LeaseRequest) -> tuple[float, bool, int]:
            is_remote = locality is not None and node is not None and locality.node_of(request.client) != node
            return self._allotment.priority(request, is_remote)

        return priority

    def close(self) -> None:
        self._be_patient_again()
        self._queue.close()

    def _be_patient_again(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        self._patience = None
        self._allotment.expect_only([str(client) for client in self._queue.clients])
        self._schedule()
