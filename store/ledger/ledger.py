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
- results of a row enter once, from whichever worker; a writer whose lease is over is told unless they are there;
- values that are lost are made again, with everything that was computed from them (see `lost_values.py`).
"""

from collections.abc import Sequence
from functools import partial

from penstock.store.errors import DuplicateRow, LeaseExpired, RowNotLeased, RowsLost, StoreError, UnknownStage
from penstock.store.ledger.admission import check_group_bytes
from penstock.store.ledger.catching_up import catch_up, end
from penstock.store.ledger.effects import Effects
from penstock.store.ledger.facts import Facts, check_facts, columns_written, note_facts
from penstock.store.ledger.group import Group, masks_of, num_rows, row_ids, spans_of
from penstock.store.ledger.leases import HeldLease
from penstock.store.ledger.lost_values import Cells, lose
from penstock.store.ledger.readiness import StageQueue
from penstock.store.ledger.residents import Residents
from penstock.store.ledger.rounds import Round, Rounds
from penstock.store.spec import StoreSpec


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
        self.residents.readiness.elapse(now)
        check_group_bytes(self.spec.max_bytes, [nbytes])
        residents, effects = self.residents, Effects()
        reason = residents.credits.refusal(nbytes, len(residents.waiting))
        if reason:
            self.counters[f"producer_waits/{reason}"] += 1
            return None, effects
        self.counters["groups_admitted"] += 1
        group = residents.admit(nbytes, prompt_tokens, response_tokens, effects)
        if group.id in residents.past:
            end(residents, group, *residents.past.pop(group.id), effects)
        return group.id, effects

    def lease(self, stage: str, max_units: int, owner: str, now: float) -> HeldLease | None:
        """Lease up to `max_units` free units of a stage, oldest groups first; None if there is none. Frees nothing and
        wakes no caller. Raises `UnknownStage`."""
        self.residents.readiness.elapse(now)
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
        `stragglers.py`."""
        self.residents.readiness.elapse(now)
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
        """Note that `columns` of `rows` are there. A row completes the stage once all of the stage's columns are.

        Returns the positions in `rows` whose values are to be kept; the others were there before, or the row has ended.
        Renews the lease. Raises `LeaseExpired` if it is over and some row is not done, `LeaseSuperseded`,
        `RowNotLeased`, `UnknownRow`, `UnknownColumn`, `UnknownStage`, `DuplicateRow`, `TooLarge`, `WrongLength`.
        """
        residents = self.residents
        residents.readiness.elapse(now)
        producer = residents.stage(stage)
        written = columns_written(residents, producer, columns)
        spans = spans_of(rows, residents.size)
        masks = residents.masks(spans)
        if num_rows(masks) != len(rows):
            raise DuplicateRow(
                f"stage {stage!r}: a row comes twice in one write of {len(rows)} rows. Write each row once."
            )
        effects = Effects()
        lease = self._held(lease_id, producer, masks)
        if residents.stragglers.any_superseded:
            residents.check_not_superseded(lease_id, masks, facts.response_tokens)
        if lease is None:
            return [], effects
        check_facts(residents, rows, spans, written, facts)
        fresh = masks
        if masks != lease.open:
            awaited = {group: mask & lease.open.get(group, 0) for group, mask in masks.items()}
            fresh = {group: mask for group, mask in awaited.items() if mask}
            self.counters["ignored/not_awaited"] += len(rows) - num_rows(fresh)
        if residents.watchers:
            for group_id in fresh:
                residents.changing(residents.groups[group_id])
        kept = note_facts(residents, producer, spans, fresh, written, facts)
        residents.leases.extend(lease, now + self.spec.lease_timeout_s)
        for group_id, mask in fresh.items():
            self._complete(lease, producer, residents.groups[group_id], mask, written, now, effects)
        return kept, effects

    def drop(self, lease_id: int, stage: str, rows: Sequence[int], reason: str) -> Effects:
        """End rows of a lease here; those that were revoked are another's. Raises as `write` does."""
        masks = self.residents.masks(spans_of(rows, self.residents.size))
        effects = Effects()
        lease = self._held(lease_id, self.residents.stage(stage), masks)
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
        self.residents.readiness.elapse(now)
        effects = Effects()
        late = self.residents.leases.overdue(now)
        for lease in late:
            self._release(lease, "expired", effects)
        return [lease.id for lease in late], effects

    def lost(self, cells: Cells, now: float) -> Effects:
        """Have the values of these cells made again, which are gone; see `lost_values.py`."""
        self.residents.readiness.elapse(now)
        effects = Effects()
        lose(self.residents, cells, effects)
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
        self.residents.readiness.elapse(now)
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
        """Take over rows that were trained elsewhere since the last step that is known, by step, and the newest
        version that every engine serves. See `catching_up.py`. Raises `StoreError`."""
        catch_up(self.residents, self.rounds, steps, effects := Effects(credits=True))
        self.served(version)
        return effects

    def has_formed(self, stage: str, number: int) -> bool:
        """Return whether some rank has been given its part of the round."""
        return self.rounds.has_formed(stage, number)

    def share(self, made: Round, rank: int) -> list[int]:
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

    def _held(self, lease_id: int, stage: StageQueue, masks: dict[int, int]) -> HeldLease | None:
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
