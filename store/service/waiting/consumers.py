"""Consumers that wait for leases of one stage: which is next, and how much of what is free it may take.

    free units, oldest first ─ the first one's largest column ─▶ node ─ Sharing.priority ─▶ which consumer is next

`sharing.py` decides; this file keeps the queue, counts what each consumer holds, and loses patience with consumers that
are expected and do not come. Of two consumers that are as good, the one on the node of the next rows gets them. None
waits for that and no row overtakes another: units go in their order and evenly, as ever.
"""

import asyncio
import heapq
from collections.abc import Callable
from typing import Protocol

from penstock.store.data.blocks import Block, Blocks, Place
from penstock.store.data.segments import Segments
from penstock.store.ledger.group import bits
from penstock.store.ledger.leases import HeldLease
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.readiness import Stage
from penstock.store.service.clients import Clients
from penstock.store.service.messages import Granted, LeaseRequest
from penstock.store.service.waiting.sharing import PATIENCE_S, Sharing
from penstock.store.service.waiting.timers import Slow
from penstock.store.service.waiting.wait_queue import WaitQueue

LOOK = 4
"""Number of groups looked at, at the head of a stage's queue; the first ones may have gone, until a client leases."""


class Nearness(Protocol):
    def of_next(self, stage: Stage) -> str | None:
        """The node of what is next; None if that cannot be told, or nothing is gained by it."""

    def of_client(self, client: str) -> str: ...


class Nowhere:
    """The nearness in a run on one node."""

    def of_next(self, stage: Stage) -> str | None:
        return None

    def of_client(self, client: str) -> str:
        return ""


class OnNodes:
    """The nearness in a run on several nodes."""

    def __init__(self, ledger: Ledger, blocks: Blocks, segments: Segments) -> None:
        self._ledger, self._blocks, self._segments = ledger, blocks, segments

    def of_next(self, stage: Stage) -> str | None:
        oldest = heapq.nsmallest(LOOK, stage.queue)
        groups = (group for group in map(self._ledger.residents.groups.get, oldest) if group is not None)
        group = next((group for group in groups if group.free[stage.index]), None)
        if group is None:
            return None
        index = next(iter(bits(group.free[stage.index])))
        blocks = [self._block(group.id, index, name) for name in stage.spec.reads]
        largest = max(blocks, key=lambda block: block.nbytes, default=None)
        return largest.ref.node if largest is not None and largest.ref is not None else None

    def of_client(self, client: str) -> str:
        return self._segments.node_of(client)

    def _block(self, group: int, index: int, name: str) -> Block:
        found = self._blocks.found(group, range(index, index + 1), name)
        return found.block if isinstance(found, Place) else found[0].block


class Consumers:
    """The consumers of one stage. Lifecycle: `wait` for each request, `wake` whenever the stage may have become ready,
    `close`."""

    def __init__(
        self, stage: str, ledger: Ledger, clients: Clients, schedule: Callable[[], None], nearness: Nearness, slow: Slow
    ) -> None:
        """Prepare the queue. `schedule`: has `wake` called soon."""
        self._stage = ledger.residents.stage(stage)
        self._slow = slow if self._stage is ledger.residents.sampling else None
        self._ledger, self._clients = ledger, clients
        self._schedule, self._nearness = schedule, nearness
        self._queue = WaitQueue(schedule)
        self._sharing = Sharing()
        self._held = clients.held_of(stage)
        self._patience: asyncio.TimerHandle | None = None
        """Timer until which units are kept for consumers that are not there."""

    def __len__(self) -> int:
        """Number of requests that wait."""
        return len(self._queue)

    @property
    def waiting(self) -> list[object]:
        """Clients, in the order of their requests."""
        return list(self._queue.clients)

    async def wait(self, take: Callable[[], list[Granted] | None], ask: LeaseRequest) -> list[Granted] | None:
        """Return what `take` gives in this request's turn. None when closed, or when it was withdrawn."""
        self._sharing.asked(ask)
        return await self._queue.wait(take, ask.client, ask.ticket, ask)

    def take(self, ask: LeaseRequest, now: float) -> list[HeldLease]:
        """Lease what a request gets now: its share of what is free, or else a group that another has had for too
        long."""
        leases: list[HeldLease] = []
        share = self.share_of(ask)
        while share > 0 and len(leases) < max(1, ask.max_leases):
            lease = self._ledger.lease(ask.stage, min(share, ask.max_units), ask.owner, now)
            if lease is None:
                break
            share -= self._clients.units_of(lease)
            leases.append(lease)
        if not leases and self._may_help(ask) and (lease := self._ledger.offer(ask.owner, now)) is not None:
            leases.append(lease)
        for lease in leases:
            self._sharing.took(ask.client, self._clients.units_of(lease))
            self._clients.gave(ask, lease)
        return leases

    def share_of(self, ask: LeaseRequest) -> int:
        """Units of what is free now that this request may take. 0 with units free: they are kept for others, which come
        or are given up soon."""
        free = self._stage.num_free
        if not free:
            return 0
        share = self._sharing.share(free, ask, self._queue.requests, self._held)
        if not share and self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._lose_patience)
        return share

    def _may_help(self, ask: LeaseRequest) -> bool:
        """Return whether the client has nothing to do, and may take a group that another has had for too long."""
        has_room = not ask.max_held or self._held.get(ask.client, 0) < ask.max_held
        return self._slow is not None and not self._stage.num_free and has_room

    def withdraw(self, client: str, ticket: int | None = None) -> None:
        """Withdraw a client's request of that ticket, or all: their calls return None."""
        self._queue.withdraw(client, ticket)

    def left(self, client: str) -> None:
        """Expect a client no more."""
        self._sharing.left(client)

    def wake(self) -> None:
        """Let the next request try, if something is free."""
        if self._stage.num_free:
            self._queue.wake_first(self._priority(self._nearness.of_next(self._stage) if len(self) > 1 else None))
        else:
            self._be_patient_again()
            if self._slow is not None and (priority := self._slow.priority(self._held)) is not None:
                self._queue.wake_first(priority)

    def _priority(self, node: str | None) -> Callable[[LeaseRequest], tuple[float, bool, int]]:
        """Make the priority of requests. `node`: of the rows that are next."""

        def priority(ask: LeaseRequest) -> tuple[float, bool, int]:
            is_far = node is not None and self._nearness.of_client(ask.client) != node
            return self._sharing.priority(ask, self._held.get(ask.client, 0), is_far)

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
        self._sharing.expect_only(map(str, self._queue.clients))
        self._schedule()
