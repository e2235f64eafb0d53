"""The work of a rank on the store: a trainer one step a call, a scorer whatever rows are ready until it closes.

    TrainerWorker.step(k):  round k - 1 of "train" ─▶ trainer.update ─▶ checkpoint(k) ─▶ StepReport
                                                      of each policy, on its own rows
    ScorerWorker.run():     one round of the stage after the other ─▶ trainer.logprobs ─▶ write

The store's n-th round of a stage is the n-th lease that all ranks share: all make the same calls with the same numbers,
and each gets its share of the rows. Ranks that split the work on the same rows ask for the same share, and one of them
answers for it.

Every rank has its share of a round, or none computes it: a rank that computed alone would wait for the others in a
collective. So ranks exchange the outcomes of their requests before anything is computed (`SharedRounds`): a store that
is gone, or rows on a node that does not answer.

Legend: _N rows (samples) of this rank.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import numpy as np

from penstock.algorithms.graph.columns import POLICY
from penstock.algorithms.graph.stage import TrainedPolicy
from penstock.conf.errors import LeaseExpired, PartnerGone, PenstockError
from penstock.store.client.lease import SharedLease
from penstock.store.client.sync import SyncStoreClient
from penstock.store.data.rows import Rows
from penstock.store.errors import RowsLost, RowsUnreachable
from penstock.workers.probing import ProbeRow
from penstock.workers.protocols import Trainer, UpdateReport
from penstock.workers.runtime.serving import COMPUTING, UPDATING, WAITING, Phases
from penstock.workers.trainer.preparation import Preparation
from penstock.workers.trainer.probe import ProbeRecorder
from penstock.workers.trainer.row_hashes import hash_of_norms, row_hashes
from penstock.workers.trainer.step_report import StepReport, TokenValues, TrainedRows
from penstock.workers.trainer.token_recorder import TokenRecorder, with_places
from penstock.workers.trainer.update.minibatches import share_of_rank

PAUSE_S = 1.0
"""Seconds before a round is asked for again whose rows lie on a node that does not answer."""


class RoundState(Enum):
    """State of a round, as a rank's request found it."""

    READY, CLOSED, OVER, UNREADABLE, FAILED = range(5)


