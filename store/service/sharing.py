"""Shares of what is free, where several consumers of a stage want more than that: who is next, and how much it gets.
Pure: a run's store (`waiters.py`) and a simulated run keep queues of their own.

    a stage has become ready ─▶ priority: which request ─▶ take: its share ─▶ leases of the ledger
    free units ─▶ one after the other to the consumer that holds the fewest, as far as each can take

So engines of a run have equally much to do, whichever asks first. What is no consumer's share is never kept: one that
asks alone gets everything it can take. `Clients` knows the leases that each client was given, and which owners are
dead: an owner that was replaced has the same name and another client. `ledger/leases.py` counts what they hold.

A consumer that always asks again while it can take more (`LeaseRequest.max_held`: rollout workers) is expected to:
what is free is shared with it for `PATIENCE_S` even if it is absent. One that is still absent then is not expected
again until it asks. Of a thousand expected consumers most are alike: they are counted by what they hold, so a share
costs as many looks as there are kinds of them.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.store.ledger.leases import HeldLease, Holdings
from penstock.store.ledger.ledger import Ledger
from penstock.store.service.wire import LeaseRequest

PATIENCE_S = 5.0
"""Seconds for which units are kept for an expected consumer that is absent: the rest work on their own shares
meanwhile."""
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
        self.holdings = {stage.name: Holdings(stage.unit == "sample") for stage in ledger.spec.stages}
        """Units that clients work on, by stage."""

    def note_request(self, request: LeaseRequest) -> bool:
        """Note a request. Returns False if its owner is dead."""
        if request.client in self._dead:
            return False
        self._of_owner.setdefault(request.owner, set()).add(request.client)
        return True

    def note_lease(self, request: LeaseRequest, lease: HeldLease) -> int:
        """Note that a request was given a lease. Returns its units: samples or groups, as the stage's unit is."""
        self._swept(request.client)[lease.id] = request.ticket
        lease.client, lease.holdings = request.client, self.holdings[request.stage]
        return lease.holdings.opened(request.client, lease.open.values())

    def leases_for(self, client: str, tickets: Collection[int]) -> list[int]:
        """Leases that a client was given for some of its requests; they may be over."""
        return [lease_id for lease_id, ticket in self._leases.get(client, {}).items() if ticket in tickets]

    def left(self, client: str) -> list[int]:
        """Forget a client whose process has ended. Returns the leases that it was given."""
        for clients in self._of_owner.values():
            clients.discard(client)
        self._dead.discard(client)
        return list(self._leases.pop(client, ()))

    def forget_owner(self, owner: str) -> set[str]:
        """Note that the owner is dead. Returns its clients, which are given nothing more."""
        clients = self._of_owner.pop(owner, set())
        self._dead |= clients
        return clients

    def client_of(self, lease_id: int) -> str | None:
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


class ShareClaim(NamedTuple):
    """The units that one consumer holds of a stage, and how many more it can take."""

    held: int
    capacity: int


def fair_share(free: int, claim: ShareClaim, others: Sequence[ShareClaim] | Mapping[ShareClaim, int]) -> int:
    """Number of `free` units that are for `claim`, if each goes to the one that holds the fewest, by water-filling.
    Ties are for `claim`. `others`: may be counted, since most of a thousand are alike.

    >>> fair_share(32, ShareClaim(0, 64), [ShareClaim(0, 64)])
    16
    >>> fair_share(4, ShareClaim(6, 2), [ShareClaim(2, 6)])
    0
    """
    alike = others if isinstance(others, Mapping) else Counter(others)
    low, high = 0, claim.held + min(free, claim.capacity)
    poured = 0
    """Units that all others take, filled to `low`."""
    while low < high:  # the highest level that all can be filled to, or how far `claim` can be
        level = (low + high + 1) // 2
        to_others = 0
        for (held, capacity), count in alike.items():
            if held < level:
                to_others += count * min(capacity, level - held)
        if _poured(claim, level) + to_others <= free:
            low, poured = level, to_others
        else:
            high = level - 1
    share = _poured(claim, low)
    left = free - share - poured
    return share + (1 if left > 0 and share < claim.capacity and low >= claim.held else 0)


def _poured(claim: ShareClaim, level: int) -> int:
    return min(claim.capacity, max(0, level - claim.held))


