"""The ledger: the store's decisions as a pure state machine. Events in, decisions and effects out; time is an argument.

    admit ─▶ lease(stage) ─▶ write ─▶ … ─▶ lease_shared(train) ─▶ complete_shared ─▶ served
                 │  ▲          │
     expire, release, lost     └▶ drop

`service/store.py` is its only caller in a run; property tests drive it through random histories. No Ray, no clock, no
I/O. Every call either raises and changes nothing, or succeeds, and says by its `Effects` what is to be freed and which
callers to wake. Costs do not depend on how many rows are resident.

Guarantees:
- a row is trained at most once, and every row ends trained or dropped with a counted reason;
- no token of a trained row is more than `max_staleness` versions old (see `admission.py` for the proof);
- groups are trained in the order of admission, except that `window - 1` later ones may overtake a straggler;
- results of a row enter once, from any worker; a writer whose lease is over gets an error unless the row has them;
- values that are lost are made again, with everything that was computed from them (see `lost_values.py`).

A store that continues from a snapshot in another one's place catches up with what was trained since:

    snapshot ── steps s + 1 … n were trained ──▶ the store dies        restore(snapshot) ─▶ catch_up(steps s + 1 … n)

A row that was trained ends, as if it had been trained here. Any other is processed again: it is as it was when the
snapshot was taken, or is admitted again under its number, and sampled with its seed. Groups are trained in order, so
one that was passed by more than the window allows had been dropped: it ends as `dropped/store_lost`, since its reason
is lost too. With a window of more than one group, such a group near the end may be made again.
"""

from collections.abc import Sequence
from functools import partial

from penstock.conf.errors import suggest
from penstock.store.errors import (
    DuplicateRow,
    LeaseExpired,
    RowNotLeased,
    RowsLost,
    StoreError,
    TooLarge,
    UnknownColumn,
    UnknownStage,
    WrongLength,
)
from penstock.store.ledger.admission import check_group_bytes
from penstock.store.ledger.group import (
    Facts,
    Group,
    Span,
    bits,
    mask_of,
    masks_of,
    num_rows,
    row_ids,
    spans_of,
    untouched,
)
from penstock.store.ledger.leases import HeldLease
from penstock.store.ledger.lost_values import LostCells, lose_cells
from penstock.store.ledger.readiness import StageQueue
from penstock.store.ledger.residents import Effects, Residents
from penstock.store.ledger.rounds import Round, Rounds
from penstock.store.spec import StoreSpec

STORE_LOST = "store_lost"
"""The reason of rows that ended in a store that is gone."""


