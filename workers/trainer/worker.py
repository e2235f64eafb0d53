"""What a trainer rank does with the store: one update a call, or log-probabilities until the store closes.

    TrainerWorker.step(k):  lease_shared("train", k) ─▶ trainer.update ─▶ complete_shared ─▶ StepReport
    ReferenceWorker.run():  lease_shared(stage, 0, 1, 2, …) ─▶ trainer.logprobs ─▶ write

All ranks make the same calls with the same round numbers; the store gives each its share of the rows. Ranks that split
the work on the same rows ask for the same share, and one of them answers for it. Run by `actor.py`.

Legend: _N rows (samples) of this rank.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from penstock.conf.errors import LeaseExpired
from penstock.store.rows import Rows
from penstock.workers.protocols import Loss, Trainer
from penstock.workers.trainer.preparation import Preparation


class Store(Protocol):
    """What a rank needs of `store.client.SyncStoreClient`."""

    def lease_shared(
        self, stage: str, round: int, rank: int, num_ranks: int, max_units: int = 1, owner: str = ""
    ) -> Any: ...

    def complete_shared(self, lease: Any) -> None: ...

    def write(self, lease: Any, row_ids: np.ndarray, columns: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class TrainedRows:
    """What the step's metrics need of each row of this rank; small enough to send to the controller."""

    reward_N: np.ndarray
    """float64, NaN where the dataflow has no reward."""
    response_tokens_N: np.ndarray
    """int64."""
    prompt_tokens_N: np.ndarray
    """int64."""
    clipped_N: np.ndarray
    """bool: the response ended at `max_tokens`, not by itself."""
    staleness_max_N: np.ndarray
    """int64: of the row's oldest token, in policy updates; 0 where nothing was sampled."""
    staleness_sum_N: np.ndarray
    """float64: over the row's tokens."""

    @classmethod
    def of(cls, rows: Rows, version: int) -> "TrainedRows":
        """`version`: of the policy that was updated. A token sampled under version u has staleness `version - u`."""
        count = len(rows)
        reward_N = rows.values("reward").astype(np.float64) if "reward" in rows else np.full(count, np.nan)
        clipped_N = np.zeros(count, dtype=np.bool_)
        if "finish_reason" in rows:
            clipped_N = np.array([reason == "length" for reason in rows.strings("finish_reason")], dtype=np.bool_)
        oldest_N, sum_N = np.zeros(count, np.int64), np.zeros(count)
        if "token_versions" in rows:
            for index, versions in enumerate(rows.arrays("token_versions")):
                if len(versions):
                    staleness = version - versions.astype(np.int64)
                    oldest_N[index], sum_N[index] = staleness.max(), staleness.sum()
        return cls(reward_N, rows.lengths("response_ids"), rows.lengths("prompt_ids"), clipped_N, oldest_N, sum_N)


@dataclass(frozen=True)
class StepReport:
    """One update, as one rank saw it."""

    round: int
    version: int
    """Of the policy before the update; the update made `version + 1`."""
    metrics: dict[str, float]
    """`UpdateReport.metrics`: the same on every rank."""
    rows: TrainedRows
    """Of this rank."""
    wait_s: float
    """For the store to have a batch."""
    train_s: float
    seconds: dict[str, float]
    """Parts of `train_s`: plan, forward, backward, optimizer."""


class TrainerWorker:
    """Trains on the store's batches, one a `step`."""

    def __init__(
        self,
        trainer: Trainer,
        store: Store,
        rank: int,
        num_ranks: int,
        loss: Loss,
        stage: str = "train",
        preparation: Preparation | None = None,
        speaks_for_rows: bool = True,
    ) -> None:
        """`rank`: which share of the rows is this one's, of `num_ranks` shares. `preparation`: of the batch before the
        update; None for none. `speaks_for_rows`: False for a rank whose rows another one completes and reports."""
        self._speaks_for_rows = speaks_for_rows
        self._preparation = preparation
        self._trainer = trainer
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._loss = loss
        self._stage = stage

    def step(self, round: int) -> StepReport | None:
        """Update number `round`, counted from 0. Waits for the batch; None when the store has closed. Collective."""
        started = time.perf_counter()
        lease = self._store.lease_shared(self._stage, round, self._rank, self._num_ranks, 0)
        if lease is None:
            return None
        leased = time.perf_counter()
        rows, critic_metrics = (
            self._preparation.apply(lease.rows, lease.version) if self._preparation is not None else (lease.rows, {})
        )
        report = self._trainer.update(rows, self._loss)
        if self._speaks_for_rows:
            self._store.complete_shared(lease)
        trained = time.perf_counter()
        trained_rows = TrainedRows.of(lease.rows if self._speaks_for_rows else lease.rows.select([]), lease.version)
        return StepReport(
            round,
            lease.version,
            report.metrics | critic_metrics,
            trained_rows,
            leased - started,
            trained - leased,
            report.seconds,
        )


class ReferenceWorker:
    """Writes what a model that is not trained says, log-probabilities or scores, for whatever rows are ready."""

    def __init__(
        self,
        compute: Callable[[Rows], Any],
        store: Store,
        stage: str,
        column: str,
        rank: int,
        num_ranks: int,
        *,
        max_units: int = 64,
        speaks_for_rows: bool = True,
    ) -> None:
        """`compute`: one value a row, e.g. `trainer.logprobs`. `column`: what the stage writes. `max_units`: most rows
        of a round, over all ranks. `speaks_for_rows`: False for a rank whose rows another one writes."""
        self._speaks_for_rows = speaks_for_rows
        self._compute = compute
        self._store = store
        self._stage = stage
        self._column = column
        self._rank = rank
        self._num_ranks = num_ranks
        self._max_units = max_units
        self._num_rows = 0
        self._busy_s = 0.0

    def run(self) -> None:
        """Lease, compute, write, until the store closes. Collective."""
        round = 0
        while self.serve(round):
            round += 1

    def serve(self, round: int) -> bool:
        """One round; False when the store has closed."""
        lease = self._store.lease_shared(self._stage, round, self._rank, self._num_ranks, self._max_units)
        if lease is None:
            return False
        started = time.perf_counter()
        values = self._compute(lease.rows)
        self._busy_s += time.perf_counter() - started
        if len(lease.rows) and self._speaks_for_rows:
            self._num_rows += len(lease.rows)
            with suppress(LeaseExpired):  # the rows are somebody else's by now
                self._store.write(lease, lease.rows.row_ids, {self._column: values})
        return True

    def stats(self) -> dict[str, float]:
        """Rows served and seconds spent computing, since the start. May be called from another thread."""
        return {"rows": float(self._num_rows), "busy_s": self._busy_s}
