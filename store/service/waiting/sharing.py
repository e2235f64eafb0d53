"""The shares of what is free, where several consumers of a stage want more than there is. Pure.

    free units ─▶ one after the other to the consumer that holds the fewest, as far as each can take

So engines of a run have equally much to do, whichever asks first. What is no consumer's share is never kept: one that
asks alone gets everything it can take. `ledger/leases.py` counts what they hold.

A consumer that always asks again while it can take more (`LeaseRequest.max_held`: rollout workers) is expected to:
what is free is shared with it too, if it is not there at the moment, for `PATIENCE_S` and no longer. One that is still
not there then is expected no more until it asks again. Of a thousand that are expected most are alike: they are counted
by what they hold, so a share costs as many looks as there are kinds of them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.store.ledger.leases import Holdings
from penstock.store.service.messages import LeaseRequest

PATIENCE_S = 5.0
"""Seconds for which units are kept for a consumer that should be there and is not: others work on their own share
meanwhile."""


class Claim(NamedTuple):
    """The units that one consumer holds of a stage, and how many more it can take."""

    held: int
    capacity: int


def fair_share(free: int, claim: Claim, others: Sequence[Claim] | Mapping[Claim, int]) -> int:
    """Number of `free` units that are for `claim`, if each goes to the one that holds the fewest, by water-filling.
    Ties are for `claim`. `others`: of a thousand most are alike, so they may come counted.

    >>> fair_share(32, Claim(0, 64), [Claim(0, 64)])
    16
    >>> fair_share(4, Claim(6, 2), [Claim(2, 6)])
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


def _poured(claim: Claim, level: int) -> int:
    return min(claim.capacity, max(0, level - claim.held))


class Sharing:
    """The consumers of one stage, and which of them are expected to ask again."""

    def __init__(self, holdings: Holdings) -> None:
        """`holdings`: of the stage; it is told here whom to expect."""
        self._holdings = holdings
        self._held, self._most = holdings.units, holdings.expected
        self._num_peers = 0
        """Number of consumers that there should be, of which some may not have come yet."""
        self._num_taken: Counter[str] = Counter()
        """Number of units that each client has had."""

    def asked(self, request: LeaseRequest) -> None:
        if request.max_held and request.client not in self._most:
            self._holdings.expect(request.client, request.max_held)
            if self._num_peers >= 0:
                self._num_peers = max(self._num_peers, request.num_peers)

    def took(self, client: str, num_units: int) -> None:
        self._num_taken[client] += num_units

    def left(self, client: str) -> None:
        if self._holdings.forget(client) and self._num_peers > 0:
            self._num_peers -= 1  # it has come, and need not be waited for
        self._num_taken.pop(client, None)

    def priority(self, request: LeaseRequest, is_remote: bool = False) -> tuple[float, bool, int]:
        """The priority of a request, the lowest is next: the client that holds the fewest units, of those that can take
        more; of several, one on the node of the rows; and of these the one that has had the fewest."""
        held = self._held.get(request.client, 0)
        has_capacity = not request.max_held or held < request.max_held
        return (held if has_capacity else math.inf, is_remote, self._num_taken[request.client])

    def first(self, requests: Iterable[LeaseRequest]) -> LeaseRequest:
        """The request that is next, where all are on one node: of equal ones the first."""
        held_by, taken = self._held, self._num_taken
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
        """Expect only the clients that are there: patience with the others is over."""
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
        others = Counter({Claim(held, max(0, most - held)): n for (held, most), n in self._holdings.levels.items()})
        others[Claim(0, request.max_held)] += max(0, self._num_peers - len(expected))
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

    def _expected(self, client: str) -> Claim:
        held = self._held.get(client, 0)
        return Claim(held, max(0, self._most[client] - held))

    def _claim(self, request: LeaseRequest) -> Claim:
        held = self._held.get(request.client, 0)
        if request.max_held:
            return Claim(held, min(request.max_units, max(0, request.max_held - held)))
        return Claim(held, request.max_units * max(1, request.max_leases))
