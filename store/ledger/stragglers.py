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
from penstock.store.ledger.readiness import StageQueue

RECENT = 101
"""Number of groups that the median is of. Lengths of responses change slowly while a policy learns."""
ENOUGH = 8
"""Number of groups that must have been completed before any counts as a straggler."""


class Stragglers:
    """The groups that engines sample. Lifecycle of a group: `began` with each lease of it, `completed` or nothing,
    `ended` with each lease."""

    def __init__(self, factor: float, stage: StageQueue | None, leases: LeaseBook) -> None:
        """Watch `stage`, that of the engines, which take whole groups; None: there is none."""
        is_on = factor and stage is not None and stage.unit == "group"
        self._factor, self._leases = factor, leases
        self._stage = stage.index if is_on and stage is not None else None
        self.holders: dict[int, dict[int, float]] = {}
        """Begin of each lease of a group, by group and lease."""
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        """Recent times, ascending."""
        self._in_time: list[tuple[float, int, int]] = []
        """Heap of when, group and lease: those that were no stragglers at the last look, and some that have ended."""
        self._overdue: dict[int, int] = {}
        """The only lease of each straggler, in the order in which they became stragglers; some have ended."""
        self._superseded: dict[int, dict[int, int]] = {}
        """Mask of rows that another lease has written first, by group and lease; kept while the group is resident."""

    def began(self, lease: HeldLease, now: float) -> None:
        if lease.stage != self._stage:
            return
        for group in lease.open:
            self.holders.setdefault(group, {})[lease.id] = now
            heapq.heappush(self._in_time, (now, group, lease.id))

    def completed(self, lease: HeldLease, group: int, now: float) -> None:
        """Note that the lease has written the last of what it held of the group. Before `ended`."""
        began = self.holders.get(group, {}).get(lease.id)
        if began is None:
            return
        self.record_time(now - began)

    def record_time(self, seconds: float) -> None:
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
            heapq.heappush(self._in_time, (began, group, other))

    def supersede(self, lease: HeldLease, group: int, mask: int) -> None:
        """Note that another lease has written rows that this one holds."""
        masks = self._superseded.setdefault(group, {})
        masks[lease.id] = masks.get(lease.id, 0) | mask

    @property
    def any_superseded(self) -> bool:
        """True if some lease of a resident group was superseded."""
        return bool(self._superseded)

    def are_superseded(self, lease_id: int, masks: dict[int, int]) -> bool:
        """Return whether all of these rows, by group, were written by others than this lease, which has held them."""
        return bool(masks) and all(
            not mask & ~self._superseded.get(group, {}).get(lease_id, 0) for group, mask in masks.items()
        )

    def forget(self, group: int) -> None:
        """Forget a group that is not resident any more."""
        self._superseded.pop(group, None)

    def other_leases(self, lease: HeldLease, group: int) -> list[HeldLease]:
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
        for other in self.other_leases(lease, group):
            mask |= other.open.get(group, 0)
        return mask

    @property
    def limit_s(self) -> float | None:
        """Time in seconds from which on a group is a straggler; None while too few were completed to say."""
        if not self._factor or len(self._sorted) < ENOUGH:
            return None
        return self._factor * self._sorted[len(self._sorted) // 2]

    def overdue(self, now: float) -> Iterator[tuple[int, HeldLease]]:
        """Iterate over the stragglers that one lease holds; those that became stragglers first come first."""
        limit_s = self.limit_s
        while limit_s is not None and self._skip_ended() and self._in_time[0][0] + limit_s <= now:
            _, group, lease_id = heapq.heappop(self._in_time)
            self._overdue[group] = lease_id
        for group, lease_id in list(self._overdue.items()):
            if self._alone(group, lease_id):
                yield group, self._leases.held[lease_id]
            else:
                del self._overdue[group]

    def next_overdue(self) -> float | None:
        """The time at which the next group becomes a straggler, of those that were none when last asked; None if none
        may."""
        limit_s = self.limit_s
        return self._in_time[0][0] + limit_s if limit_s is not None and self._skip_ended() else None

    def _alone(self, group: int, lease_id: int) -> bool:
        holders = self.holders.get(group, {})
        return lease_id in holders and len(holders) == 1

    def _skip_ended(self) -> bool:
        """Discard the first groups in time that have another lease, or none. Returns False if no group is left."""
        while self._in_time and not self._alone(*self._in_time[0][1:]):
            heapq.heappop(self._in_time)
        return bool(self._in_time)
