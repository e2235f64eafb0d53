"""What the consumers of one stage get: who is next, and how much of what is free it may take. Pure.

    a stage has become ready ─▶ Allotment.priority: which request ─▶ take: its share ─▶ leases of the ledger

`consumers.py` keeps the queue of a run's store and wakes its callers; a simulated run keeps one of its own.
"""

from collections.abc import Iterable, Sequence

from penstock.store.ledger.leases import HeldLease
from penstock.store.ledger.ledger import Ledger
from penstock.store.service.clients import Clients
from penstock.store.service.messages import LeaseRequest
from penstock.store.service.waiting.sharing import Sharing


class Allotment:
    """The leases of one stage that requests get. Lifecycle: `asked` for each request, `take` in its turn, any number of
    times, `left` when its client has gone."""

    def __init__(self, stage: str, ledger: Ledger, clients: Clients) -> None:
        self.stage = ledger.residents.stage(stage)
        self.held = clients.held_of(stage).units
        """Units that each client works on. It changes."""
        self._ledger, self._clients = ledger, clients
        self._sharing = Sharing(clients.held_of(stage))
        self._may_straggle = self.stage is ledger.residents.sampling

    def asked(self, request: LeaseRequest) -> None:
        """Note a request, whose client is expected to ask again if it says so."""
        self._sharing.asked(request)

    def priority(self, request: LeaseRequest, is_remote: bool = False) -> tuple[float, bool, int]:
        """The priority of a request: the lowest is next. `is_remote`: the next rows are on another node than it."""
        return self._sharing.priority(request, is_remote)

    def first(self, requests: Iterable[LeaseRequest]) -> LeaseRequest:
        """The request with the lowest priority, of equal ones the first. None of them is remote."""
        return self._sharing.first(requests)

    def take(self, request: LeaseRequest, requests: Sequence[LeaseRequest], now: float) -> list[HeldLease]:
        """Lease what a request gets now: its share of what is free, or else a group that another has had for too long.
        None with units free: these are kept for others, that wait (`requests`) or are expected."""
        leases: list[HeldLease] = []
        free = self.stage.num_free
        share = self._sharing.share(free, request, requests) if free else 0
        while share > 0 and len(leases) < max(1, request.max_leases):
            lease = self._ledger.lease(request.stage, min(share, request.max_units), request.owner, now)
            if lease is None:
                break
            share -= self._clients.units_of(lease)
            leases.append(lease)
        if not leases and self._may_duplicate(request):
            lease = self._ledger.offer(request.owner, now)
            leases = [lease] if lease is not None else []
        for lease in leases:
            self._sharing.took(request.client, self._clients.units_of(lease))
            self._clients.gave(request, lease)
        return leases

    def expect_only(self, present: Sequence[str]) -> None:
        """Expect only these clients to ask again: patience with the others is over."""
        self._sharing.expect_only(present)

    def left(self, client: str) -> None:
        """Expect a client no more."""
        self._sharing.left(client)

    def _may_duplicate(self, request: LeaseRequest) -> bool:
        """Return whether the client has nothing to do, and may take a group that another has had for too long."""
        has_capacity = not request.max_held or self.held.get(request.client, 0) < request.max_held
        return self._may_straggle and not self.stage.num_free and has_capacity
