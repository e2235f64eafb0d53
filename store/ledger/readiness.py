"""The units that may start a stage: counted when a column is written, never searched for.

The ledger calls `refresh` for the few stages that a change can concern, and `take` when a client leases; what they cost
does not grow with the groups resident. Queues are heaps by age, so returned groups go back to their place. How long
units wait for a client to lease them follows from the same counts, by Little's law.
"""

import heapq
from collections.abc import Callable, Iterable

from penstock.store.ledger.group import Group
from penstock.store.spec import StoreSpec


class StageQueue:
    """The queue of a stage: the groups that wait, the count of units that are free, and its columns as numbers."""

    def __init__(self, spec: StoreSpec, index: int, column_index: dict[str, int]) -> None:
        self.spec = spec.stages[index]
        self.name = self.spec.name
        self.index = index
        self.unit = self.spec.unit
        self.bit = 1 << index
        self.takes_samples = self.unit == "sample"
        self.reads = tuple(column_index[name] for name in self.spec.reads)
        self.writes = tuple(column_index[name] for name in self.spec.writes)
        shared = {column.name for column in spec.columns if column.per_group}
        self.sees_siblings = self.unit == "group" and any(name not in shared for name in self.spec.reads)
        """True if the result depends on the other rows of the group: after a partial write the whole group is leased
        again."""
        self.readers: tuple[StageQueue, ...] = ()
        """Stages that a write of this one can make ready, itself included."""
        self.queue: list[int] = []
        """Heap of the numbers of groups, so the oldest is first."""
        self.num_free = 0
        """Units that may be leased now."""
        self.rows_of_free = 0
        """Rows of these units, where they are groups."""
        self.leased_rows = 0
        self.done_rows = 0
        """Live rows that the stage has completed. `leased_rows`: live rows that some lease holds open."""
        self.num_taken = 0
        """Units ever leased; one that was given back counts again."""
        self.waited_s = 0.0
        """Unit-seconds spent free: the integral of `num_free` over time."""

    @property
    def free_rows(self) -> int:
        """Rows that may be leased now."""
        return self.num_free if self.takes_samples else self.rows_of_free

    @property
    def mean_wait_s(self) -> float:
        """Mean time from a unit's readiness to its lease. L = lambda W (Little 1961): the integral of units that wait,
        over those that were leased."""
        return self.waited_s / self.num_taken if self.num_taken else 0.0


class Readiness:
    """The stages of a store, and the units that may start there."""

    def __init__(self, spec: StoreSpec, groups: dict[int, Group]) -> None:
        self.column_index = {column.name: index for index, column in enumerate(spec.columns)}
        self.stages = [StageQueue(spec, index, self.column_index) for index in range(len(spec.stages))]
        self.by_name = {stage.name: stage for stage in self.stages}
        for stage in self.stages:
            stage.readers = tuple(
                other for other in self.stages if other is stage or set(other.reads) & set(stage.writes)
            )
        self.first = tuple(stage for stage in self.stages if set(stage.spec.reads) <= set(spec.source_columns))
        """Stages that may start on a group that is new."""
        self._groups = groups
        self._now: float | None = None

    def advance_clock(self, now: float) -> None:
        """Advance the time: called before each event that has one, so that what waited until now is counted."""
        if self._now is not None and now > self._now:
            seconds = now - self._now
            for stage in self.stages:
                if stage.num_free:
                    stage.waited_s += stage.num_free * seconds
        self._now = now

    def refresh(self, group: Group, stage: StageQueue) -> int:
        """Recount what is free of `group` in `stage`, after any of its masks changed. Returns the stage's bit if rows
        are free that were not, else 0."""
        free = free_rows(group, stage)
        before = group.free[stage.index]
        if free == before:
            return 0
        group.free[stage.index] = free
        if stage.takes_samples:
            stage.num_free += free.bit_count() - before.bit_count()
        else:
            stage.num_free += bool(free) - bool(before)
            stage.rows_of_free += free.bit_count() - before.bit_count()
        if free and stage.unit != "batch" and not group.queued & stage.bit:
            group.queued |= stage.bit
            heapq.heappush(stage.queue, group.id)
        return stage.bit if free & ~before else 0

    def refresh_all(self, group: Group, stages: Iterable[StageQueue] | None = None) -> int:
        """Refresh all stages, or some. Returns the bits of those of which more is free."""
        if not (group.live or any(group.free)):
            return 0  # it has ended, and nothing of it was free
        more = 0
        for stage in self.stages if stages is None else stages:
            more |= self.refresh(group, stage)
        return more

    def held(self, group: Group, stage: StageQueue, mask: int) -> None:
        """Note that rows of the mask have been leased: what `refresh` would find, at less cost."""
        before = group.free[stage.index]
        if stage.takes_samples:
            group.free[stage.index] = free = before & ~mask
            stage.num_free -= before.bit_count() - free.bit_count()
        elif before:
            group.free[stage.index] = 0
            stage.rows_of_free -= before.bit_count()
            stage.num_free -= 1

    def take(self, stage: StageQueue, max_units: int, hold: Callable[[Group, int, int], None]) -> int:
        """Call `hold(group, open, granted)` for up to `max_units` free units in their turn. Returns how many they were.

        `open`: mask of the rows to compute. `granted`: those and the finished siblings that the stage reads as well.
        """
        taken = 0
        while taken < max_units and stage.queue:
            group = self._groups.get(stage.queue[0])
            free = group.free[stage.index] if group else 0
            if group is None or not free:
                heapq.heappop(stage.queue)
                if group is not None:
                    group.queued &= ~stage.bit
                continue
            if stage.takes_samples:
                free = lowest(free, max_units - taken)
            taken += num_units(stage, free)
            hold(group, free, group.live if stage.sees_siblings else free)
        stage.num_taken += taken
        return taken


def free_rows(group: Group, stage: StageQueue) -> int:
    """Mask of the rows of `group` that may be leased for `stage`: the definition that all counting follows."""
    ready, leased = group.live & ~group.lost, group.leased[stage.index]
    have = group.have
    for column in stage.reads:
        ready &= have[column]
    if not stage.takes_samples and (leased or ready != group.live):
        return 0
    return ready & ~(leased | group.done[stage.index])


def num_units(stage: StageQueue, free: int) -> int:
    return free.bit_count() if stage.takes_samples else int(free != 0)


def lowest(mask: int, count: int) -> int:
    """The `count` lowest set bits of a mask."""
    if mask.bit_count() <= count:
        return mask
    rest = mask
    for _ in range(count):
        rest &= rest - 1
    return mask ^ rest
