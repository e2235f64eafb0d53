"""Groups that are sampled for much longer than most, and are offered to a second engine. Pure: time is an argument.

    leased ─ longer than straggler_factor x the median ─▶ offered ─▶ leased twice ─ first write of a row ─▶ the other
                                                                                    lease holds it no more

A group is leased by two engines at most. Its time counts from the lease of the engine that completed it. With factor 0
it is off, and nothing is noted either.
"""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator

from penstock.store.ledger.leases import HeldLease, LeaseBook
from penstock.store.ledger.readiness import Stage

RECENT = 101
"""Number of groups that the median is of. Lengths of responses change slowly while a policy learns."""
ENOUGH = 8
"""Number of groups that must have been completed before any is called slow."""


class Stragglers:
    """The groups that engines sample. Lifecycle of a group: `began` with each lease of it, `completed` or nothing,
    `ended` with each lease."""

    def __init__(self, factor: float, stage: Stage | None, leases: LeaseBook) -> None:
        """Watch `stage`, that of the engines, which take whole groups; None: there is none."""
        is_on = factor and stage is not None and stage.unit == "group"
        self._factor, self._leases = factor, leases
        self._stage = stage.index if is_on and stage is not None else None
        self.holders: dict[int, dict[int, float]] = {}
        """Begin of each lease of a group, by group and lease."""
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        """Recent times, ascending."""
        self._young: list[tuple[float, int, int]] = []
        """Heap of when, group and lease: those that were not slow when last looked at, and some that have ended."""
        self._slow: dict[int, int] = {}
        """The only lease of each slow group, in the order in which they became slow; some have ended."""
        self._beaten: dict[int, dict[int, int]] = {}
        """Mask of rows that another lease has answered, by group and lease; kept while the group is resident."""

    def began(self, lease: HeldLease, now: float) -> None:
        if lease.stage != self._stage:
            return
        for group in lease.open:
            self.holders.setdefault(group, {})[lease.id] = now
            heapq.heappush(self._young, (now, group, lease.id))

    def completed(self, lease: HeldLease, group: int, now: float) -> None:
        """Note that the lease has written the last of what it held of the group. Before `ended`."""
        began = self.holders.get(group, {}).get(lease.id)
        if began is None:
            return
        self.took(now - began)

    def took(self, seconds: float) -> None:
        """Note that a group was completed in so many seconds."""
        if len(self._recent) == RECENT:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(seconds)
        insort(self._sorted, seconds)

    def ended(self, lease: HeldLease, group: int) -> None:
        """Note that the lease holds nothing of the group any more. A lease that is left may straggle in its turn."""
        holders = self.holders.get(group)
        if holders is None or holders.pop(lease.id, None) is None:
            return
        if not holders:
            del self.holders[group]
        for other, began in holders.items():
            heapq.heappush(self._young, (began, group, other))

    def beat(self, lease: HeldLease, group: int, mask: int) -> None:
        """Note that another lease has answered rows that this one holds."""
        beaten = self._beaten.setdefault(group, {})
        beaten[lease.id] = beaten.get(lease.id, 0) | mask

    @property
    def any_beaten(self) -> bool:
        """True if some lease has come second, of a group that is resident."""
        return bool(self._beaten)

    def are_beaten(self, lease_id: int, masks: dict[int, int]) -> bool:
        """Return whether all of these rows, by group, were answered by others than this lease, which has held them."""
        return bool(masks) and all(
            not mask & ~self._beaten.get(group, {}).get(lease_id, 0) for group, mask in masks.items()
        )

    def forget(self, group: int) -> None:
        """Forget a group that is not resident any more."""
        self._beaten.pop(group, None)

    def rivals(self, lease: HeldLease, group: int) -> list[HeldLease]:
        """The other leases of the group."""
        holders = self.holders.get(group)
        if holders is None or lease.id not in holders:
            return []
        return [self._leases.held[other] for other in holders if other != lease.id]

    def is_second(self, lease: HeldLease, group: int) -> bool:
        """Return whether the group was leased to another owner before."""
        return next(iter(self.holders.get(group, ())), lease.id) != lease.id

    def of_others(self, lease: HeldLease, group: int) -> int:
        """Mask of the rows that other leases of the stage hold."""
        mask = 0
        for rival in self.rivals(lease, group):
            mask |= rival.open.get(group, 0)
        return mask

    @property
    def limit_s(self) -> float | None:
        """Time in seconds from which on a group is slow; None while too few were completed to say."""
        if not self._factor or len(self._sorted) < ENOUGH:
            return None
        return self._factor * self._sorted[len(self._sorted) // 2]

    def slow(self, now: float) -> Iterator[tuple[int, HeldLease]]:
        """Iterate over groups that one lease holds, and has for too long; those that became slow first come first."""
        limit_s = self.limit_s
        while limit_s is not None and self._mend() and self._young[0][0] + limit_s <= now:
            _, group, lease_id = heapq.heappop(self._young)
            self._slow[group] = lease_id
        for group, lease_id in list(self._slow.items()):
            if self._alone(group, lease_id):
                yield group, self._leases.held[lease_id]
            else:
                del self._slow[group]

    def next_slow(self) -> float | None:
        """The time at which the next group will be slow, of those that were not when last asked; None if none may
        be."""
        limit_s = self.limit_s
        return self._young[0][0] + limit_s if limit_s is not None and self._mend() else None

    def _alone(self, group: int, lease_id: int) -> bool:
        holders = self.holders.get(group, {})
        return lease_id in holders and len(holders) == 1

    def _mend(self) -> bool:
        """Discard the first of the young that have another lease, or none. Returns False if no group is left."""
        while self._young and not self._alone(*self._young[0][1:]):
            heapq.heappop(self._young)
        return bool(self._young)
