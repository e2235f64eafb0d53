"""Random histories: workers that lag, die, repeat themselves, drop rows and answer late; engines and ranks in any
order; nodes that are gone with the values that they had; the store restarted from a snapshot at any moment. `make soak`
takes fifty times as many.

After every event all of the ledger's state is recomputed and compared, and a model that only remembers what was told to
it checks the promises: trained exactly once, staleness bounded without a single eviction, order kept, no value joined
with one that was computed from another, nobody waits for ever.
"""

from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from penstock.store.errors import RowsLost
from penstock.store.ledger.group import row_ids
from penstock.store.ledger.leases import HeldLease
from tests.amounts import amount
from tests.store.driver import STAGES, facts_of
from tests.store.histories import NODES, WORKED, Histories

TRAINED = next(stage.reads for stage in STAGES if stage.unit == "batch")
STEPS = 20
"""Events of one history."""


class HistoriesWithLosses(Histories):
    """Nodes are lost at any moment, under leases and batches too."""

    @rule(node=st.integers(0, NODES - 1))
    def lose_a_node(self, node: int) -> None:
        """Everything that lies there is gone."""
        held = self.ledger.residents.leases.held
        before = {lease_id: set(self.open_rows(lease)) for lease_id, lease in held.items()}
        self.ledger.lost(self.lineage.cells_on(node), self.now)
        for lease_id, rows in before.items():
            left = set(self.open_rows(held[lease_id])) if lease_id in held else set()
            self.revoked.setdefault(lease_id, set()).update(rows - left)
        for lease in held.values():
            for group, mask in lease.revoked.items():
                self.revoked.setdefault(lease.id, set()).update(row_ids(group, mask, self.spec.group_size))
        for row, column in self.lineage.prune(self.ledger):
            if column == "token_versions":
                self.sampled.pop(row, None)

    @rule(
        node=st.integers(0, NODES - 1),
        stage=st.sampled_from(WORKED),
        max_units=st.integers(1, 4),
        goes_on=st.booleans(),
        data=st.data(),
    )
    def lose_a_node_under_a_lease(
        self, node: int, stage: str, max_units: int, goes_on: bool, data: st.DataObject
    ) -> None:
        """Who holds it says something of it afterwards, perhaps when others have made the rows again."""
        self.admit(2)
        self.work_off(WORKED[: WORKED.index(stage)])
        before = len(self.leases)
        self.lease(stage, max_units, "a")
        if len(self.leases) == before:
            return
        lease, stage, rows = self.leases[-1]
        half = self.driver.writes[stage][:1]
        kept = self.ledger.write(lease.id, stage, rows[:1], half, facts_of(half, 1, self.served), self.now)
        self.lineage.written(self.ledger, lease, [rows[position] for position in kept], half, self.any_node)
        self.lose_a_node(node)
        if goes_on:
            self.work_everything_off()
        live = self.ledger.residents.num_rows
        revoked = self.revoked.get(lease.id, set())
        if data.draw(st.booleans()):
            self.write(data, True)
        elif revoked and lease.id in self.ledger.residents.leases.held:
            self.ledger.drop(lease.id, stage, sorted(revoked), "reward_timeout")
            assert self.ledger.residents.num_rows == live, "what was revoked was dropped by who had it"

    def open_rows(self, lease: HeldLease) -> list[int]:
        return [row for group, mask in lease.open.items() for row in row_ids(group, mask, self.spec.group_size)]

    @rule(
        node=st.integers(0, NODES - 1),
        num_given=st.integers(1, 3),
        ending=st.sampled_from(["trained", "released", "restarted"]),
        shuffled=st.randoms(use_true_random=False),
    )
    def lose_a_node_during_an_update(self, node: int, num_given: int, ending: str, shuffled: Random) -> None:
        """Some ranks have their rows before, the others ask after. If they all have them, the step may end well."""
        made = self.form_batch()
        if made is None:
            return
        versions = {row: self.sampled[row] for part in made.parts for row in part}
        self.lineage.check(self.ledger, list(versions))
        ranks = list(range(self.num_ranks))
        shuffled.shuffle(ranks)
        given, late = ranks[:num_given], ranks[num_given:]
        for rank in given:
            assert self.ledger.rows_of_rank(made, rank) == made.parts[rank]
        self.lose_a_node(node)
        before = {cell: serial for cell, serial in self.lineage.values.items() if cell[0] in versions}
        self.work_everything_off()
        after = {cell: serial for cell, serial in self.lineage.values.items() if cell[0] in versions}
        assert before == after, "what may be trained is made again"
        for rank in late:
            was_there = all((row, name) in self.lineage.values for row in made.parts[rank] for name in TRAINED)
            try:
                assert self.ledger.rows_of_rank(made, rank) == made.parts[rank]
            except RowsLost:
                assert not was_there
                ending = "released" if ending == "trained" else ending
            else:
                assert was_there
        if ending == "trained":
            for rank in ranks:
                self.ledger.complete_shared(made.lease_id, rank)
            assert all(made.version - version <= self.spec.max_staleness for version in versions.values())
            self.was_trained(made)
            assert set(self.ledger.last_batch()) <= versions.keys()
        elif ending == "released":
            self.ledger.release(made.lease_id)
            self.again.append(self.groups_of(made))
        else:
            self.restart()


TestHistories = HistoriesWithLosses.TestCase
TestHistories.settings = settings(
    max_examples=amount(400, many=1_000_000 // STEPS),
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
