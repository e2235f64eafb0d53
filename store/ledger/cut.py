"""The living groups of one moment, copied while the ledger goes on. For snapshots.

    cut = Cut(residents, kept)   the moment; costs the same however many groups there are
    while cut.copy(500): …       the groups that have not changed since, some at a time, between any events
                                 one that is about to change is copied first (`Residents.changing`)

A copy has what a snapshot has of a group: no leases, and not what is free. Pure; `service/saving.py` drives it.
"""

from collections.abc import Callable

from penstock.store.ledger.group import Group
from penstock.store.ledger.losses import lacks_source
from penstock.store.ledger.residents import Residents


class Cut:
    """A copy of the groups. Lifecycle: made at its moment, `copy` until nothing is left or `close`; then it costs the
    ledger nothing more."""

    def __init__(self, residents: Residents, kept: Callable[[int], None] = lambda group: None) -> None:
        """Begin at this moment. `kept`: called with each group's number when it is copied, before it changes."""
        self._residents, self._kept = residents, kept
        self._first, self._end = next(iter(residents.groups), residents.next_group), residents.next_group
        self._next = self._first
        self._copied: dict[int, Group] = {}
        self._lacking: set[int] = set()
        residents.watchers.append(self._keep)

    def copy(self, count: int) -> bool:
        """Copy the groups of so many numbers more. Returns whether any numbers are left."""
        end = min(self._end, self._next + count)
        groups = self._residents.groups
        for number in range(self._next, end):
            if (group := groups.get(number)) is not None:
                self._keep(group)
        self._next = end
        if end == self._end:
            self.close()
        return end < self._end

    def close(self) -> None:
        """Copy no more. A second time changes nothing."""
        if self._keep in self._residents.watchers:
            self._residents.watchers.remove(self._keep)

    @property
    def groups(self) -> list[Group]:
        """The copied groups, by number. For any thread, once all are copied: sorting would keep Python's lock too
        long."""
        return [self._copied[number] for number in range(self._first, self._end) if number in self._copied]

    @property
    def with_source(self) -> list[int]:
        """Numbers of the copied groups that have the source's values, ascending."""
        copied, lacking = self._copied, self._lacking
        return [number for number in range(self._first, self._end) if number in copied and number not in lacking]

    def _keep(self, group: Group) -> None:
        if not group.live or not self._next <= group.id < self._end or group.id in self._copied:
            return
        self._copied[group.id] = group.copy()
        if lacks_source(self._residents, group):
            self._lacking.add(group.id)
        self._kept(group.id)