class Sharing:
    """The consumers of one stage, and which of them are expected to ask again."""

    def __init__(self, holdings: Holdings) -> None:
        """`holdings`: of the stage; it learns here which clients to expect."""
        self._holdings = holdings
        self.held, self._most = holdings.units, holdings.expected
        """Units that each client works on, and the most that each expected one does. They change."""
        self._num_peers = 0
        """Number of consumers that there should be, of which some may not have come yet."""
        self._num_taken: Counter[str] = Counter()
        """Number of units that each client has had."""

    def note_request(self, request: LeaseRequest) -> None:
        if request.max_held and request.client not in self._most:
            self._holdings.expect(request.client, request.max_held)
            if self._num_peers >= 0:
                self._num_peers = max(self._num_peers, request.num_peers)

    def left(self, client: str) -> None:
        if self._holdings.forget(client) and self._num_peers > 0:
            self._num_peers -= 1  # it had come, so it is not one of the missing
        self._num_taken.pop(client, None)

    def priority(self, request: LeaseRequest, is_remote: bool = False) -> tuple[float, bool, int]:
        """The priority of a request, the lowest is next: the client that holds the fewest units, of those that can take
        more; of several, one on the node of the rows; and of these the one that has had the fewest."""
        held = self.held.get(request.client, 0)
        has_capacity = not request.max_held or held < request.max_held
        return (held if has_capacity else math.inf, is_remote, self._num_taken[request.client])

    def next_request(self, requests: Iterable[LeaseRequest]) -> LeaseRequest:
        """The request that is next, where all are on one node: of equal ones the first."""
        held_by, taken = self.held, self._num_taken
        best: LeaseRequest | None = None
        fewest: float = 0
        for request in requests:
            held: float = held_by.get(request.client, 0)
            if 0 < request.max_held <= held:
                held = math.inf
            if best is None or held < fewest or (held == fewest and taken[request.client] < taken[best.client]):
                best, fewest = request, held
        assert best is not None
        return best

    def expect_only(self, present: Iterable[str]) -> None:
        """Expect only these clients from now on: the wait for absent ones is over."""
        for client in self._most.keys() - set(present):
            self._holdings.forget(client)
        self._num_peers = -1

    def share(self, free: int, request: LeaseRequest, requests: Sequence[LeaseRequest]) -> int:
        """Units for `request`, beside those that wait (`requests`, it may be among them) and those that are
        expected."""
        if request.max_held == 0:
            if len(requests) < 2 and all(one is request for one in requests):
                return free  # alone
            others = Counter(self._claim(one) for one in requests if one is not request)
            return fair_share(free, self._claim(request), others) if others else free
        expected = self._most
        others = Counter(
            {ShareClaim(held, max(0, most - held)): n for (held, most), n in self._holdings.levels.items()}
        )
        others[ShareClaim(0, request.max_held)] += max(0, self._num_peers - len(expected))
        there = {request.client}
        if request.client in expected:
            others[self._expected(request.client)] -= 1
        for one in requests:
            if one is request:
                continue
            client = one.client
            if client not in there and (most := expected.get(client)) is not None:
                there.add(client)
                if one.max_units >= one.max_held == most:
                    continue  # it asks for all that it can take: counted as what it is, among those that are expected
                others[self._expected(client)] -= 1
            others[self._claim(one)] += 1
        return fair_share(free, self._claim(request), others)

    def _expected(self, client: str) -> ShareClaim:
        held = self.held.get(client, 0)
        return ShareClaim(held, max(0, self._most[client] - held))

    def _claim(self, request: LeaseRequest) -> ShareClaim:
        held = self.held.get(request.client, 0)
        if request.max_held:
            return ShareClaim(held, min(request.max_units, max(0, request.max_held - held)))
        return ShareClaim(held, request.max_units * max(1, request.max_leases))


class Allotment(Sharing):
    """The leases of one stage that requests get. Lifecycle: `note_request` for each request, `take` in its turn, any
    number of times, `left` when its client has gone."""

    def __init__(self, stage: str, ledger: Ledger, clients: Clients) -> None:
        super().__init__(clients.holdings[stage])
        self.stage = ledger.residents.stage(stage)
        self._ledger, self._clients = ledger, clients
        self._may_straggle = self.stage is ledger.residents.sampling

    def take(self, request: LeaseRequest, requests: Sequence[LeaseRequest], now: float) -> list[HeldLease]:
        """Lease what a request gets now: its share of what is free, or else a group that another has had for too long.
        None with units free: these are kept for other consumers, which wait (`requests`) or are expected."""
        leases: list[HeldLease] = []
        free = self.stage.num_free
        share = self.share(free, request, requests) if free else 0
        while share > 0 and len(leases) < max(1, request.max_leases):
            lease = self._ledger.lease(request.stage, min(share, request.max_units), request.owner, now)
            if lease is None:
                break
            share -= self._lend(request, lease)
            leases.append(lease)
        if not leases and self._may_duplicate(request):
            lease = self._ledger.offer(request.owner, now)
            if lease is not None:
                self._lend(request, lease)
                leases.append(lease)
        return leases

    def _lend(self, request: LeaseRequest, lease: HeldLease) -> int:
        """Note that a request gets a lease. Returns its units."""
        num_units = self._clients.note_lease(request, lease)
        self._num_taken[request.client] += num_units
        return num_units

    def _may_duplicate(self, request: LeaseRequest) -> bool:
        """Return whether the client has nothing to do, and may take a group that another has had for too long."""
        has_capacity = not request.max_held or self.held.get(request.client, 0) < request.max_held
        return self._may_straggle and not self.stage.num_free and has_capacity
