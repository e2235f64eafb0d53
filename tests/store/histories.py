"""The rules of the ledger's random histories: workers that lag, die, repeat themselves, drop rows and answer late;
engines and ranks in any order; the store restarted from a snapshot at any moment. Run, with nodes that are lost, by
`ledger/test_ledger_histories.py`."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from random import Random
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.store.errors import LeaseExpired, LeaseSuperseded, StoreError
from penstock.store.ledger.group import Group
from penstock.store.ledger.leases import HeldLease
from penstock.store.ledger.residents import ENOUGH
from penstock.store.ledger.rounds import Round
from penstock.store.service.snapshot import LedgerCut, restore, scalars, values_of
from tests.store.checked_ledger import CheckedLedger
from tests.store.driver import Driver, facts_for, facts_of, living_groups, make_spec
from tests.store.invariants import check_invariants
from tests.store.lineage import Lineage

WORKED = ("rollout", "reward", "reference", "group_advantage")
NODES = 3
MEDIAN_S = 0.5
"""Seconds that groups take in these histories, as far as the store knows at their beginning."""
SHARED = WORKED[1:]
"""Stages whose rows are shared by ranks in these histories; rollout could be as well, but no engine does that."""


class Histories(RuleBasedStateMachine):
    """One ledger, `num_ranks` trainer ranks, and any number of workers."""

    @initialize(
        group_size=st.integers(1, 3),
        groups_per_step=st.integers(1, 3),
        window=st.integers(1, 4),
        slack=st.integers(0, 2),
        num_ranks=st.integers(1, 3),
        max_bytes=st.sampled_from([60, 10**9]),
        nodes=st.randoms(use_true_random=False),
        straggler_factor=st.sampled_from([0.0, 3.0]),
    )
    def start(
        self,
        group_size: int,
        groups_per_step: int,
        window: int,
        slack: int,
        num_ranks: int,
        max_bytes: int,
        nodes: Random,
        straggler_factor: float,
    ) -> None:
        behind = math.ceil((window - 1) / groups_per_step)
        self.spec = make_spec(
            group_size=group_size,
            groups_per_step=groups_per_step,
            window=window,
            max_staleness=behind + slack,
            max_active_groups=(slack + 1) * groups_per_step,
            max_bytes=max_bytes,
            straggler_factor=straggler_factor,
        )
        self.num_ranks = num_ranks
        self.driver = Driver(self.spec)
        self.ledger = self.driver.ledger
        self.know_the_median()
        self.least_limit_s = math.inf
        """Least limit of all looks for slow groups. A group that was slow stays slow when the median grows."""
        self.now = 0.0
        self.lineage = Lineage(self.spec)
        self.nodes = nodes
        """Says on which node values lie."""
        self.leases: list[tuple[HeldLease, str, list[int]]] = []
        """Every lease ever given, ended or not: their owners may come back at any time."""
        self.sampled: dict[int, int] = {}
        """Oldest version of each row whose response was accepted."""
        self.admitted_under: dict[int, int] = {}
        """Version served when each group was admitted."""
        self.answered: dict[int, set[int]] = {}
        """Leases that have brought something of a response of each row."""
        self.trained: list[int] = []
        self.trained_groups: list[int] = []
        self.batches: list[list[int]] = []
        """Rows that were trained, by step."""
        self.snapshot: tuple[Any, Any, int, dict[int, int], Lineage] | None = None
        """The newest, the step that it was taken after, and what was known of its rows."""
        self.cuts: list[tuple[LedgerCut, Any]] = []
        """Cuts under way, each with what it is to be."""
        self.round = 0
        self.served = 0
        self.shared: Counter[str] = Counter()
        """Number of the next round, by stage; training has none here."""
        self.rounds: list[tuple[Round, list[list[int]]]] = []
        """Those that were formed since the last restart, and each rank's share at first."""
        self.revoked: dict[int, set[int]] = {}
        """Rows that were taken from each lease, since values were lost."""
        self.again: list[list[int]] = []
        """Groups of batches that were taken back: the last one is formed again as it was, if it can be."""

    @rule(count=st.integers(1, 4))
    def admit(self, count: int) -> None:
        for group in self.driver.admit(count, self.now):
            if group is not None:
                self.admitted_under[group] = self.served
            if group in self.ledger.residents.groups:
                self.lineage.admitted(self.ledger, group, self.nodes.randrange(10))  # mostly where no node is lost

    @rule(stage=st.sampled_from(WORKED), max_units=st.integers(1, 4), owner=st.sampled_from("ab"))
    def lease(self, stage: str, max_units: int, owner: str) -> None:
        lease = self.ledger.lease(stage, max_units, owner, self.now)
        if lease is not None:
            self.lineage.read(lease, stage)
            self.leases.append((lease, stage, self.ledger.rows_of(lease)))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), all_columns=st.booleans())
    def write(self, data: st.DataObject, all_columns: bool) -> None:
        """Write, by anybody who ever had a lease, any of its rows, whether already written or not."""
        lease, stage, rows = data.draw(st.sampled_from(self.leases[-8:]))
        some = data.draw(st.lists(st.sampled_from(rows), unique=True, min_size=1))
        columns = self.driver.writes[stage]
        if not all_columns:
            columns = tuple(data.draw(st.lists(st.sampled_from(columns), unique=True, min_size=1)))
        # A token is at the oldest of the version that was served when its group was admitted.
        admitted_under = max(self.admitted_under[row // self.spec.group_size] for row in some)
        version = data.draw(st.integers(admitted_under, self.served))
        facts = facts_of(columns, len(some), version)
        over = lease.id not in self.ledger.residents.leases.held
        undone = {row for row in some if self.is_undone(row, stage)}
        try:
            kept = self.ledger.write(lease.id, stage, some, columns, facts, self.now)
        except LeaseSuperseded:
            assert all(self.answered[row] - {lease.id} for row in some)
            return
        except LeaseExpired:
            assert over
            assert undone
            return
        assert not (over and undone), "a late writer was not told"
        assert {some[position] for position in kept} <= undone, "a result was taken twice, or for a row that has ended"
        self.lineage.written(self.ledger, lease, [some[position] for position in kept], columns, self.any_node)
        if stage == "rollout":
            for position in kept:
                self.answered.setdefault(some[position], set()).add(lease.id)
        if "token_versions" in columns:
            for position in kept:
                self.sampled.setdefault(some[position], version)

    def is_undone(self, row: int, stage: str) -> bool:
        group = self.ledger.residents.groups.get(row // self.spec.group_size)
        index = self.ledger.residents.stage(stage).index
        return group is not None and bool((group.live & ~group.done[index]) >> row % self.spec.group_size & 1)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), reason=st.sampled_from(["reward_timeout", "too_long"]))
    def drop(self, data: st.DataObject, reason: str) -> None:
        lease, stage, rows = data.draw(st.sampled_from(self.leases[-8:]))
        try:
            self.ledger.drop(lease.id, stage, [data.draw(st.sampled_from(rows))], reason)
        except LeaseExpired:
            assert lease.id not in self.ledger.residents.leases.held

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, _, _ = data.draw(st.sampled_from(self.leases[-8:]))
        self.ledger.release(lease.id)

    @rule(owner=st.sampled_from("ab"))
    def die(self, owner: str) -> None:
        self.ledger.abandon(owner)

    @rule(seconds=st.sampled_from([1.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)

    @rule()
    def work_everything_off(self) -> None:
        """Live workers finish whatever is free, under the version served now."""
        self.work_off(WORKED)

    def work_off(self, stages: Sequence[str]) -> None:
        for stage in stages:
            while (lease := self.ledger.lease(stage, 100, "c", self.now)) is not None:
                self.lineage.read(lease, stage)
                rows = self.ledger.rows_of(lease)
                columns = self.driver.writes[stage]
                kept = self.ledger.write(
                    lease.id, stage, rows, columns, facts_for(stage, len(rows), self.served), self.now
                )
                done = [rows[position] for position in kept]
                self.lineage.written(self.ledger, lease, done, columns, self.any_node)
                if stage == "rollout":
                    self.sampled.update((rows[position], self.served) for position in kept)
                    for position in kept:
                        self.answered.setdefault(rows[position], set()).add(lease.id)

    @rule(owner=st.sampled_from("ab"))
    def offer(self, owner: str) -> None:
        """An engine that waits takes a group that another has had for long, and one has only once."""
        stragglers = self.ledger.residents.stragglers
        before = {group: dict(holders) for group, holders in stragglers.holders.items()}
        if stragglers.limit_s is not None:
            self.least_limit_s = min(self.least_limit_s, stragglers.limit_s)
        lease = self.ledger.offer(owner, self.now)
        if lease is None:
            return
        (holders,) = (before[group] for group in lease.open)
        ((first, began),) = holders.items()
        assert began + self.least_limit_s <= self.now
        assert self.ledger.residents.leases.held[first].owner != owner
        self.lineage.read(lease, "rollout")
        self.leases.append((lease, "rollout", self.ledger.rows_of(lease)))

    @rule(data=st.data(), first_comes_first=st.booleans())
    def sample_twice(self, data: st.DataObject, first_comes_first: bool) -> None:
        """Two engines answer a group, one after the other, whole or in part."""
        self.admit(2)
        self.lease("rollout", 1, "a")
        self.pass_time(2.0)
        self.offer("b")
        for lease in [self.leases[-2:], self.leases[:-3:-1]][first_comes_first]:
            self.leases.append(lease)
            self.write(data, data.draw(st.booleans()))

    @rule(shuffled=st.randoms(use_true_random=False))
    def straggle(self, shuffled: Random) -> None:
        """One engine takes the oldest group that is free and lags; everybody else goes on as far as they may."""
        self.admit(100)
        self.lease("rollout", 1, "a")
        self.work_everything_off()
        for _ in range(3):
            self.train(shuffled)

    @rule(shuffled=st.randoms(use_true_random=False))
    def train(self, shuffled: Random) -> None:
        """All ranks, in any order; strict, so a staleness violation raises and fails the test."""
        made = self.form_batch()
        if made is None:
            return
        batch = sorted(row for part in made.parts for row in part)
        groups = self.groups_of(made)
        assert len(groups) == self.spec.groups_per_step
        self.lineage.check(self.ledger, batch)
        for row in batch:
            assert made.version - self.sampled[row] <= self.spec.max_staleness
        ranks = list(range(self.num_ranks))
        shuffled.shuffle(ranks)
        for rank in ranks:
            assert self.ledger.rows_of_rank(made, rank) == made.parts[rank]
            self.ledger.complete_shared(made.lease_id, rank)
        self.was_trained(made)

    def form_batch(self, further: int = 0) -> Round | None:
        """The next one, or the one after so many: as it was before, if it was taken back and is all there."""
        can_be_again = self.again and all(map(self.is_complete, self.again[-1]))
        made: Round | None = self.ledger.lease_shared(
            "train", self.round + further, self.num_ranks, 1, "trainer", self.now
        )
        if made is None:
            assert not can_be_again
            return None
        groups = self.groups_of(made)
        if can_be_again:
            assert groups == self.again.pop()
        else:
            self.again.clear()
        return made

    def is_complete(self, group_id: int) -> bool:
        group = self.ledger.residents.groups.get(group_id)
        train = self.ledger.residents.stage("train")
        return group is not None and group.free[train.index] == group.live != 0

    def groups_of(self, made: Round) -> list[int]:
        return sorted({row // self.spec.group_size for part in made.parts for row in part})

    def was_trained(self, made: Round) -> None:
        self.batches.append(sorted(row for part in made.parts for row in part))
        self.trained += self.batches[-1]
        self.trained_groups += self.groups_of(made)
        self.round += 1

    @rule(
        stage=st.sampled_from(SHARED),
        max_units=st.integers(1, 4),
        owner=st.sampled_from("ab"),
        shuffled=st.randoms(use_true_random=False),
    )
    def share_a_round(self, stage: str, max_units: int, owner: str, shuffled: Random) -> None:
        """All ranks ask for it, the first forms it. Each writes its share later, or never, or dies."""
        number, had = self.shared[stage], self.ledger.residents.stage(stage).num_free
        requests = [max_units + rank for rank in range(self.num_ranks)]  # whoever comes first decides
        shuffled.shuffle(requests)
        made = [self.ledger.lease_shared(stage, number, self.num_ranks, units, owner, self.now) for units in requests]
        first = made[0]
        assert (first is None) == (not had)
        if first is None:
            return
        assert all(one is first for one in made), "ranks of one round got different ones"
        self.shared[stage] += 1
        lease = self.ledger.residents.leases.held[first.lease_id]
        self.lineage.read(lease, stage)
        shares = [self.ledger.rows_of_rank(first, rank) for rank in range(self.num_ranks)]
        assert sorted(row for share in shares for row in share) == self.ledger.rows_of(lease)
        assert all(share == sorted(share) for share in shares)
        if self.ledger.residents.stage(stage).unit == "group":
            owners = Counter(group for share in shares for group in {row // self.spec.group_size for row in share})
            assert set(owners.values()) == {1}, "two ranks got samples of one group"
        self.leases += [(lease, stage, share) for share in shares if share]
        self.rounds.append((first, shares))

    @precondition(lambda self: self.rounds)
    @rule(data=st.data())
    def ask_for_a_round_again(self, data: st.DataObject) -> None:
        """Every rank gets what is left of its share, or hears that the round is over."""
        made, shares = data.draw(st.sampled_from(self.rounds[-8:]))
        is_held = made.lease_id in self.ledger.residents.leases.held
        try:
            again = self.ledger.lease_shared(made.stage, made.number, self.num_ranks, 1, "c", self.now)
        except LeaseExpired:
            assert not is_held
            return
        assert again is made
        for rank, share in enumerate(shares):
            left = self.ledger.rows_of_rank(made, rank)
            assert set(left) <= set(share)
            assert is_held or not left
            undone = {row for row in share if self.is_undone(row, made.stage)}
            assert not is_held or undone - self.revoked.get(made.lease_id, set()) <= set(left)
        with pytest.raises(StoreError, match="split over"):
            self.ledger.lease_shared(made.stage, made.number, self.num_ranks + 1, 1, "c", self.now)

    @rule()
    def lose_an_update(self) -> None:
        made = self.form_batch()
        if made is not None:
            self.ledger.complete_shared(made.lease_id, 0) if self.num_ranks > 1 else None
            self.ledger.release(made.lease_id)
            self.again.append(self.groups_of(made))

    @rule(num_completed=st.integers(0, 3), is_ahead=st.booleans(), publishes=st.booleans())
    def replace_the_trainers(self, num_completed: int, is_ahead: bool, publishes: bool) -> None:
        """All ranks die when some have said that they have trained their share; maybe the first is at the next batch
        already."""
        made = self.form_batch()
        if made is None:
            assert self.ledger.settle("train") == self.round
            return
        for rank in range(min(num_completed, self.num_ranks)):
            self.ledger.complete_shared(made.lease_id, rank)
        if num_completed >= self.num_ranks:
            self.was_trained(made)
            assert self.ledger.settle("train") == self.round
            return
        following = self.form_batch(further=1) if is_ahead else None
        self.again += [self.groups_of(one) for one in (following, made) if one is not None]
        assert self.ledger.settle("train") == self.round
        assert self.ledger.settle("train") == self.round
        for lost in (made, following):
            if lost is not None:
                with pytest.raises(LeaseExpired):
                    self.ledger.complete_shared(lost.lease_id, 0)
        if publishes and self.served < self.round:
            self.publish()

    @rule(num_lost=st.integers(1, 3), shuffled=st.randoms(use_true_random=False))
    def replace_the_trainers_while_a_straggler_comes(self, num_lost: int, shuffled: Random) -> None:
        """The batches that were lost had overtaken it: they come again as they were."""
        self.admit(100)
        self.lease("rollout", 1, "a")
        self.work_everything_off()
        lost = list(itertools.takewhile(bool, (self.form_batch(further) for further in range(num_lost))))
        self.again += [self.groups_of(made) for made in reversed(lost) if made is not None]
        assert self.ledger.settle("train") == self.round
        self.die("a")
        self.work_everything_off()
        for _ in lost:
            self.train(shuffled)

    @rule(stage=st.sampled_from(SHARED))
    def replace_the_scorers(self, stage: str) -> None:
        """Whatever their ranks held goes back; those that follow begin with a round that nobody has asked for."""
        number = self.ledger.settle(stage)
        assert number in (self.shared[stage], 0)  # a restored store has heard of none
        assert self.ledger.settle(stage) == number
        self.shared[stage] = number
        held = self.ledger.residents.leases.held
        assert not any(made.lease_id in held for made, _ in self.rounds if made.stage == stage)
        if number:  # a late rank of theirs hears that its round is over, or that nothing is left to do in it
            with suppress(LeaseExpired):
                made = self.ledger.lease_shared(stage, number - 1, self.num_ranks, 1, "c", self.now)
                assert not any(self.ledger.rows_of_rank(made, rank) for rank in range(self.num_ranks))

    def know_the_median(self) -> None:
        for _ in range(ENOUGH):
            self.ledger.residents.stragglers.record_time(MEDIAN_S)

    def any_node(self) -> int:
        return self.nodes.randrange(NODES)

    @rule()
    def restart(self) -> None:
        """Restart from a snapshot taken now. Leases of before come back as late writers."""
        self.restore(*self.state())

    @rule()
    def take_a_snapshot(self) -> None:
        self.snapshot = (*self.state(), self.round, dict(self.sampled), deepcopy(self.lineage))
        self.cuts.append((LedgerCut(self.ledger.residents), self.snapshot[1]))

    @precondition(lambda self: self.cuts)
    @rule(count=st.integers(1, 3), data=st.data())
    def copy_some_of_a_cut(self, count: int, data: st.DataObject) -> None:
        """What has been copied when all is, is what was there at its moment, whatever has happened since."""
        cut, expected = data.draw(st.sampled_from(self.cuts))
        if not cut.copy(count):
            self.cuts.remove((cut, expected))
            assert self.values_of(cut.groups) == expected
            assert len(self.ledger.residents.watchers) <= len(self.cuts)

    @precondition(lambda self: self.snapshot)
    @rule(num_late=st.integers(0, 2), count=st.integers(0, 3))
    def replace_the_store(self, num_late: int, count: int) -> None:
        """Replace the store by one that has the newest snapshot and hears what was trained since, of some steps when
        work has begun. It knows nobody's lease."""
        assert self.snapshot is not None
        values, groups, step, sampled, lineage = self.snapshot
        self.sampled, self.lineage = dict(sampled), deepcopy(lineage)
        self.leases.clear()
        self.restore(values, groups)
        steps = self.batches[step:]
        late = steps[max(0, len(steps) - num_late) :]
        self.ledger.catch_up(steps[: len(steps) - len(late)], min(self.served, self.round - len(late)))
        if late:
            self.lineage.prune(self.ledger)
            self.admit(count)
            self.lease("rollout", 2, "a")
            self.work_off(WORKED[:2])
        self.ledger.catch_up(late, self.served)
        assert self.ledger.settle("train") == self.round
        self.lineage.prune(self.ledger)

    def state(self) -> tuple[Any, Any]:
        values = json.loads(json.dumps(scalars(self.ledger)))
        return values, self.values_of(living_groups(self.ledger))

    def values_of(self, groups: list[Group]) -> list[dict[str, Any]]:
        return deepcopy([values_of(group, self.spec.group_size) for group in groups])

    def finish_cuts(self) -> None:
        for cut, expected in self.cuts:
            while cut.copy(1):
                pass
            assert self.values_of(cut.groups) == expected
        self.cuts.clear()

    def restore(self, values: Any, groups: Any) -> None:
        self.finish_cuts()
        self.ledger = self.driver.ledger = CheckedLedger(self.spec)
        self.know_the_median()
        restore(self.ledger, values, groups)
        self.rounds.clear()
        self.again.clear()
        self.lineage.prune(self.ledger)

    @precondition(lambda self: self.served < self.round)
    @rule()
    def publish(self) -> None:
        self.served += 1
        self.ledger.served(self.served)

    @invariant()
    def the_ledger_agrees_with_itself(self) -> None:
        if hasattr(self, "ledger"):
            check_invariants(self.ledger)

    @invariant()
    def rows_are_trained_once_and_groups_in_order(self) -> None:
        if not hasattr(self, "ledger"):
            return
        yet_to_come = sum(mask.bit_count() for mask, _ in self.ledger.residents.past.values())
        assert len(set(self.trained)) == len(self.trained) == self.ledger.counters["rows_trained"] + yet_to_come
        assert self.ledger.counters["dropped/stale"] == 0
        for position, group in enumerate(self.trained_groups):
            overtaken_by = [later for later in self.trained_groups[:position] if later > group]
            assert len(overtaken_by) <= self.spec.window - 1

    def teardown(self) -> None:
        """Whatever has happened: once dead leases expire and workers work, training goes on, and every row ends."""
        if not hasattr(self, "ledger"):
            return
        self.now += 1000.0
        self.ledger.expire(self.now)
        self.finish_cuts()
        for _ in range(3):
            before = self.round
            while self.served < self.round:
                self.publish()
            self.admit(100)
            self.work_everything_off()
            self.train_in_order()
            assert self.round > before, "everything is ready, and no batch forms"
            check_invariants(self.ledger)

    def train_in_order(self) -> None:
        made = self.form_batch()
        if made is None:
            return
        self.lineage.check(self.ledger, [row for part in made.parts for row in part])
        for rank in range(self.num_ranks):
            self.ledger.complete_shared(made.lease_id, rank)
        self.round += 1
