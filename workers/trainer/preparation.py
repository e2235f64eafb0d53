"""The work of the trainers on the step's whole batch before the policy's update: stages per batch, in order, and rows
of earlier steps that are trained again.

    compute   this rank's rows ─▶ gather over ranks ─▶ function on all rows ─▶ columns of this rank's rows
              (what such a function carries from step to step is its state, the same on every rank)
    staleness version of the update - token_versions
    values    this rank's rows ─▶ critic ─▶ old_values
    critic    this rank's rows ─▶ critic.update

Statistics over the batch (REINFORCE++'s deviation, whitening) are thus over all of it, whatever the number of ranks:
every rank computes the same, in order of row id.

Replay of rare successes (`trainer.replay`) comes last:

    rows of a step ─▶ rare: above the mean of a group in which few are ─▶ kept, the rarest first
                                                                             │ while no token is too stale
    rows of a later step, and a share of those that are kept ◀──────────────┘

A row is trained again with the advantage that it had and with the log-probabilities of the engine, so that the loss
corrects for what the policy has learned since, as it does for any stale token. The store does not hear of it: for the
store, and in the report of the step, every row is trained once. The rows that are kept are the same on every rank, a
function of the steps before alone, and part of checkpoints: a run that is resumed, or whose ranks die, trains the same
rows again.

Legend: _N rows of a step, of all ranks; _K rows that are kept.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from penstock.algorithms.graph.columns import Column
from penstock.algorithms.graph.stage import Stage
from penstock.conf.trainer import ReplayConfig
from penstock.store.data.rows import Rows
from penstock.workers.compute import ComputeWorker
from penstock.workers.protocols import Loss, UpdateReport
from penstock.workers.trainer.checkpointing.plain_data import states_from_text, states_to_text
from penstock.workers.trainer.token_recorder import PLACES, with_places
from penstock.workers.trainer.update.tally import with_explained_variance

REPLAY = "trainer.replay"
"""Name of the state of what is trained again."""
CRITIC = "critic"
"""Prefix of the critic's metrics."""
Gather = Callable[[Any], list[Any]]
"""Gathers a picklable value of each rank, in order of rank. Collective."""


class Critic(Protocol):
    """The interface of a critic for its stages: `workers/trainer/scalar.py`."""

    def values(self, rows: Rows) -> list[np.ndarray]: ...

    def update(self, rows: Rows, loss: Loss) -> UpdateReport: ...


class StateHolder(Protocol):
    """Holds a state from step to step."""

    state: Any


RARITY = "replay_rarity"
"""Column of the rows that are kept: the share of the group that was as right."""