class Ledger:
    """All control state of one store, driven by events.

        ledger = Ledger(spec)
        group, effects = ledger.admit(0.0, nbytes=100)  # None: no credit, wait
        lease = ledger.lease("rollout", 1, "engine-0", now=0.0)
        rows = ledger.rows_of(lease)
        kept, effects = ledger.write(lease.id, "rollout", rows, ["response_ids", ...], Facts(...), now=1.0)
        batch, effects = ledger.lease_shared("train", 0, num_ranks=1, max_units=0, owner="trainer", now=2.0)
        effects = ledger.complete_shared(batch.lease_id, rank=0)
        effects = ledger.served(1)

    `now` is in seconds on any clock that does not go back.
    """

    def __init__(self, spec: StoreSpec) -> None:
        self.spec = spec
        self.residents = Residents(spec)
        self.rounds = Rounds(self.residents)
        self.counters = self.residents.counters

    def admit(
        self, now: float, nbytes: int = 0, prompt_tokens: int = 0, response_tokens: int = 0
    ) -> tuple[int | None, Effects]:
        """Admit a group, whose source columns are all there. Returns its number; None if it must wait. Raises
        `TooLarge`."""
        self.residents.readiness.advance_clock(now)
        check_group_bytes(self.spec.max_bytes, [nbytes])
        residents, effects = self.residents, Effects()
        reason = residents.credits.refusal(nbytes, len(residents.waiting))
        if reason:
            self.counters[f"producer_waits/{reason}"] += 1
            return None, effects
        self.counters["groups_admitted"] += 1
        group = residents.admit(nbytes, prompt_tokens, response_tokens, effects)
        if group.id in residents.past:
            self._end_trained(group, *residents.past.pop(group.id), effects)
        return group.id, effects

    def lease(self, stage: str, max_units: int, owner: str, now: float) -> HeldLease | None:
        """Lease up to `max_units` free units of a stage, oldest groups first; None if there is none. Frees nothing and
        wakes no caller. Raises `UnknownStage`."""
        self.residents.readiness.advance_clock(now)
        consumer = self.residents.stage(stage)
        if consumer.unit == "batch":
            raise UnknownStage(f"stage {stage!r} takes whole batches: use lease_shared.")
        if max_units < 1:
            raise StoreError(f"lease of stage {stage!r}: max_units={max_units} must be at least 1.")
        if not consumer.num_free:
            return None
        lease = self.residents.leases.open(consumer.index, owner, now + self.spec.lease_timeout_s)
        self.residents.readiness.take(consumer, max_units, partial(self.residents.hold, lease))
        self.residents.stragglers.began(lease, now)
        self.counters[f"leases/{stage}"] += 1
        return lease

    def offer(self, owner: str, now: float) -> HeldLease | None:
        """Lease a group that another owner has had for too long to this one too, if there is one. See
        `Stragglers`."""
        self.residents.readiness.advance_clock(now)
        return self.residents.hold_second(owner, now)

    def rows_of(self, lease: HeldLease) -> list[int]:
        """Ids of the rows that a lease hands out, by group and then by sample."""
        size, rows = self.residents.size, list[int]()
        for group, mask in lease.granted.items():
            rows += row_ids(group, mask, size)
        return rows

    def write(
        self, lease_id: int, stage: str, rows: Sequence[int], columns: Sequence[str], facts: Facts, now: float
    ) -> tuple[list[int], Effects]:
        """Note that `columns` of `rows` are written. A row completes the stage once it has all of the stage's columns.

        Returns the positions in `rows` whose values are to be kept; other rows had theirs before, or have ended.
        Renews the lease. Raises `LeaseExpired` if it is over and some row is not done, `LeaseSuperseded`,
        `RowNotLeased`, `UnknownRow`, `UnknownColumn`, `UnknownStage`, `DuplicateRow`, `TooLarge`, `WrongLength`.
        """
        residents = self.residents
        residents.readiness.advance_clock(now)
        producer = residents.stage(stage)
        written = self._columns_written(producer, columns)
        spans = spans_of(rows, residents.size)
        masks = residents.masks(spans)
        if num_rows(masks) != len(rows):
            raise DuplicateRow(
                f"stage {stage!r}: a row comes twice in one write of {len(rows)} rows. Write each row once."
            )
        effects = Effects()
        lease = self._lease_of_rows(lease_id, producer, masks)
        if residents.stragglers.superseded:
            residents.check_not_superseded(lease_id, masks, facts.response_tokens)
        if lease is None:
            return [], effects
        self._check_facts(rows, spans, written, facts)
        fresh = masks
        if masks != lease.open:
            awaited = {group: mask & lease.open.get(group, 0) for group, mask in masks.items()}
            fresh = {group: mask for group, mask in awaited.items() if mask}
            self.counters["ignored/not_awaited"] += len(rows) - num_rows(fresh)
        if residents.watchers:
            for group_id in fresh:
                residents.before_change(residents.groups[group_id])
        kept = self._note_facts(producer, spans, fresh, written, facts)
        residents.leases.extend(lease, now + self.spec.lease_timeout_s)
        for group_id, mask in fresh.items():
            self._complete(lease, producer, residents.groups[group_id], mask, written, now, effects)
        return kept, effects

    def drop(self, lease_id: int, stage: str, rows: Sequence[int], reason: str) -> Effects:
        """End rows of a lease here; those that were revoked are another's. Raises as `write` does."""
        masks = self.residents.masks(spans_of(rows, self.residents.size))
        effects = Effects()
        lease = self._lease_of_rows(lease_id, self.residents.stage(stage), masks)
        if lease is None:
            return effects
        for group_id, mask in masks.items():
            group = self.residents.groups.get(group_id)
            if group is not None:
                self.residents.drop(group, mask & ~lease.revoked.get(group_id, 0), reason, effects)
        return effects

    def renew(self, lease_id: int, now: float) -> None:
        """Restart the lease's time. Raises `LeaseExpired`."""
        lease = self.residents.leases.held.get(lease_id)
        if lease is None:
            raise LeaseExpired(f"lease {lease_id} is over: it was completed, released or not renewed in time.")
        self.residents.leases.extend(lease, now + self.spec.lease_timeout_s)

    def release(self, lease_id: int) -> Effects:
        """Give the open rows back. For a train lease: its step was lost, and the batch is formed again."""
        effects = Effects()
        lease = self.residents.leases.held.get(lease_id)
        if lease is not None:
            self._give_back(lease, effects)
        return effects

    def abandon(self, owner: str) -> tuple[int, Effects]:
        """Give back every lease of an owner that is gone, the batch being trained excepted. Returns how many they
        were."""
        lost = [
            lease
            for lease in self.residents.leases.held.values()
            if lease.owner == owner and lease.deadline is not None
        ]
        effects = Effects()
        for lease in lost:
            self._release(lease, "abandoned", effects)
        return len(lost), effects

    def expire(self, now: float) -> tuple[list[int], Effects]:
        """Give back the open rows of every lease whose deadline has come. Returns the leases' ids."""
        self.residents.readiness.advance_clock(now)
        effects = Effects()
        late = self.residents.leases.overdue(now)
        for lease in late:
            self._release(lease, "expired", effects)
        return [lease.id for lease in late], effects

    def lost(self, cells: LostCells, now: float) -> Effects:
        """Have the values of these cells made again, which are gone; see `lost_values.py`."""
        self.residents.readiness.advance_clock(now)
        effects = Effects()
        lose_cells(self.residents, cells, effects)
        return effects

    def next_deadline(self) -> float | None:
        return self.residents.leases.next_deadline()

    def lease_shared(
        self, stage: str, number: int, num_ranks: int, max_units: int, owner: str, now: float
    ) -> tuple[Round | None, Effects]:
        """Return the round of that number, formed now if it can be; None if its units are not ready. The same for every
        rank.

        The train stage takes exactly `groups_per_step` groups and ignores `max_units`. Raises `LeaseExpired`,
        `StalenessViolation`.
        """
        self.residents.readiness.advance_clock(now)
        consumer = self.residents.stage(stage)
        if num_ranks < 1 or (max_units < 1 and consumer.unit != "batch"):
            raise StoreError(f"stage {stage!r}: num_ranks={num_ranks} and max_units={max_units} must be at least 1.")
        effects = Effects()
        known = self.rounds.find(consumer, number, num_ranks)
        if known is not None:
            return known, effects
        deadline = now + self.spec.lease_timeout_s
        return self.rounds.form(consumer, number, num_ranks, max_units, owner, deadline, effects), effects

    def settle(self, stage: str) -> tuple[int, Effects]:
        """Give back a stage's rounds under way, whose ranks are all gone. Returns the number of the next one, with
        which the new ranks begin; for the train stage that is how many steps were trained."""
        consumer, effects = self.residents.stage(stage), Effects()
        for made in self.rounds.under_way(consumer):
            self._give_back(self.residents.leases.held[made.lease_id], effects)
        return self.rounds.next_number(consumer), effects

    def catch_up(self, steps: Sequence[Sequence[int]], version: int) -> Effects:
        """Take over what was trained elsewhere. `steps`: row ids that were trained in each step after the last that is
        known, in order; a step that is under way meanwhile may be reported later, before the next batch is formed.
        `version`: the newest that every engine serves. Raises `StoreError` while a batch is under way."""
        residents, rounds, effects = self.residents, self.rounds, Effects(credits=True)
        if steps and any(not (made.ended or made.void) for made in rounds.batches()):
            raise StoreError(
                f"the batch of step {rounds.formed} is under way: steps that were trained elsewhere come first."
            )
        if residents.train is not None and steps:
            effects.rounds |= 1 << residents.train.index
        ended: dict[int, tuple[int, int]] = {}
        for rows in steps:
            rounds.formed += 1
            for group, mask in masks_of(spans_of(rows, residents.size)).items():
                ended[group] = mask, rounds.formed
            self.counters["batches_formed"] += 1
            self.counters["batches_trained"] += 1
        for group in self._passed_by(sorted(ended)):
            if group not in residents.past:
                ended[group] = 0, rounds.formed
        for number in sorted(ended):
            if number in residents.groups:
                self._end_trained(residents.groups[number], *ended[number], effects)
            elif number >= residents.next_group:
                residents.past[number] = ended[number]
        self.served(version)
        return effects

    def rows_of_rank(self, made: Round, rank: int) -> list[int]:
        """Return the rows of a round that `rank` still has to compute, ascending. Raises `StoreError` for an unknown
        rank, and `RowsLost` if its part of a batch can be had no more."""
        if not 0 <= rank < len(made.parts):
            raise StoreError(
                f"rank {rank} is none of the {len(made.parts)} ranks of round {made.number} of stage {made.stage!r}."
            )
        lease = self.residents.leases.held.get(made.lease_id)
        if lease is None:
            return []
        size, groups = self.residents.size, self.residents.groups
        shown, stage = lease.open, self.residents.stage(made.stage)
        if stage.sees_siblings:
            shown = {group: lease.granted[group] & groups[group].live for group in lease.open}
        part = {group: mask & shown.get(group, 0) for group, mask in masks_of(spans_of(made.parts[rank], size)).items()}
        rows = [row for group, mask in part.items() for row in row_ids(group, mask, size)]
        lost = num_rows({group: mask & groups[group].lost for group, mask in part.items() if mask})
        if lost and stage.unit == "batch":
            raise RowsLost(
                f"{lost} of the {len(rows)} rows of rank {rank} in round {made.number} of stage {made.stage!r} were on "
                "a node that is gone. Release the round: it is formed again once they have been made again."
            )
        return rows

    def last_batch(self) -> list[int]:
        """Return the rows of the batch trained last, ascending, without those that have lost values."""
        return [row for row in self.rounds.last_batch if not self.residents.is_lost(row)]

    def complete_shared(self, lease_id: int, rank: int) -> Effects:
        """Note that `rank` has trained its share of the batch; after the last rank its rows have ended. Raises
        `LeaseExpired`."""
        effects = Effects()
        self.rounds.complete(lease_id, rank, effects)
        return effects

    def served(self, version: int, max_active: int | None = None) -> Effects:
        """Note that version `version` of the policy serves everywhere: groups trained by steps up to it return their
        credits. `max_active`: see `Credits.served`."""
        if version > self.rounds.formed:
            raise StoreError(
                f"served({version}): only {self.rounds.formed} batches were formed, so the newest version can be "
                f"{self.rounds.formed}. Versions count steps, from 0."
            )
        self.residents.credits.served(version, max_active)
        return Effects(credits=True)

    def _lease_of_rows(self, lease_id: int, stage: StageQueue, masks: dict[int, int]) -> HeldLease | None:
        """Find the lease, which must hold the rows; None if it is over and there is nothing left to do for any of
        them."""
        lease = self.residents.leases.held.get(lease_id)
        size = self.residents.size
        if lease is not None:
            if lease.stage != stage.index:
                held = self.residents.readiness.stages[lease.stage].name
                raise UnknownStage(f"lease {lease_id} is of stage {held!r}, not {stage.name!r}.")
            for group_id, mask in masks.items() if masks != lease.granted else ():
                if foreign := mask & ~lease.granted.get(group_id, 0):
                    row = row_ids(group_id, foreign, size)[0]
                    raise RowNotLeased(
                        f"stage {stage.name!r}: lease {lease_id} does not hold row {row}. Write the rows that it has."
                    )
            return lease
        for group_id, mask in masks.items():
            group = self.residents.groups.get(group_id)
            if group is not None and (undone := mask & group.live & ~group.done[stage.index]):
                self.counters["refused/lease_expired"] += 1
                raise LeaseExpired(
                    f"stage {stage.name!r}, row {row_ids(group_id, undone, size)[0]}: lease {lease_id} is over, and "
                    "the row goes to another. "
                    "Throw the result away; renew the lease or raise store.lease_timeout_s if the work takes that long."
                )
        self.counters["ignored/late"] += num_rows(masks)
        return None

    def _complete(
        self,
        lease: HeldLease,
        stage: StageQueue,
        group: Group,
        mask: int,
        written: Sequence[int],
        now: float,
        effects: Effects,
    ) -> None:
        residents, have = self.residents, group.have
        for column in written:
            have[column] |= mask
        if residents.stragglers.holders:
            residents.supersede_others(lease, group, mask, effects)
        finished = mask
        for column in stage.writes:
            finished &= have[column]
        if finished:
            group.done[stage.index] |= finished
            num_finished = finished.bit_count()
            stage.done_rows += num_finished
            self.counters[f"completed/{stage.name}"] += num_finished
            if residents.stragglers.holders and finished == lease.open[group.id]:
                residents.stragglers.completed(lease, group.id, now)
            residents.unhold(lease, group, finished, effects)
        effects.stages |= residents.readiness.refresh_all(group, stage.readers)

    def _give_back(self, lease: HeldLease, effects: Effects) -> None:
        made = self.rounds.by_lease.get(lease.id)
        if made is not None and made.stage == getattr(self.residents.train, "name", None):
            self.rounds.take_back(made, effects)
            self.counters["batches_released"] += 1
            return
        self._release(lease, "released", effects)

    def _release(self, lease: HeldLease, reason: str, effects: Effects) -> None:
        self.rounds.void(lease.id, effects)
        stage = self.residents.readiness.stages[lease.stage].name
        self.counters[f"{reason}/{stage}"] += self.residents.release(lease, effects)

    def _columns_written(self, stage: StageQueue, columns: Sequence[str]) -> Sequence[int]:
        """Numbers of the columns of a write. Raises `UnknownColumn` for those that the stage does not write."""
        if tuple(columns) == stage.spec.writes:
            return stage.writes
        index = self.residents.readiness.column_index
        for name in columns:
            if name not in index:
                raise UnknownColumn(
                    f"stage {stage.name!r} writes column {name!r}, which the dataflow lacks{suggest(name, index)}"
                )
            if index[name] not in stage.writes:
                raise UnknownColumn(
                    f"stage {stage.name!r} may not write column {name!r}; it writes "
                    f"{', '.join(stage.spec.writes) or 'none'}. Declare the column in the stage's writes."
                )
        return [index[name] for name in columns]

    def _check_facts(self, rows: Sequence[int], spans: Sequence[Span], written: Sequence[int], facts: Facts) -> None:
        """Check the facts of a write. `spans`: of the rows. Raises `TooLarge`, `WrongLength`."""
        residents = self.residents
        if (largest := max(facts.row_bytes, default=0)) > self.spec.max_bytes:
            row = rows[facts.row_bytes.index(largest)]
            raise TooLarge(
                f"row {row} has {largest} bytes, more than store.max_bytes={self.spec.max_bytes}. Raise "
                "store.max_bytes."
            )
        decider = residents.readiness.column_index.get("response_ids")
        if facts.token_lengths is None or decider is None or decider in written:
            return
        for group_id, position, indices in spans:
            group = residents.groups.get(group_id)
            lengths = facts.token_lengths[position : position + len(indices)]
            if group is None or lengths == group.response_tokens[indices.start : indices.stop]:
                continue
            for index, length in zip(indices, lengths, strict=True):
                if group.have[decider] >> index & 1 and length != group.response_tokens[index]:
                    raise WrongLength(
                        f"column {facts.token_column!r}, row {group_id * residents.size + index}: {length} entries, "
                        f"but the response has {group.response_tokens[index]} tokens. Every token column has one entry "
                        "for each response token."
                    )

    def _note_facts(
        self, stage: StageQueue, spans: Sequence[Span], fresh: dict[int, int], written: Sequence[int], facts: Facts
    ) -> list[int]:
        """Keep the facts of the fresh rows. Returns their positions. `spans`: of all rows of the write."""
        residents = self.residents
        kept: list[int] = []
        for group_id, position, indices in spans:
            mask = mask_of(indices)
            new = fresh.get(group_id, 0) & mask
            if not new:
                continue
            group = residents.groups[group_id]
            if new == mask == untouched(group, mask, stage.writes):
                residents.note_facts(stage, group, indices, position, facts)
                kept.extend(range(position, position + len(indices)))
                continue
            present = mask
            for column in written:
                present &= group.have[column]
            for index in bits(new & ~present):
                at = position + index - indices.start
                # Facts are about a column, and are news for a row that does not have it yet.
                news = [self._lacks(group, index, name) for name in ("token_versions", "response_ids")]
                residents.note_facts(stage, group, range(index, index + 1), at, facts, *news)
                kept.append(at)
        return kept

    def _lacks(self, group: Group, index: int, name: str) -> bool:
        column = self.residents.readiness.column_index.get(name)
        return column is not None and not group.have[column] >> index & 1

    def _end_trained(self, group: Group, trained: int, version: int, effects: Effects) -> None:
        """End a group of which the rows `trained` were trained elsewhere, by the step that made `version`; its other
        rows had been dropped."""
        residents = self.residents
        residents.drop(group, group.live & ~trained, STORE_LOST, effects)
        if not group.live:
            return
        residents.waiting.discard(group.id)
        residents.end_trained(group, effects)
        residents.credits.trained(version, 1)
        residents.forget(group, effects)

    def _passed_by(self, trained: Sequence[int]) -> list[int]:
        """Groups that were not trained elsewhere, while `window` or more groups after them were. `trained`: numbers,
        ascending."""
        residents = self.residents
        if len(trained) < self.spec.window:
            return []
        last = trained[-self.spec.window]
        """The first group that may wait: no group before it does."""
        known = set(trained)
        numbers = (*sorted(residents.waiting), *range(residents.next_group, last))
        return [group for group in numbers if group < last and group not in known]
