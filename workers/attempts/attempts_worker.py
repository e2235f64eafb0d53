"""The pull loop of an environment worker: tasks out of the store, trajectories back in.

    lease groups ─▶ an attempt for each row, concurrently ─▶ write what is trained, drop the rest with its reason

The loop is `rollout/rollout_worker.py`'s.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from penstock.algorithms.graph.columns import PROMPT_PICTURES
from penstock.conf.errors import LeaseExpired
from penstock.store.client.client import StoreClient
from penstock.store.client.lease import Lease
from penstock.store.data.rows import Rows
from penstock.workers.attempts.runner import AttemptRunner
from penstock.workers.environments.task import Task
from penstock.workers.lifecycle.error_share import ErrorShare
from penstock.workers.protocols import Sampling
from penstock.workers.rollout.rollout_worker import STAGE, GroupIntake, GroupLoop, Written
from penstock.workers.trajectory import FAILED, Trajectory, row_columns

PICTURES = PROMPT_PICTURES[0]
ERROR_WINDOW = 100
"""Number of attempts over which the share of failures is taken."""


@dataclass(frozen=True)
class AttemptColumns:
    """The columns that attempts are written to."""

    names: Sequence[str] | None = None
    """Columns of the stage; None: all that a trajectory has."""
    reward: str = "reward"
    """Column of the environment's reward."""

    def of(self, attempts: Sequence[Trajectory]) -> dict[str, list[Any]]:
        """The values of the columns, an entry for each attempt; each has at least one turn."""
        columns = row_columns(attempts, self.reward)
        return {name: values for name, values in columns.items() if self.names is None or name in self.names}


class EnvironmentWorker:
    """Lifecycle: `run` returns when the store is closed; then it may be called with another. `stats` at any time."""

    def __init__(self, runner: AttemptRunner, intake: GroupIntake, errors: ErrorShare, columns: AttemptColumns) -> None:
        self._runner, self._intake, self._errors, self._columns = runner, intake, errors, columns
        self._loop = GroupLoop(STAGE, intake, self._roll, may_be_answered_twice=True)

    async def run(self, store: StoreClient) -> None:
        """Serve the store until it closes. Raises `RewardFailure` when too many attempts fail, and what the engines
        fail with for good."""
        await self._loop.run(store)

    def stats(self) -> dict[str, float]:
        """Cumulative counters, like those of `RolloutWorker`."""
        return self._loop.stats()

    async def _roll(self, store: StoreClient, lease: Lease, group_id: int, rows: Rows) -> Written:
        """Play all attempts of a group, then write."""
        task = Task.from_json(rows.strings("task")[0], rows.blobs(PICTURES)[0] if PICTURES in rows else ())
        played = await self._runner.group(task, self._samplings(group_id, len(rows)))
        attempts = [attempt.without(self._intake.dropped) for attempt in played]
        kept = [position for position, attempt in enumerate(attempts) if attempt.outcome.is_trained]
        await self._drop(store, lease, rows, attempts)
        if kept:
            columns = self._columns.of([attempts[position] for position in kept])
            await store.write(lease, rows.row_ids[kept], columns)
        self._errors.check()
        return len(kept), sum(attempts[position].num_sampled for position in kept)

    async def _drop(self, store: StoreClient, lease: Lease, rows: Rows, attempts: Sequence[Trajectory]) -> None:
        lost: dict[tuple[str, str], list[int]] = {}
        for row, attempt in zip(rows.row_ids.tolist(), attempts, strict=True):
            outcome = attempt.outcome
            self._errors.add(outcome.detail if outcome.kind == FAILED else None)
            if not outcome.is_trained:
                lost.setdefault((outcome.reason, outcome.detail), []).append(row)
        for (reason, detail), row_ids in lost.items():
            with suppress(LeaseExpired):
                await store.drop(lease, row_ids, reason, detail)

    def _samplings(self, group_id: int, count: int) -> list[Sampling]:
        """Samplings of the attempts: the seeds that the group's responses would have without an environment. Groups
        that were admitted earlier, whose tokens would be too old first, are served first."""
        sampling, first = replace(self._intake.sampling, priority=group_id), self._intake.seed_of(group_id)
        return [sampling if first is None else sampling.seeded(first + index) for index in range(count)]
