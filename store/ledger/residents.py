"""The resident groups and the few moves that all events are made of: admit, hold, unhold, release, drop, forget.

`ledger.py` turns events into these moves; `rounds.py` forms batches with them. Each keeps groups, leases, credits and
counters consistent with one another, and says by its `Effects` what is to be freed and whom to wake.

Groups that are sampled for much longer than most are offered to a second engine (`Stragglers`):

    leased ─ longer than straggler_factor x the median ─▶ offered ─▶ leased twice ─ first write of a row ─▶ the other
                                                                                    lease holds it no more

A group is leased by two engines at most. Its time counts from the lease of the engine that completed it. With factor 0
it is off, and nothing is noted either.
"""

import heapq
import operator
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from penstock.conf.errors import suggest
from penstock.store.errors import LeaseSuperseded, UnknownRow, UnknownStage
from penstock.store.ledger.admission import Credits
from penstock.store.ledger.group import Facts, Group, Span, bits, masks_of, untouched
from penstock.store.ledger.leases import HeldLease, LeaseBook
from penstock.store.ledger.outcomes import Outcomes
from penstock.store.ledger.readiness import Readiness, StageQueue
from penstock.store.spec import StoreSpec

RECENT = 101
"""Number of groups that the median is of. Lengths of responses change slowly while a policy learns."""
ENOUGH = 8
"""Number of groups that must have been completed before any counts as a straggler."""


@dataclass(slots=True)
class Effects:
    """The effects of one event, for its driver (`service/waiters.py`) to carry out. Naming too many callers costs a
    look at each, naming too few would leave one waiting for ever: tests hold every event to what has become possible.
    """

    freed: list[tuple[int, int]] = field(default_factory=list)
    """Rows that ended: (group, mask of its rows). No caller will ask for their values again."""
    cleared: list[tuple[int, dict[str, int]]] = field(default_factory=list)
    """Values that are gone, or worth nothing without one that is: (group, mask of its rows by column)."""
    superseded: list[tuple[int, int]] = field(default_factory=list)
    """Leases whose rows another lease has written first: (lease, group), the group that this one held."""
    stages: int = 0
    """Stages of which more is free, or a client holds less: bit s for stage s. Callers that wait for leases may get
    one."""
    rounds: int = 0
    """Stages of which a round was formed, ended or taken back: bit s for stage s. Ranks that wait for one must look
    again."""
    credits: bool = False
    """True if a group that had to wait may be admitted."""


