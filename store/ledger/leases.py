"""Leases: which owner holds which rows, and until when; and how much each client holds."""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


class Holdings:
    """The open units that each client holds of one stage: samples or groups, as the stage's unit is. A stage with a
    thousand consumers to share among cannot look at all of their leases each time, nor at all of them.

    Some clients are expected to ask again whenever they hold less than they can. How many of these hold how much is
    counted as it changes. A lease that is given a client's holdings reports here what is open no more.
    """

    def __init__(self, counts_rows: bool = False) -> None:
        """`counts_rows`: the stage's unit is the sample."""
        self._counts_rows = counts_rows
        self._units: dict[str, int] = {}
        self._most: dict[str, int] = {}
        self._levels: Counter[tuple[int, int]] = Counter()

    @property
    def units(self) -> Mapping[str, int]:
        """Units by client; none of a client that is not in it. It changes."""
        return self._units

    @property
    def expected(self) -> Mapping[str, int]:
        """The most units that each expected client holds at a time. It changes."""
        return self._most

    @property
    def levels(self) -> Mapping[tuple[int, int], int]:
        """Number of expected clients by the units that they hold, and the most that they do. It changes."""
        return self._levels

    def expect(self, client: str, most: int) -> None:
        """Expect a client to ask again; `most`: the units that it holds at a time. The first word counts."""
        if client not in self._most:
            self._most[client] = most
            self._levels[self._units.get(client, 0), most] += 1

    def forget(self, client: str) -> bool:
        """Expect a client no more. Returns whether it was expected."""
        most = self._most.pop(client, None)
        if most is not None:
            self._take(self._units.get(client, 0), most)
        return most is not None

    def add(self, client: str, number: int) -> None:
        """Note that a client holds so many units more, or less."""
        before = self._units.get(client, 0)
        now = before + number
        if now:
            self._units[client] = now
        else:
            self._units.pop(client, None)
        most = self._most.get(client)
        if most is not None and number:
            self._take(before, most)
            self._levels[now, most] += 1

    def opened(self, client: str, masks: Iterable[int]) -> int:
        """Count the rows that were opened. `masks`: of rows, one a group. Returns the number of units."""
        found = sum(map(int.bit_count if self._counts_rows else bool, masks))
        self.add(client, found)
        return found

    def closed(self, client: str, mask: int, is_last: bool) -> None:
        """Count the rows of a group that are open no more. `is_last`: no other row of the group is."""
        self.add(client, -mask.bit_count() if self._counts_rows else -int(bool(mask) and is_last))

    def _take(self, held: int, most: int) -> None:
        self._levels[held, most] -= 1
        if not self._levels[held, most]:
            del self._levels[held, most]


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
    client: str = ""
    holdings: Holdings | None = None
    """Holdings of the stage, to count the rows that are open no more. None: they are not counted."""


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
        while self._deadlines:
            deadline, lease_id = self._deadlines[0]
            lease = self.held.get(lease_id)
            if lease is None or lease.deadline is None:
                heapq.heappop(self._deadlines)
            elif lease.deadline > deadline:
                heapq.heapreplace(self._deadlines, (lease.deadline, lease_id))
            else:
                return deadline
        return None

    def overdue(self, now: float) -> list[HeldLease]:
        """Leases whose deadline has come, earliest first."""
        late = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            late.append(self.held[heapq.heappop(self._deadlines)[1]])
        return late