class Peers(Protocol):
    """This rank among the ranks of its model: `ranks.Ranks`, or `Alone`."""

    @property
    def rank(self) -> int: ...
    @property
    def data_rank(self) -> int: ...
    @property
    def num_data_ranks(self) -> int: ...
    @property
    def reports_rows(self) -> bool: ...
    @property
    def computes_for_others(self) -> bool: ...
    def gather_block(self, value: Any) -> list[Any]: ...
    def gather_ranks(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Alone:
    """The only rank."""

    rank: int = 0
    data_rank: int = 0
    """Index of this rank's share of the rows; several ranks may have the same."""
    num_data_ranks: int = 1
    """Number of shares."""
    reports_rows: bool = True
    """False for a rank whose rows another rank reports."""
    computes_for_others: bool = False
    """True for a rank that may compute rows that only another rank reports."""

    def gather_block(self, value: Any) -> list[Any]:
        return [value]

    def gather_ranks(self, value: Any) -> list[Any]:
        return [value]


ALONE = Alone()


@dataclass(frozen=True)
class RoundOutcome:
    """The outcome of one rank's request."""

    state: RoundState
    error: str = ""
    number: int = 0
    gives_up: bool = False
    """True if the rank could not read its rows for so long that it gives up."""


class SharedRounds:
    """The rounds of one stage. Every method is collective: all ranks return alike, or all raise. A rank without an
    error of its own raises `PartnerGone`, which names the rank that has one."""

    def __init__(self, stage: str, peers: Peers, *, max_units: int = 0, moves_on: bool = False) -> None:
        """`moves_on`: a round that is over gives way to the next one."""
        self._stage = stage
        self._peers = peers
        self._max_units = max_units
        self._moves_on = moves_on

    def begin(self, store: SyncStoreClient) -> int:
        """Return the number of the first round. Rows under way, of ranks whose place these take, go back."""
        mine, failure = RoundOutcome(RoundState.READY), None
        try:
            if self._peers.rank == 0:
                mine = RoundOutcome(RoundState.READY, number=store.settle(self._stage))
        except PenstockError as error:
            mine, failure = RoundOutcome(RoundState.FAILED, str(error)), error
        return self._exchanged(mine, failure)[0].number

    def take(self, store: SyncStoreClient, number: int) -> SharedLease | None:
        """Return this rank's share of round `number`, or of a later one. Waits until it is formed; None when the store
        has closed. Rows that cannot be read go back and are asked for again, for as long as a lease lasts."""
        unreadable_since: float | None = None
        while True:
            lease: SharedLease | None = None
            failure: PenstockError | None = None
            try:
                lease = store.lease_shared(
                    self._stage, number, self._peers.data_rank, self._peers.num_data_ranks, self._max_units
                )
                mine = RoundOutcome(RoundState.CLOSED if lease is None else RoundState.READY)
            except (RowsUnreachable, RowsLost) as error:
                failure, unreadable_since = error, unreadable_since or time.monotonic()
                gives_up = time.monotonic() - unreadable_since > store.spec().lease_timeout_s
                mine = RoundOutcome(RoundState.UNREADABLE, str(error), gives_up=gives_up)
            except PenstockError as error:
                failure, is_over = error, isinstance(error, LeaseExpired) and self._moves_on
                mine = RoundOutcome(RoundState.OVER if is_over else RoundState.FAILED, str(error))
            outcomes = self._exchanged(mine, failure)
            states = {outcome.state for outcome in outcomes}
            if states == {RoundState.READY}:
                return lease
            if RoundState.UNREADABLE in states:
                time.sleep(PAUSE_S)
                number = self.begin(store)
            elif RoundState.OVER in states:
                number += 1
            else:
                return None

    def _exchanged(self, mine: RoundOutcome, failure: PenstockError | None) -> list[RoundOutcome]:
        """Outcomes of every rank. Raises if one of them has failed or gives up."""
        outcomes: list[RoundOutcome] = self._peers.gather_ranks(mine)
        for rank, outcome in enumerate(outcomes):
            if outcome.state == RoundState.FAILED or outcome.gives_up:
                if failure is not None:
                    raise failure
                raise PartnerGone(f"rank {rank} has no rows of stage {self._stage!r}: {outcome.error}")
        return outcomes


@dataclass(frozen=True)
class RowsUpdate:
    """An update, and what is known of its rows on this rank."""

    report: UpdateReport
    tokens: TokenValues | None = None
    """None: not noted."""
    probe: tuple[ProbeRow, ...] = ()

    @classmethod
    def of_ranks(cls, parts: Sequence["RowsUpdate"]) -> "RowsUpdate":
        """The update of one policy, of which each rank has its share of the rows."""
        tokens = [one.tokens for one in parts if one.tokens is not None]
        return replace(parts[0], tokens=TokenValues.joined(tokens) if tokens else None)

    @classmethod
    def joined(
        cls, parts: Mapping[str, "RowsUpdate"], num_left_out: Mapping[str, int], *, side_by_side: bool = False
    ) -> "RowsUpdate":
        """The updates of several policies, by name, one after the other or by ranks side by side. `num_left_out`: rows
        of each that were left out."""
        reports = {name: one.report for name, one in parts.items()}
        metrics = metrics_by_policy({name: one.metrics for name, one in reports.items()})
        metrics |= {f"{name}/rows_left_out": float(count) for name, count in num_left_out.items()}
        phases = dict.fromkeys(phase for one in reports.values() for phase in one.seconds)
        total = max if side_by_side else sum
        seconds = {phase: total(one.seconds.get(phase, 0.0) for one in reports.values()) for phase in phases}
        norms = [norm for one in reports.values() for norm in one.norms]
        tokens = [one.tokens for one in parts.values() if one.tokens is not None]
        probe = [replace(row, policy=name) for name, one in parts.items() for row in one.probe]
        return cls(
            UpdateReport(metrics, seconds=seconds, norms=tuple(norms)),
            TokenValues.joined(tokens) if tokens else None,
            tuple(probe),
        )


def metrics_by_policy(of_policies: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several policies' updates: `<policy>/kl` for `actor/kl`, `<policy>/mismatch/kl` for `mismatch/kl`, of
    which the largest keeps its name, too.

    >>> metrics_by_policy({"a": {"actor/kl": 1.0, "mismatch/kl": 2.0}, "b": {"mismatch/kl": 3.0}})
    {'a/kl': 1.0, 'a/mismatch/kl': 2.0, 'mismatch/kl': 3.0, 'b/mismatch/kl': 3.0}
    """
    found: dict[str, float] = {}
    for policy, metrics in of_policies.items():
        for name, value in metrics.items():
            found[f"{policy}/{name.removeprefix('actor/')}"] = value
            if not name.startswith("actor/"):
                found[name] = max(value, found.get(name, value))
    return found


class TrainerWorker:
    """Trains on the batches of a store, a batch in each `step`. Lifecycle: `attach`, then `step` any number of times;
    `attach` again to continue with another store."""

    def __init__(
        self,
        trainer: Trainer,
        policies: Sequence[TrainedPolicy],
        ranks: Peers = ALONE,
        *,
        preparation: Preparation | None = None,
        checkpoint: Callable[[int], str | None] | None = None,
        phases: Phases | None = None,
        without_old: Callable[[Rows, int], Rows] | None = None,
        note: Callable[[StepReport, Rows], None] | None = None,
    ) -> None:
        """`policies`: that are trained, each with its loss. `preparation`: of the batch before the update; None for
        none. `checkpoint`: copies the state after a step into memory, and says why if it does so no more
        (`MemoryCheckpoint.save`); None for no copies, or where they are made beside the next step. `phases`: where it
        notes what it does. `without_old`: returns rows without what is too old for a version; None: nothing is. `note`:
        called after each step, with the rows that were trained (`StepMeter.note`)."""
        self._note = note
        self._phases = phases or Phases()
        self.after_step: int | None = 0
        """The step whose weights and optimizer the trainer has now, to be set where they are brought from elsewhere;
        None while an update is under way, or if it failed."""
        self.num_rows = self.num_in_flight = self.tokens_in_flight = 0
        """Counts of its share: rows trained so far, rows of the present batch, and response tokens of those that it
        reports. Rows that are trained again do not count."""
        self._ranks, self._reports_rows = ranks, ranks.reports_rows
        self.every: Mapping[str, int] = {}
        """Of several policies those that do not learn in every step: the divisor of steps that they learn in."""
        self.own_ranks: Mapping[str, Peers] = {}
        """Where each of several policies has ranks of its own: those of the policy that this rank trains. Empty: all
        ranks train all."""
        self.probe_temperature: float | None = None
        """Sampling temperature of rows that steps report for engines to score again; None: they report none."""
        self.hash_of_weights: Callable[[], int] | None = None
        """Function that hashes this rank's part of the weights, collective; None: publications have checksums."""
        self._preparation = preparation
        self._without_old = without_old
        self._checkpoint = checkpoint
        self._trainer = trainer
        self.store: SyncStoreClient | None = None
        """The store that this worker is attached to."""
        self._rounds = SharedRounds("train", ranks)
        self._policies = policies
        self._tokens: tuple[int, TokenValues | None] = (0, None)
        """The last step, and the values of each token in its update."""

    def attach(self, store: SyncStoreClient) -> None:
        """Take the next steps from this store. A step that waits for a batch of the previous store, in another thread,
        raises `PartnerGone`."""
        before, self.store = self.store, store
        if before is not None:
            before.leave()

    def step(self, step: int, records_tokens: bool = False) -> StepReport | None:
        """Run step number `step`, counted from 1. Waits for its batch; None when the store has closed.
        `records_tokens`: `token_values` will be asked for. Collective. Raises `PartnerGone` where this rank does not
        have the state after the step before.

        The controller completes the round once it has all reports, and these come after the copies, or where copies are
        made beside the next step, once it has heard of all copies: so when the round has ended, every rank that makes
        copies has that of this step. And as long as it has not ended, every rank still has the copy of the step before,
        which that of the next step is the first to write over.
        """
        store = self.store
        assert store is not None
        self.check_state(step - 1)
        self._tokens = (0, None)
        computes_for_others = self._ranks.computes_for_others or bool(self.own_ranks)
        records = records_tokens and (self._reports_rows or computes_for_others)
        started = time.perf_counter()
        with self._phases.within(WAITING):
            lease = self._rounds.take(store, step - 1)  # rounds are from 0
        if lease is None:
            return None
        leased = time.perf_counter()
        leased_rows, self.num_in_flight = lease.rows, len(lease.rows)
        if self._without_old is not None:
            leased_rows = self._without_old(with_places(leased_rows) if records else leased_rows, lease.version)
        if self._reports_rows:
            self.tokens_in_flight = int(leased_rows.lengths("response_ids").sum())
        with self._phases.within(UPDATING):
            rows, critic_metrics = self._prepare(leased_rows, lease.version)
            self.after_step = None
            lengths = lease.rows.lengths("response_ids").tolist()
            update = self._update(step, rows, lease.version, lengths if records else None, len(leased_rows))
            report = update.report
            updated = time.perf_counter()
            no_memory_checkpoint = self._checkpoint(step) if self._checkpoint is not None else None
            self.after_step = step
            seconds = report.seconds | {"keep": time.perf_counter() - updated}
        self.num_rows += self.num_in_flight
        self.num_in_flight = self.tokens_in_flight = 0
        self._tokens = step, update.tokens if self._reports_rows else None
        trained = time.perf_counter()
        reported = leased_rows if self._reports_rows else leased_rows.select([])
        made = StepReport(
            step,
            lease.version,
            report.metrics | critic_metrics,
            TrainedRows.of(reported, lease.version),
            leased - started,
            trained - leased,
            seconds,
            np.asarray(reported.row_ids, np.int64),
            lease.share if self._reports_rows else None,
            no_memory_checkpoint,
            update.probe,
            self._hashes(rows, [*report.norms, critic_metrics.get("critic/grad_norm", 0.0)]),
        )
        if self._note is not None:
            self._note(made, leased_rows)
        return made

    def _hashes(self, rows: Rows, norms: Sequence[float]) -> dict[str, int]:
        """The hashes of this rank's share of the step. Rank 0 reports the norms, which are the same on each. Collective
        where weights are hashed."""
        found = row_hashes(rows) if self._reports_rows else {}
        if self._ranks.rank == 0:
            found["gradients"] = hash_of_norms(norms)
        if self.hash_of_weights is not None:
            found["weights"] = self.hash_of_weights()
        return found

    def _update(self, step: int, rows: Rows, version: int, lengths: list[int] | None, num_leased: int) -> RowsUpdate:
        """Update the policy, or each of several that learns in this step, by its own rows. Collective."""
        if len(self._policies) == 1:
            return self._update_one(self._trainer, self._policies[0], rows, version, lengths, num_leased)
        names = rows.strings(POLICY) if len(rows) else []
        places = {each.name: [at for at, name in enumerate(names) if name == each.name] for each in self._policies}
        own_counts = [len(own) if self._reports_rows else 0 for own in places.values()]
        counts = map(sum, zip(*self._ranks.gather_ranks(own_counts), strict=True))
        updates, num_left_out = {}, {}
        for policy, count in zip(self._policies, counts, strict=True):
            is_left_out = step % self.every.get(policy.name, 1) != 0
            num_left_out[policy.name] = count if is_left_out else 0
            is_elsewhere = bool(self.own_ranks) and policy.name not in self.own_ranks
            if count and not is_left_out and not is_elsewhere:
                own = self._share(rows, places[policy.name], policy)
                own_lengths = [lengths[at] for at in own] if lengths is not None else None
                with self._trainer.using(policy.name) as trainer:
                    updates[policy.name] = self._update_one(
                        trainer, policy, rows.select(own), version, own_lengths, len(own)
                    )
        if self.own_ranks:
            updates = self._of_all_ranks(updates)
        return RowsUpdate.joined(updates, num_left_out, side_by_side=bool(self.own_ranks))

    def _share(self, rows: Rows, places: list[int], policy: TrainedPolicy) -> list[int]:
        """The places of the rows of a policy that this rank computes: all that it has, or where all of the policy's
        ranks have the same ones, a share."""
        if (ranks := self.own_ranks.get(policy.name)) is None:
            return places
        share = share_of_rank(rows.select(places), policy.loss, ranks.data_rank, ranks.num_data_ranks)
        return [places[at] for at in share]

    def _of_all_ranks(self, updates: Mapping[str, RowsUpdate]) -> dict[str, RowsUpdate]:
        """The updates of all policies, each by ranks of its own. Collective."""
        parts: dict[str, list[RowsUpdate]] = defaultdict(list)
        for of_rank in self._ranks.gather_ranks(dict(updates)):
            for name, update in of_rank.items():
                parts[name].append(update)
        return {each.name: RowsUpdate.of_ranks(parts[each.name]) for each in self._policies if each.name in parts}

    def _update_one(
        self, trainer: Trainer, policy: TrainedPolicy, rows: Rows, version: int, lengths: list[int] | None,
        num_leased: int,
    ) -> RowsUpdate:  # fmt: skip
        """`lengths`: tokens of each row of this step as it was sampled, where token values are recorded. `num_leased`:
        rows of this step; those after them are of earlier ones."""
        recorder = TokenRecorder() if lengths is not None else None
        probe = None
        if self.probe_temperature is not None and num_leased:
            probe = ProbeRecorder(rows.select(range(num_leased)), recorder, self.probe_temperature)
        report = trainer.update(rows, policy.loss, probe or recorder, version)
        tokens, ranks = None, self.own_ranks.get(policy.name, self._ranks)
        if recorder and lengths is not None:
            tokens = recorder.values(rows, lengths, ranks.gather_block)
        return RowsUpdate(report, tokens if ranks.reports_rows else None, probe.rows(rows) if probe is not None else ())

    def _prepare(self, rows: Rows, version: int) -> tuple[Rows, dict[str, float]]:
        """The rows with what stages of the trainer add, and these stages' metrics."""
        return (rows, {}) if self._preparation is None else self._preparation.apply(rows, version)

    def check_state(self, step: int) -> None:
        """Raise `PartnerGone` where this rank does not have the state after step `step`: others have been started since
        the caller has heard of it."""
        if self.after_step != step:
            raise PartnerGone(f"a rank is to have the state after step {step}, and has that after {self.after_step}.")

    def token_values(self, step: int) -> TokenValues | None:
        """The values of each token in the update of `step`. None: it was not the last one, it was not recorded, or
        another rank reports these rows."""
        last, values = self._tokens
        return values if last == step else None


class ScorerWorker:
    """Writes the outputs of a model that is not trained for responses, log-probabilities or one number each: a
    reference, a teacher, a reward model. Lifecycle: `run` returns when the store closes; with another store, from
    another thread, it ends the one before."""

    def __init__(
        self,
        compute: Callable[[Rows], dict[str, Any]],
        stage: str,
        ranks: Peers = ALONE,
        *,
        max_units: int = 64,
        phases: Phases | None = None,
    ) -> None:
        """`compute`: one value a row for each column that the stage writes. `max_units`: most rows of a round, over all
        ranks. `phases`: where it notes what it does."""
        self._phases = phases or Phases()
        self.num_computed = self.num_in_flight = 0
        """Counts of rows: computed of its share, and in the present round."""
        self._reports_rows = ranks.reports_rows
        self._compute = compute
        self._store: SyncStoreClient | None = None
        """The store of the newest `run`."""
        self._turn = threading.Lock()
        self._rounds = SharedRounds(stage, ranks, max_units=max_units, moves_on=True)
        self._num_rows = 0
        self._busy_s = 0.0

    def run(self, store: SyncStoreClient) -> None:
        """Lease, compute, write, until the store closes. Rows that other ranks had under way go back. Raises
        `PartnerGone`. Collective."""
        before, self._store = self._store, store
        if before is not None:
            before.leave()
        with self._turn:
            try:
                number: int | None = self._rounds.begin(store)
                while number is not None:
                    number = self.serve(store, number)
            except PartnerGone:
                if self._store is store:  # nobody has taken its place
                    raise
            finally:
                store.leave()

    def serve(self, store: SyncStoreClient, number: int) -> int | None:
        """Serve one round; return the number of the next one, None when the store has closed."""
        lease = self._rounds.take(store, number)
        if lease is None:
            return None
        started = time.perf_counter()
        self.num_in_flight = len(lease.rows)
        with self._phases.within(COMPUTING):
            values = self._compute(lease.rows)
        self.num_computed += self.num_in_flight
        self.num_in_flight = 0
        self._busy_s += time.perf_counter() - started
        if len(lease.rows) and self._reports_rows:
            self._num_rows += len(lease.rows)
            with suppress(LeaseExpired):  # the rows are somebody else's by now
                store.write(lease, lease.rows.row_ids, values)
        return lease.round + 1

    def stats(self) -> dict[str, float]:
        """Rows served and seconds spent computing, since the start. May be called from another thread."""
        return {"rows": float(self._num_rows), "busy_s": self._busy_s}
