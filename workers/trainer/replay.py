"""Replay of rare successes: rows of earlier steps that a step trains again beside its own (`trainer.replay`).

    rows of a step ─▶ rare: above the mean of a group in which few are ─▶ kept, the rarest first
                                                                             │ while no token is too stale
    rows of a later step, and a share of those that are kept ◀──────────────┘

A row is trained again with the advantage that it had and with the log-probabilities of the engine, so that the loss
corrects for what the policy has learned since, as it does for any stale token. The store does not hear of it: for the
store, and in the report of the step, every row is trained once.

What is kept is the same on every rank, a function of the steps before alone, and part of checkpoints: a run that is
resumed, or whose ranks die, trains the same rows again.

Legend: _N rows of a step, of all ranks; _K rows that are kept.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.conf.trainer import ReplayConfig
from penstock.store.data.rows import Rows
from penstock.workers.trainer.token_recorder import PLACES, with_places

RARITY = "replay_rarity"
"""Column of the rows that are kept: the share of the group that was as right."""


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


class Replay:
    """Lifecycle: `again` once a step, on every rank."""

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

    def again(self, rows: Rows, version: int) -> tuple[Rows | None, dict[str, float]]:
        """Return this rank's part of the rows that are trained again, None for none, and metrics; keep the rare rows of
        this step for later ones. `rows`: of the step, with all of their columns. `version`: of the policy that is about
        to be updated. Collective, also for a rank without rows."""
        kept = self._young(version)
        self._kept = self._rarest(rows, kept)
        if kept is None or not len(kept):
            return None, {"replay/rows": 0.0, "replay/staleness_max": 0.0}
        metrics = {"replay/rows": float(len(kept)), "replay/staleness_max": float(version - _oldest(kept).min())}
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

    def _young(self, version: int) -> Rows | None:
        """The kept rows of which no token is too stale for a version."""
        if self._kept is None:
            return None
        return self._kept.select(np.flatnonzero(version - _oldest(self._kept) <= self._max_staleness))

    def _rarest(self, rows: Rows, kept: Rows | None) -> Rows | None:
        """The rarest of the rows that are kept and of those of this step. Collective."""
        reward_N, group_ids_N, row_ids_N = self._of_all(rows)
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

    def _of_all(self, rows: Rows) -> tuple[np.ndarray, ...]:
        """Rewards, group ids and row ids of the step's rows that have a token, of all ranks. Collective."""
        values = None
        if len(rows):
            some = np.flatnonzero(rows.lengths("token_versions"))
            values = rows.values("reward")[some], rows.group_ids[some], rows.row_ids[some]
        parts = [part for part in self._gather(values) if part is not None]
        return tuple(map(np.concatenate, zip(*parts, strict=True))) or (np.zeros(0),) * 3


def _oldest(rows: Rows) -> np.ndarray:
    """The version of each row's oldest token, `[N]` int64."""
    return np.array([versions.min() for versions in rows.arrays("token_versions")], np.int64)


def _copied(rows: Rows) -> Rows:
    """The rows in memory of their own: those of a lease may lie in the store's."""
    rows = rows.without(PLACES)
    return Rows.from_bytes(rows.row_ids, rows.group_ids, rows.as_bytes())