class Residents:
    """The groups, leases, credits and counters that events change."""

    def __init__(self, spec: StoreSpec) -> None:
        self.spec = spec
        self.size = spec.group_size
        self.all_rows = (1 << spec.group_size) - 1
        self.groups: dict[int, Group] = {}
        """Groups with rows alive, and those of the batch trained last."""
        self.next_group = 0
        self.past: dict[int, tuple[int, int]] = {}
        """Groups that end once they are admitted again, since they ended in a store that is gone: rows that were
        trained, and the version that was made of them. See `Ledger.catch_up`."""
        self.readiness = Readiness(spec, self.groups)
        self.leases = LeaseBook()
        self.credits = Credits(spec.max_active_groups, spec.groups_per_step, spec.max_bytes)
        self.waiting: set[int] = set()
        """Groups that no batch has taken yet."""
        self.head = 0
        """Lower bound of the groups that wait: no group before this one does."""
        self.num_rows = 0
        """Live rows."""
        self.counters: Counter[str] = Counter()
        """Count of every decision, by reason."""
        self.train = next((stage for stage in self.readiness.stages if stage.unit == "batch"), None)
        self.sampling = next((stage for stage in self.readiness.stages if "response_ids" in stage.spec.writes), None)
        """The stage of the engines."""
        self.stragglers = Stragglers(spec.straggler_factor, self.sampling, self.leases)
        self.outcomes = Outcomes(spec.group_size) if spec.keeps_outcomes else None
        index = self.readiness.column_index
        self.source = [index[name] for name in spec.source_columns]
        """Columns that every row has from its admission on."""
        self.watchers: list[Callable[[Group], None]] = []
        """Functions that are called with a group before anything changes in it that a snapshot has."""

    def stage(self, name: str) -> StageQueue:
        """Find a stage. Raises `UnknownStage` with the nearest name."""
        stage = self.readiness.by_name.get(name)
        if stage is None:
            raise UnknownStage(f"stage {name!r} is not in the dataflow{suggest(name, self.readiness.by_name)}")
        return stage

    def masks(self, spans: Sequence[Span]) -> dict[int, int]:
        """Masks of the rows, `{group: mask}`. Raises `UnknownRow` for rows never admitted."""
        masks = masks_of(spans)
        for group in masks:
            if not 0 <= group < self.next_group:
                row = next(group * self.size + indices.start for known, _, indices in spans if known == group)
                raise UnknownRow(
                    f"row {row}: no such row was ever admitted; rows so far are 0 to "
                    f"{self.next_group * self.size - 1}. Write the rows of the lease."
                )
        return masks

    def admit(self, nbytes: int, prompt_tokens: int, response_tokens: int, effects: Effects) -> Group:
        """Add a new group with the source's columns; its number is the next one."""
        group = Group(self.next_group, self.size, len(self.spec.columns), len(self.readiness.stages))
        self.next_group += 1
        for column in self.source:
            group.have[column] = self.all_rows
        group.shared_bytes, group.prompt_tokens = nbytes, prompt_tokens
        if response_tokens:
            group.response_tokens = [response_tokens] * self.size
            self.counters["response_tokens_generated"] += response_tokens * self.size
        self._add(group)
        effects.stages |= self.readiness.refresh_all(group, self.readiness.first)
        return group

    def resume(self, group: Group, effects: Effects) -> None:
        """Add a group that comes from a snapshot."""
        self._add(group)
        for stage in self.readiness.stages:
            stage.done_rows += (group.done[stage.index] & group.live).bit_count()
        effects.stages |= self.readiness.refresh_all(group)

    def _add(self, group: Group) -> None:
        """Make a group resident and waiting."""
        self.groups[group.id] = group
        self.waiting.add(group.id)
        self.credits.admit()
        self.credits.bytes += group.nbytes
        self.num_rows += group.live.bit_count()

    def before_change(self, group: Group) -> None:
        """Tell those that copy the state of a group before it changes."""
        for watcher in self.watchers:
            watcher(group)

    def first_waiting(self) -> int | None:
        """Find the oldest group that no batch has taken yet."""
        while self.head < self.next_group and self.head not in self.waiting:
            self.head += 1
        return self.head if self.head < self.next_group else None

    def is_lost(self, row: int) -> bool:
        """Return whether a resident row of a batch has lost values since the batch was formed."""
        return bool(self.groups[row // self.size].lost >> row % self.size & 1)

    def hold(self, lease: HeldLease, group: Group, open_rows: int, granted: int) -> None:
        """Give rows to a lease."""
        stage = self.readiness.stages[lease.stage]
        group.leased[stage.index] |= open_rows
        stage.leased_rows += open_rows.bit_count()
        lease.open[group.id] = open_rows
        lease.granted[group.id] = granted
        if group.holders is None:
            group.holders = set()
        group.holders.add(lease.id)
        self.readiness.held(group, stage, open_rows)

    def note_facts(
        self,
        stage: StageQueue,
        group: Group,
        indices: range,
        position: int,
        facts: Facts,
        versions: bool = True,
        lengths: bool = True,
    ) -> None:
        """Keep facts of rows side by side, from `position` on. `versions`, `lengths`: which of them are news."""
        end = position + len(indices)
        where = slice(indices.start, indices.stop)
        row_bytes = facts.row_bytes[position:end]
        first = stage.index * self.size
        of_stage = slice(first + indices.start, first + indices.stop)
        earlier = group.row_bytes[of_stage]
        group.row_bytes[of_stage] = map(operator.add, earlier, row_bytes) if any(earlier) else row_bytes
        self.credits.bytes += sum(row_bytes)
        if self.outcomes is not None and facts.rewards is not None:
            for index, reward in zip(indices, facts.rewards[position:end], strict=True):
                self.outcomes.note(group.id, index, reward)
        if versions and facts.oldest_version is not None:
            group.oldest[where] = facts.oldest_version[position:end]
        if lengths and facts.response_tokens is not None:
            tokens = facts.response_tokens[position:end]
            group.response_tokens[where] = tokens
            self.counters["response_tokens_generated"] += sum(tokens)
            if facts.context_tokens is not None:
                group.context_tokens[where] = facts.context_tokens[position:end]

    def hold_second(self, owner: str, now: float) -> HeldLease | None:
        """Lease the group that another owner has sampled for too long, and nothing else; None if there is none. The
        first write of a row counts."""
        for group_id, first in self.stragglers.overdue(now):
            stage, group = self.readiness.stages[first.stage], self.groups[group_id]
            rows = untouched(group, first.open[group_id], stage.writes)
            if rows and first.owner != owner:
                lease = self.leases.open(stage.index, owner, now + self.spec.lease_timeout_s)
                self.hold(lease, group, rows, rows)
                stage.leased_rows -= rows.bit_count()  # they were leased before
                self.stragglers.began(lease, now)
                self.counters["stragglers/offered"] += 1
                return lease
        return None

    def supersede_others(self, lease: HeldLease, group: Group, mask: int, effects: Effects) -> None:
        """Note that the lease has written something of these rows: nothing is awaited of another that holds them
        too."""
        for other in self.stragglers.other_leases(lease, group.id):
            if lost := other.open.get(group.id, 0) & mask:
                other.revoked[group.id] = other.revoked.get(group.id, 0) | lost
                superseded = self.stragglers.superseded.setdefault(group.id, {})
                superseded[other.id] = superseded.get(other.id, 0) | lost
                if lost == other.open[group.id]:
                    effects.superseded.append((other.id, group.id))
                    self.counters["stragglers/won"] += self.stragglers.is_second(lease, group.id)
                self.unhold(other, group, lost, effects)

    def check_not_superseded(self, lease_id: int, masks: dict[int, int], response_tokens: list[int] | None) -> None:
        """Raise `LeaseSuperseded` if another lease has written all of these rows first. `response_tokens`: the number
        sampled for each."""
        written = self.stragglers.superseded
        if not masks or any(mask & ~written.get(group, {}).get(lease_id, 0) for group, mask in masks.items()):
            return
        self.counters["stragglers/late_rows"] += sum(mask.bit_count() for mask in masks.values())
        self.counters["stragglers/late_tokens"] += sum(response_tokens or ())
        raise LeaseSuperseded(
            f"rows of groups {sorted(masks)}: lease {lease_id} came second, another engine has sampled them too. Throw "
            "the result away."
        )

    def unhold(self, lease: HeldLease, group: Group, mask: int, effects: Effects) -> None:
        """Take open rows from a lease, which ends with its last one. The caller refreshes readiness."""
        effects.stages |= 1 << lease.stage  # its owner holds less, and may be due more
        held = lease.open.get(group.id, 0)
        rest = held & ~mask
        if lease.holdings is not None:
            lease.holdings.closed(lease.client, held & mask, not rest)
        may_share = bool(self.stragglers.holders)
        freed = group.leased[lease.stage] & mask
        if may_share:
            freed &= ~self.stragglers.of_others(lease, group.id)
        group.leased[lease.stage] ^= freed
        self.readiness.stages[lease.stage].leased_rows -= freed.bit_count()
        if rest:
            lease.open[group.id] = rest
            return
        lease.open.pop(group.id, None)
        if may_share:
            self.stragglers.ended(lease, group.id)
        if group.holders:
            group.holders.discard(lease.id)
        if not lease.open:
            self.leases.end(lease)

    def release(self, lease: HeldLease, effects: Effects) -> int:
        """Free all open rows of a lease. Returns how many they were."""
        stage = self.readiness.stages[lease.stage]
        num_rows = 0
        for group_id, mask in list(lease.open.items()):
            group = self.groups[group_id]
            num_rows += mask.bit_count()
            self.unhold(lease, group, mask, effects)
            effects.stages |= self.readiness.refresh(group, stage)
        self.leases.end(lease)
        return num_rows

    def drop(self, group: Group, mask: int, reason: str, effects: Effects) -> None:
        """End rows here. A group without live rows ends and, if it was active, returns its credit."""
        mask &= group.live
        if not mask:
            return
        if self.watchers:
            self.before_change(group)
        self.counters[f"dropped/{reason}"] += mask.bit_count()
        self._end_rows(group, mask, effects)
        for index in bits(mask):
            self.credits.bytes -= sum(group.row_bytes[index :: self.size])
            group.row_bytes[index :: self.size] = [0] * len(self.readiness.stages)
        effects.credits = True
        if group.live:
            effects.freed.append((group.id, mask))
            return
        self.waiting.discard(group.id)
        if self.train is not None:
            effects.stages |= 1 << self.train.index  # later groups need not wait for this one any more
        self.counters["groups_dropped"] += 1
        self.credits.ended()
        self.forget(group, effects)

    def end_trained(self, group: Group, effects: Effects) -> None:
        """Note that the live rows of a group have been trained. Its data stays until `forget`."""
        if self.watchers:
            self.before_change(group)
        self.counters["rows_trained"] += group.live.bit_count()
        self._end_rows(group, group.live, effects)

    def forget(self, group: Group, effects: Effects) -> None:
        """Remove a group that nothing refers to any more."""
        self.credits.bytes -= group.nbytes
        self.stragglers.superseded.pop(group.id, None)
        if self.outcomes is not None:
            self.outcomes.ended(group.id)
        del self.groups[group.id]
        effects.freed.append((group.id, self.all_rows))
        effects.credits = True

    def _end_rows(self, group: Group, mask: int, effects: Effects) -> None:
        self.num_rows -= mask.bit_count()
        for lease_id in list(group.holders or ()):
            lease = self.leases.held[lease_id]
            if held := lease.open.get(group.id, 0) & mask:
                self.unhold(lease, group, held, effects)
        for stage, done in zip(self.readiness.stages, group.done, strict=True):
            if done:
                stage.done_rows -= (done & mask).bit_count()
        group.live &= ~mask
        effects.stages |= self.readiness.refresh_all(group)


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
        self.superseded: dict[int, dict[int, int]] = {}
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
        if began is not None:
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
