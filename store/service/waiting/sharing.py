"""The shares of what is free, where several consumers of a stage want more than there is. Pure.

    free units ─▶ one after the other to the consumer that holds the fewest, as far as each can take

So engines of a run have equally much to do, whichever asks first. What is no consumer's share is never kept: one that
asks alone gets everything it can take. `consumers.py` counts what they hold.

A consumer that always asks again while it can take more (`LeaseRequest.max_held`: rollout workers) is expected to:
what is free is shared with it too, if it is not there at the moment, for `PATIENCE_S` and no longer. One that is still
not there then is expected no more until it asks again.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.store.service.messages import LeaseRequest

PATIENCE_S = 5.0
"""Seconds for which units are kept for a consumer that should be there and is not: others work on their own share
meanwhile."""


class Claim(NamedTuple):
    """The units that one consumer holds of a stage, and how many more it can take."""

    held: int
    capacity: int


def fair_share(free: int, claim: Claim, others: Sequence[Claim] | Counter[Claim]) -> int:
    """Number of `free` units that are for `claim`, if each goes to the one that holds the fewest, by water-filling.
    Ties are for `claim`. `others`: of a thousand most are alike, so they may come counted.

    >>> fair_share(32, Claim(0, 64), [Claim(0, 64)])
    16
    >>> fair_share(4, Claim(6, 2), [Claim(2, 6)])
    0
    """
    alike = Counter(others)

    def poured(level: int) -> int:
        return sum(count * _poured(other, level) for other, count in alike.items())

    low, high = 0, claim.held + min(free, claim.capacity)
    while low < high:  # the highest level that all can be filled to, or how far `claim` can be
        level = (low + high + 1) // 2
        if _poured(claim, level) + poured(level) <= free:
            low = level
        else:
            high = level - 1
    share = _poured(claim, low)
    left = free - share - poured(low)
    return share + (1 if left > 0 and share < claim.capacity and low >= claim.held else 0)


def _poured(claim: Claim, level: int) -> int:
    return min(claim.capacity, max(0, level - claim.held))


class Sharing:
    """The consumers of one stage that are expected to ask again."""

    def __init__(self) -> None:
        self._regulars: dict[str, int] = {}
        """The most units that each client holds at a time."""
        self._num_peers = 0
        """Number of consumers that there should be, of which some may not have come yet."""
        self._num_taken: Counter[str] = Counter()
        """Number of units that each client has had."""

    def asked(self, request: LeaseRequest) -> None:
        if request.max_held and request.client not in self._regulars:
            self._regulars[request.client] = request.max_held
            if self._num_peers >= 0:
                self._num_peers = max(self._num_peers, request.num_peers)

    def took(self, client: str, num_units: int) -> None:
        self._num_taken[client] += num_units

    def left(self, client: str) -> None:
        if self._regulars.pop(client, None) is not None and self._num_peers > 0:
            self._num_peers -= 1  # it has come, and need not be waited for
        self._num_taken.pop(client, None)

    def priority(self, request: LeaseRequest, held: int, is_remote: bool = False) -> tuple[float, bool, int]:
        """The priority of a request, the lowest is next: the client that holds the fewest units, of those that can take
        more; of several, one on the node of the rows; and of these the one that has had the fewest."""
        has_capacity = not request.max_held or held < request.max_held
        return (held if has_capacity else math.inf, is_remote, self._num_taken[request.client])

    def expect_only(self, present: Iterable[str]) -> None:
        """Expect only the clients that are there: patience with the others is over."""
        there = set(present)
        self._regulars = {client: most for client, most in self._regulars.items() if client in there}
        self._num_peers = -1

    def share(self, free: int, request: LeaseRequest, requests: Sequence[LeaseRequest], held: Mapping[str, int]) -> int:
        """Units for `request`, beside those that wait (`requests`, it may be among them) and those that are expected.
        `held`: by client."""
        if request.max_held == 0 and all(one is request for one in requests):
            return free  # alone
        others = Counter(_claim(one, held.get(one.client, 0)) for one in requests if one is not request)
        if request.max_held:
            others += self._expected({request.client, *(one.client for one in requests)}, held)
            others[Claim(0, request.max_held)] += max(0, self._num_peers - len(self._regulars))
        return fair_share(free, _claim(request, held.get(request.client, 0)), others)

    def _expected(self, there: Collection[str], held: Mapping[str, int]) -> Counter[Claim]:
        """Claims of the clients that are expected and not there at the moment."""
        absent = Counter((held.get(client, 0), most) for client, most in self._regulars.items() if client not in there)
        return Counter({Claim(has, max(0, most - has)): count for (has, most), count in absent.items()})


def _claim(request: LeaseRequest, held: int) -> Claim:
    if request.max_held:
        return Claim(held, min(request.max_units, max(0, request.max_held - held)))
    return Claim(held, request.max_units * max(1, request.max_leases))