class Replay:
    """Lifecycle: `exchange` once a step, on every rank."""

    def __init__(
        self,
        config: ReplayConfig,
        max_staleness: int,
        gather: Callable[[Any], list[Any]],
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """`gather`: gathers a picklable value of each data rank. `rank`, `num_ranks`: this one among the data ranks,
        each of which trains an equal part of the rows again."""
        self._config, self._max_staleness, self._gather = config, max_staleness, gather
        self._rank, self._num_ranks = rank, num_ranks
        self._kept: Rows | None = None
        """The rows with a column `RARITY`."""

    def exchange(self, rows: Rows, version: int) -> tuple[Rows | None, dict[str, float]]:
        """Return this rank's part of the rows that are trained again, None for none, and metrics; keep the rare rows of
        this step for later ones. `rows`: of the step, with all of their columns. `version`: of the policy that is about
        to be updated. Collective, also for a rank without rows."""
        kept = self._fresh_enough(version)
        self._kept = self._with_new_rows(rows, kept)
        if kept is None or not len(kept):
            return None, {"replay/rows": 0.0, "replay/staleness_max": 0.0}
        metrics = {
            "replay/rows": float(len(kept)),
            "replay/staleness_max": float(version - _oldest_versions(kept).min()),
        }
        mine = kept.select(range(self._rank, len(kept), self._num_ranks)).without(RARITY)
        return (with_places(mine) if PLACES in rows else mine) if len(mine) else None, metrics

    @property
    def state(self) -> dict[str, Any]:
        """What is kept, as plain data."""
        kept = self._kept
        return {} if kept is None else {"ids": [kept.row_ids, kept.group_ids], "columns": kept.as_bytes()}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._kept = None
        if state:
            row_ids, group_ids = state["ids"]
            self._kept = Rows.from_bytes(row_ids, group_ids, state["columns"])

    def _fresh_enough(self, version: int) -> Rows | None:
        """The kept rows of which no token is too stale for a version."""
        if self._kept is None:
            return None
        return self._kept.select(np.flatnonzero(version - _oldest_versions(self._kept) <= self._max_staleness))

    def _with_new_rows(self, rows: Rows, kept: Rows | None) -> Rows | None:
        """The rarest of the rows that are kept and of those of this step. Collective."""
        reward_N, group_ids_N, row_ids_N = self._gather_rewards(rows)
        rarity_N = rarities(reward_N, group_ids_N)
        rare = np.flatnonzero(rarity_N <= self._config.rare)
        most = int(self._config.share * len(row_ids_N))
        chosen = rare[rarest(rarity_N[rare], row_ids_N[rare], most)]
        if not len(chosen):
            return kept
        rarity_of = dict(zip(row_ids_N[chosen].tolist(), rarity_N[chosen].tolist(), strict=True))
        mine = _copied(rows.select([place for place, row in enumerate(rows.row_ids.tolist()) if row in rarity_of]))
        mine = mine.with_column(RARITY, [rarity_of[row] for row in mine.row_ids.tolist()])
        parts = [*self._gather(mine), kept]
        together = Rows.concat([part for part in parts if part is not None and len(part)])
        return together.select(rarest(together.values(RARITY), together.row_ids, most))

    def _gather_rewards(self, rows: Rows) -> tuple[np.ndarray, ...]:
        """Rewards, group ids and row ids of the step's rows that have a token, of all ranks. Collective."""
        values = None
        if len(rows):
            some = np.flatnonzero(rows.lengths("token_versions"))
            values = rows.values("reward")[some], rows.group_ids[some], rows.row_ids[some]
        parts = [part for part in self._gather(values) if part is not None]
        return tuple(map(np.concatenate, zip(*parts, strict=True))) or (np.zeros(0),) * 3


def rarities(reward_N: np.ndarray, group_ids_N: np.ndarray) -> np.ndarray:
    """The rarity of each row's success, `[N]` float64: the share of its group whose reward is above the group's mean.
    Infinite for a row that is not above it itself.

    >>> rarities(np.array([0.0, 1.0, 0.0, 0.0, 1.0, 1.0]), np.array([7, 7, 7, 7, 8, 8])).tolist()
    [inf, 0.25, inf, inf, inf, inf]
    """
    _, group_N, size_G = np.unique(group_ids_N, return_inverse=True, return_counts=True)
    reward_N = reward_N.astype(np.float64)
    mean_G = np.bincount(group_N, reward_N, len(size_G)) / size_G
    is_above_N = reward_N > mean_G[group_N]
    share_G = np.bincount(group_N, is_above_N, len(size_G)) / size_G
    return np.where(is_above_N, share_G[group_N], np.inf)


def rarest(rarity_N: np.ndarray, row_ids_N: np.ndarray, most: int) -> np.ndarray:
    """The positions of the `most` rarest rows, of those that are equally rare the newest, in the order of row ids."""
    chosen = np.lexsort((-row_ids_N, rarity_N))[:most]
    return chosen[np.argsort(row_ids_N[chosen])]


def _oldest_versions(rows: Rows) -> np.ndarray:
    """The version of each row's oldest token, `[N]` int64."""
    return np.array([versions.min() for versions in rows.arrays("token_versions")], np.int64)


def _copied(rows: Rows) -> Rows:
    """The rows in memory of their own: those of a lease may lie in the store's."""
    rows = rows.without(PLACES)
    return Rows.from_bytes(rows.row_ids, rows.group_ids, rows.as_bytes())


class Preparation:
    """The stages of a dataflow that run in its trainers.

    rows, metrics = Preparation(flow.in_trainer, flow.columns, ranks.gather).apply(rows, version)
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        columns: dict[str, Column],
        gather: Gather,
        critic: Critic | None = None,
        replay: Replay | None = None,
        *,
        is_saved: bool = False,
    ) -> None:
        """`critic`: for the stages that ask for one. `replay`: of rows of earlier steps; None: none are. `is_saved`:
        checkpoints are taken, so what functions carry must be plain data, which the first step checks."""
        self._stages = stages
        self._starts = {stage.name: stage.state for stage in stages if stage.state is not None}
        self._untried = is_saved
        self.workers = {stage.name: ComputeWorker(stage, columns) for stage in stages if stage.kind == "compute"}
        self._gather = gather
        self._critic, self._replay = critic, replay
        self._state_holders: dict[str, StateHolder] = {**self.workers}
        if replay is not None:
            self._starts[REPLAY], self._state_holders[REPLAY] = replay.state, replay

    def carried(self) -> str:
        """States that functions carry from step to step, for checkpoints. Raises `DataflowError` for a state that is no
        plain data."""
        return states_to_text({name: self._state_holders[name].state for name in self._starts}, self._starts)

    def resume(self, carried: str) -> None:
        """Go on from carried states. Raises `CheckpointError` if they are of other stages."""
        for name, state in states_from_text(carried, self._starts).items():
            self._state_holders[name].state = state

    def apply(self, rows: Rows, version: int) -> tuple[Rows, dict[str, float]]:
        """Return these rows with the columns that the stages write, after them those that are trained again, and the
        metrics of critic, states and replay. `version`: of the policy that is about to be updated. Collective,
        also for a rank without rows. Raises `DataflowError` if a function returns what its stage does not declare, or
        carries what cannot be saved."""
        metrics: dict[str, float] = {}
        for stage in self._stages:
            if stage.kind == "compute":
                worker = self.workers[stage.name]
                rows = self._computed(worker, rows)
                metrics |= {f"actor/{name}": value for name, value in getattr(worker.state, "metrics", {}).items()}
                continue
            if stage.kind == "staleness":
                rows = _with_ages(rows, stage, version)
                continue
            assert self._critic is not None
            if stage.kind == "values":
                rows = rows.with_column(stage.writes[0].name, self._critic.values(rows))
            else:
                assert stage.function is not None
                metrics |= with_explained_variance(self._critic.update(rows, stage.function).metrics, CRITIC)
        if self._replay is not None:
            again, found = self._replay.exchange(rows, version)
            metrics |= found
            if again is not None:
                for stage in self._stages:
                    again = _with_ages(again, stage, version) if stage.kind == "staleness" else again
                rows = Rows.concat([rows, again]) if len(rows) else again
        if self._untried:
            self.carried()
            self._untried = False
        return rows, metrics

    def _computed(self, worker: ComputeWorker, rows: Rows) -> Rows:
        own = Rows(rows.row_ids, rows.group_ids, rows.table().select(list(worker.stage.reads)))
        everybody = [part for part in self._gather(own) if len(part)]
        if not everybody:
            return rows
        together = Rows.concat(everybody) if len(everybody) > 1 else everybody[0]
        order = np.argsort(together.row_ids, kind="stable")
        results = worker.apply(together.select(order))
        mine = np.searchsorted(together.row_ids[order], rows.row_ids)
        for name, values in results.items():
            rows = rows.with_column(name, [values[position] for position in mine.tolist()])
        return rows


def _with_ages(rows: Rows, stage: Stage, version: int) -> Rows:
    """The rows with the column of a stage `staleness`."""
    ages = [version - versions.astype(np.float32) for versions in rows.arrays(stage.reads[0])]
    return rows.with_column(stage.writes[0].name, ages)
