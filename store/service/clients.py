"""Clients of the store: the leases that each was given, and those whose owner is known to be dead.

The ledger knows leases and their owners' names; an owner that was replaced has the same name and another client.
"""

from collections.abc import Collection

from penstock.store.ledger.leases import Account, HeldLease, Holdings
from penstock.store.ledger.ledger import Ledger
from penstock.store.service.messages import LeaseRequest

SWEEP_AT = 64
"""Leases of a client after which those that are over are forgotten."""


class Clients:
    """The clients, with what they ask for and are given, until they leave."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._leases: dict[str, dict[int, int]] = {}
        """Leases of each client, and the tickets of its requests for them; swept now and then."""
        self._of_owner: dict[str, set[str]] = {}
        """Clients that have asked for leases, by owner."""
        self._dead: set[str] = set()
        """Clients whose owner is known to be dead: what they asked for on their way is not given."""
        self._held = {stage.name: Holdings() for stage in ledger.spec.stages}
        """Units that a client works on, by stage and client."""

    def asked(self, request: LeaseRequest) -> bool:
        """Note a request. Returns False if its owner is dead."""
        if request.client in self._dead:
            return False
        self._of_owner.setdefault(request.owner, set()).add(request.client)
        return True

    def gave(self, request: LeaseRequest, lease: HeldLease) -> None:
        self._swept(request.client)[lease.id] = request.ticket
        stage = self._ledger.spec.stages[lease.stage]
        lease.account = Account(self._held[stage.name], request.client, stage.unit == "sample")
        lease.account.opened(lease.open.values())

    def given(self, client: str, tickets: Collection[int]) -> list[int]:
        """Leases that a client was given for some of its requests; they may be over."""
        return [lease_id for lease_id, ticket in self._leases.get(client, {}).items() if ticket in tickets]

    def held_of(self, stage: str) -> Holdings:
        """Units of a stage that clients work on. It changes."""
        return self._held[stage]

    def units_of(self, lease: HeldLease) -> int:
        """Number of samples or groups that are open, as the stage's unit is."""
        if self._ledger.spec.stages[lease.stage].unit == "sample":
            return sum(mask.bit_count() for mask in lease.open.values())
        return len(lease.open)

    def left(self, client: str) -> list[int]:
        """Forget a client whose process has ended. Returns the leases that it was given."""
        for clients in self._of_owner.values():
            clients.discard(client)
        self._dead.discard(client)
        return list(self._leases.pop(client, ()))

    def abandoned(self, owner: str) -> set[str]:
        """Note that the owner is dead. Returns its clients, which are given nothing more."""
        clients = self._of_owner.pop(owner, set())
        self._dead |= clients
        return clients

    def of_lease(self, lease_id: int) -> str | None:
        """The client that was given a lease, unless it has left."""
        return next((client for client, leases in self._leases.items() if lease_id in leases), None)

    def owners(self) -> dict[object, str]:
        """Owners by client, for people."""
        return {client: owner for owner, clients in self._of_owner.items() for client in clients}

    def _swept(self, client: str) -> dict[int, int]:
        """Leases of a client, without most of those that are over."""
        leases = self._leases.setdefault(client, {})
        if len(leases) > SWEEP_AT:
            held = self._ledger.residents.leases.held
            leases = self._leases[client] = {lease: ticket for lease, ticket in leases.items() if lease in held}
        return leases
