"""Leases: which owner holds which rows, and until when."""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Account:
    """A count of the open units of a lease, with those of its client's other leases of the stage. A stage with a
    thousand consumers to share among cannot look at all of their leases each time."""

    units: dict[str, int]
    """Samples or groups, as the stage's unit is, by client."""
    client: str
    counts_rows: bool

    def opened(self, masks: Iterable[int]) -> None:
        """Count the rows that were opened. `masks`: of rows, one a group."""
        found = sum(mask.bit_count() for mask in masks) if self.counts_rows else sum(map(bool, masks))
        self._add(found)

    def closed(self, mask: int, is_last: bool) -> None:
        """Count the rows of a group that are open no more. `is_last`: none is left."""
        self._add(-mask.bit_count() if self.counts_rows else -int(bool(mask) and is_last))

    def _add(self, number: int) -> None:
        if left := self.units.get(self.client, 0) + number:
            self.units[self.client] = left
        else:
            self.units.pop(self.client, None)


@dataclass(slots=True)
class HeldLease:
    """Rows that one owner has taken for one stage. The lease ends when none is open: completed, dropped, or given
    back."""

    id: int
    stage: int
    owner: str
    deadline: float | None
    """Deadline in seconds on the caller's clock. None: the lease never expires (the batch being trained)."""
    granted: dict[int, int] = field(default_factory=dict)
    """Mask of all rows handed out, by group."""
    open: dict[int, int] = field(default_factory=dict)
    """Mask of the rows whose result is awaited, by group."""
    revoked: dict[int, int] = field(default_factory=dict)
    """Mask of the rows that go to another since values were lost, by group: nothing is awaited of them any more."""
    account: Account | None = None
    """The account to tell of rows that are open no more. None: they are not counted."""


class LeaseBook:
    """All leases by id, and the order in which they expire."""

    def __init__(self) -> None:
        self.held: dict[int, HeldLease] = {}
        self.next_id = 0
        self._deadlines: list[tuple[float, int]] = []

    def open(self, stage: int, owner: str, deadline: float | None) -> HeldLease:
        lease = HeldLease(self.next_id, stage, owner, deadline)
        self.next_id += 1
        self.held[lease.id] = lease
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, lease.id))
        return lease

    def extend(self, lease: HeldLease, deadline: float) -> None:
        """Note a later deadline; its place in the order is corrected when the earlier one comes up."""
        if lease.deadline is not None and deadline > lease.deadline:
            lease.deadline = deadline

    def end(self, lease: HeldLease) -> None:
        self.held.pop(lease.id, None)

    def next_deadline(self) -> float | None:
        """The time at which the next lease may expire; None if none can."""
        self._refresh_first()
        return self._deadlines[0][0] if self._deadlines else None

    def overdue(self, now: float) -> list[HeldLease]:
        """Leases whose deadline has come, earliest first."""
        late = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            late.append(self.held[heapq.heappop(self._deadlines)[1]])
        return late

    def _refresh_first(self) -> None:
        """Make the first entry that of a living lease with its present deadline."""
        while self._deadlines:
            deadline, lease_id = self._deadlines[0]
            lease = self.held.get(lease_id)
            if lease is None or lease.deadline is None:
                heapq.heappop(self._deadlines)
            elif lease.deadline > deadline:
                heapq.heapreplace(self._deadlines, (lease.deadline, lease_id))
            else:
                return
