"""Leases that all data-parallel ranks of a stage share: the first to ask forms one, each gets its part of it.

The train stage's round is the batch of one step: exactly `groups_per_step` whole groups in order, each token fresh
enough.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from penstock.store.errors import LeaseExpired, StalenessViolation, StoreError
from penstock.store.ledger.batches import GroupLoad, choose_groups, spread
from penstock.store.ledger.group import NO_VERSION, Group, masks_of, row_ids, spans_of
from penstock.store.ledger.lost_values import restart_group
from penstock.store.ledger.readiness import StageQueue
from penstock.store.ledger.residents import Effects, Residents

KEPT_ROUNDS = 8
"""Number of a stage's rounds that are remembered after their end, for ranks that ask or acknowledge again."""


@dataclass
class Round:
    """A shared lease and its split over the ranks."""

    stage: str
    number: int
    lease_id: int
    parts: list[list[int]]
    """Row ids of each rank, ascending."""
    version: int
    """The version of the policy that the batch is trained on: steps before this one. 0 outside of training."""
    completed: set[int] = field(default_factory=set)
    """Ranks that have trained their share."""
    ended: bool = False
    """True once all ranks have completed."""
    void: bool = False
    """True once the lease expired or was given back."""


class Rounds:
    """The rounds of every stage, and the batches among them."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self.formed = 0
        """Number of steps whose batch was formed: the version that the next batch is trained on."""
        self.by_lease: dict[int, Round] = {}
        self._rounds: dict[str, dict[int, Round]] = {}
        self._newest: dict[str, int] = {}
        self._taken_back: list[list[int]] = []
        """Groups of batches that were taken back, each to be formed again as it was, the last one first."""
        self._lagging = -1
        """A group that lagged at the last look for a batch: as long as it does, and waits, strict order has none."""
        self.last_batch: list[int] = []
        """Row ids of the batch trained last, ascending; they stay resident until the next one is."""
        self.staleness_max = 0
        """Largest staleness of any row ever put into a batch, in versions."""

    def may_form(self, stage: StageQueue) -> bool:
        """Return whether the next round of a stage can be formed."""
        return stage.num_free > 0 if stage.unit != "batch" else self._next_groups(stage) is not None

    def under_way(self, stage: StageQueue) -> list[Round]:
        """Rounds that were formed, and neither ended nor given back; newest first."""
        rounds = sorted(self._rounds.get(stage.name, {}).items(), reverse=True)
        return [made for _, made in rounds if not made.void and made.lease_id in self._residents.leases.held]

    def next_number(self, stage: StageQueue) -> int:
        """Number of the next round of a stage. Batches are numbered as steps are, from 0."""
        return self.formed if stage.unit == "batch" else self._newest.get(stage.name, -1) + 1

    def batches(self) -> list[Round]:
        """The rounds of the train stage that are remembered."""
        train = self._residents.train
        return list(self._rounds.get(train.name, {}).values()) if train is not None else []

    def find(self, stage: StageQueue, number: int, num_ranks: int) -> Round | None:
        """Find the round, if it was formed. Raises `LeaseExpired` if it is over, `StoreError` if the ranks disagree."""
        known = self._rounds.get(stage.name, {}).get(number)
        if known is None:
            newest = self._newest.get(stage.name)
            if newest is not None and number <= newest:
                raise LeaseExpired(
                    f"round {number} of stage {stage.name!r} is over; the newest is {newest}. Ask for {newest + 1}."
                )
            return None
        if known.void or known.ended:
            how = "expired or was released" if known.void else "is trained already"
            raise LeaseExpired(f"round {number} of stage {stage.name!r} {how}. Ask for round {number + 1}.")
        if len(known.parts) != num_ranks:
            raise StoreError(
                f"round {number} of stage {stage.name!r} was split over {len(known.parts)} ranks, not {num_ranks}. "
                "All ranks of a stage must give the same num_ranks."
            )
        return known

    def has_formed(self, stage: str, number: int) -> bool:
        """Return whether some rank has been given its part of a round that was not given back."""
        known = self._rounds.get(stage, {}).get(number)
        return known is not None and not known.void

    def form(
        self,
        stage: StageQueue,
        number: int,
        num_ranks: int,
        max_units: int,
        owner: str,
        deadline: float,
        effects: Effects,
    ) -> Round | None:
        """Form a new round if its units are ready. The train stage's has no deadline, and none is formed before the
        batch of the step before is known: a restored store may learn of that step later. Raises
        `StalenessViolation`."""
        residents = self._residents
        if stage.unit == "batch":
            if number > self.formed:
                return None
            chosen = self._choose_batch(stage, effects)
            if chosen is None:
                return None
            lease = residents.leases.open(stage.index, owner, None)
            if self._taken_back and self._taken_back[-1] == [group.id for group in chosen]:
                self._taken_back.pop()
            else:  # some have gone since, and later ones may be among these
                self._taken_back.clear()
            for group in chosen:
                group.trained_in = self.formed
                residents.waiting.discard(group.id)
                residents.hold(lease, group, group.live, group.live)
            stage.num_taken += len(chosen)
            version, self.formed = self.formed, self.formed + 1
            residents.counters["batches_formed"] += 1
            effects.credits = True  # those that wait for room in bytes: fewer groups wait for a batch
        else:
            if not stage.num_free:
                return None
            lease = residents.leases.open(stage.index, owner, deadline)
            residents.readiness.take(stage, max_units, partial(residents.hold, lease))
            version = 0
        made = Round(stage.name, number, lease.id, self._split(stage, lease.granted, num_ranks), version)
        self.by_lease[lease.id] = made
        self._rounds.setdefault(stage.name, {})[number] = made
        self._newest[stage.name] = number
        effects.rounds |= 1 << stage.index
        self._prune(stage.name)
        return made

    def complete(self, lease_id: int, rank: int, effects: Effects) -> None:
        """Note that `rank` has trained its share; after the last one the batch's rows end. A second time changes
        nothing."""
        made = self.by_lease.get(lease_id)
        if made is None or made.void:
            raise LeaseExpired(
                f"lease {lease_id} is no round under way: it is long over, or was released. Ask for the next one."
            )
        stage = self._residents.stage(made.stage)
        if stage.unit != "batch":
            raise StoreError(
                f"stage {stage.name!r} is completed by writing {', '.join(stage.spec.writes)}, not by an ack."
            )
        if not 0 <= rank < len(made.parts):
            raise StoreError(
                f"rank {rank} is none of the {len(made.parts)} ranks of round {made.number} of stage {stage.name!r}."
            )
        if made.ended:
            self._residents.counters["ignored/second_ack"] += 1
            return
        made.completed.add(rank)
        if len(made.completed) == len(made.parts):
            self._end_batch(made, effects)

    def void(self, lease_id: int, effects: Effects) -> None:
        """Note that the lease of a round that is no batch was released or has expired; its number is not formed
        again."""
        made = self.by_lease.get(lease_id)
        if made is not None:
            made.void = True
            effects.rounds |= 1 << self._residents.stage(made.stage).index

    def take_back(self, made: Round, effects: Effects) -> None:
        """Undo the formation of the newest batch, whose step was lost: the next one is of the same groups. Raises
        `StoreError` for older ones."""
        residents = self._residents
        if made.version != self.formed - 1:
            raise StoreError(
                f"round {made.number} formed the batch of step {made.version + 1}, but that of step {self.formed} was "
                "formed since; release the newest first."
            )
        lease = residents.leases.held[made.lease_id]
        groups = [residents.groups[group_id] for group_id in lease.open]
        for group in groups:
            group.trained_in = None
            residents.waiting.add(group.id)
            residents.head = min(residents.head, group.id)
        residents.release(lease, effects)
        for group in groups:
            restart_group(residents, group, effects)
        self.formed -= 1
        self._taken_back.append(sorted(group.id for group in groups))
        self._lagging = -1  # groups before it wait again: there may be a batch of these
        made.void = True
        effects.rounds |= 1 << lease.stage
        del self._rounds[made.stage][made.number], self.by_lease[made.lease_id]
        self._newest[made.stage] = made.number - 1

    def _choose_batch(self, stage: StageQueue, effects: Effects) -> list[Group] | None:
        """Choose the next batch's groups, those with a token too old evicted; a strict spec raises instead."""
        residents, spec = self._residents, self._residents.spec
        while stage.num_free >= spec.groups_per_step:
            chosen = self._next_groups(stage)
            if chosen is None:
                return None
            groups = [residents.groups[group] for group in chosen]
            stale = [group for group in groups if self.formed - group.oldest_version() > spec.max_staleness]
            if not stale:
                self._count_staleness(groups)
                return groups
            for group in stale:
                self._evict(group, effects)
        return None

    def _next_groups(self, stage: StageQueue) -> list[int] | None:
        """Find the groups of the next batch, in order, whatever their age; None if they are not complete.

        Groups of a batch that was taken back are next, even if groups that precede some of them have become complete:
        they overtake no group that they had not overtaken then. If they cannot all be trained, order decides.
        """
        residents, spec = self._residents, self._residents.spec
        if stage.num_free < spec.groups_per_step:
            return None
        if self._taken_back and all(self._is_complete(stage, group) for group in self._taken_back[-1]):
            return list(self._taken_back[-1])
        lags = self._lagging
        if spec.window == 1 and lags in residents.waiting and not self._is_complete(stage, lags):
            return None  # as at the last look: nothing overtakes it
        residents.first_waiting()
        return choose_groups(
            residents.head,
            residents.next_group,
            spec.groups_per_step,
            spec.window,
            residents.waiting.__contains__,
            lambda group: self._is_complete(stage, group, notes=True),
        )

    def _is_complete(self, stage: StageQueue, group: int, notes: bool = False) -> bool:
        """Return whether a group waits for a batch, and could be in one. `notes`: remember it if not."""
        known = self._residents.groups.get(group)
        is_complete = known is not None and known.free[stage.index] != 0
        if notes and not is_complete:
            self._lagging = group
        return is_complete

    def _count_staleness(self, groups: list[Group]) -> None:
        versions = Counter(chain.from_iterable(group.of_live(group.oldest) for group in groups))
        del versions[NO_VERSION]
        for oldest, count in versions.items():
            self._residents.counters[f"staleness/{self.formed - oldest}"] += count
            self.staleness_max = max(self.staleness_max, self.formed - oldest)

    def _evict(self, group: Group, effects: Effects) -> None:
        spec = self._residents.spec
        if spec.old_turns_are_context:  # those of its rows that have no token left to be trained
            ages = [self.formed - oldest for oldest in group.oldest]
            old = sum(1 << index for index, age in enumerate(ages) if age > spec.max_staleness)
            self._residents.drop(group, group.live & old, "stale", effects)
            return
        age = self.formed - group.oldest_version()
        if self._residents.spec.strict:
            raise StalenessViolation(
                f"group {group.id} has a token of version {group.oldest_version()}, which the step that makes "
                f"version {self.formed + 1} would train at staleness {age} > "
                f"max_staleness={self._residents.spec.max_staleness}. Admission should "
                "have made this impossible: was the store told of a version before all engines had loaded it?"
            )
        self._residents.drop(group, group.live, "stale", effects)

    def _split(self, stage: StageQueue, granted: dict[int, int], num_ranks: int) -> list[list[int]]:
        """Split rows (whole groups where the stage's unit is the group) over ranks, balanced by what prompt and
        response cost."""
        residents = self._residents
        ids: list[int] = []
        loads: list[GroupLoad] = []
        for group_id, mask in sorted(granted.items()):
            group, rows = residents.groups[group_id], row_ids(group_id, mask, residents.size)
            indices = [row - group_id * residents.size for row in rows]
            tokens = [
                group.prompt_tokens + group.context_tokens[index] + group.response_tokens[index] for index in indices
            ]
            ids.extend(rows)
            loads.append(GroupLoad(group.prompt_tokens, tokens))
        is_whole = stage.unit == "group" or stage.spec.whole_groups
        parts = spread(loads, num_ranks, whole_groups=is_whole, shares=residents.spec.shares_prefixes)
        return [[ids[position] for position in part] for part in parts]

    def _end_batch(self, made: Round, effects: Effects) -> None:
        """Consume a trained batch: its rows end, those of the batch before are forgotten, credits fall due."""
        residents = self._residents
        for group_id in masks_of(spans_of(self.last_batch, residents.size)):
            residents.forget(residents.groups[group_id], effects)
        lease = residents.leases.held.get(made.lease_id)
        self.last_batch = []
        groups = [residents.groups[group_id] for group_id in sorted(lease.open)] if lease else []
        for group in groups:
            self.last_batch.extend(row_ids(group.id, group.live, residents.size))
            residents.counters["response_tokens_trained"] += sum(group.of_live(group.response_tokens))
            residents.end_trained(group, effects)
        residents.credits.trained(made.version + 1, len(groups))
        residents.counters["batches_trained"] += 1
        made.ended = True
        effects.rounds |= 1 << residents.stage(made.stage).index
        effects.credits = True

    def _prune(self, stage: str) -> None:
        rounds = self._rounds[stage]
        for number in sorted(rounds)[:-KEPT_ROUNDS]:
            made = rounds[number]
            if made.ended or made.void or made.lease_id not in self._residents.leases.held:
                del rounds[number]
                del self.by_lease[made.lease_id]
