"""The pull loop of an environment worker: tasks out of the store, trajectories back in.

    lease groups ─▶ an attempt for each row, concurrently ─▶ write what is trained, drop the rest with its reason

The loop is `rollout/worker.py`'s.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from penstock.conf.errors import LeaseExpired
from penstock.store.client.client import StoreClient
from penstock.store.client.lease import Lease
from penstock.store.data.rows import Rows
from penstock.store.errors import LeaseSuperseded
from penstock.workers.attempts.runner import Runner
from penstock.workers.environments.task import Task
from penstock.workers.error_share import ErrorShare
from penstock.workers.protocols import Sampling
from penstock.workers.rollout.worker import STAGE, GroupLoop, sample_seed
from penstock.workers.trajectory import FAILED, Trajectory, row_columns


class EnvironmentWorker:
    """Lifecycle: `run` returns when the store is closed; then it may be called with another. `stats` at any time."""

    def __init__(
        self,
        runner: Runner,
        sampling: Sampling,
        name: str,
        seed: int | None,
        *,
        num_attempts: int,
        max_attempts: int,
        errors: ErrorShare,
        num_workers: int = 1,
        writes: Sequence[str] | None = None,
        reward_column: str = "reward",
    ) -> None:
        """`seed`: of the run, None for unseeded sampling. `num_attempts`: in a group. `max_attempts`: run concurrently.
        `writes`: columns of the stage; None: all that a trajectory has."""
        self._runner, self._sampling, self._seed = runner, sampling, seed
        self._errors, self._writes, self._reward_column = errors, writes, reward_column
        self._loop = GroupLoop(
            STAGE, name, self._roll,
            max_groups=max(1, max_attempts // num_attempts), num_workers=num_workers, hears_answers=True,
        )  # fmt: skip
        self._counts: Counter[str] = Counter(samples=0, tokens=0, groups=0, late_groups=0, twice_groups=0)

    async def run(self, store: StoreClient) -> None:
        """Serve the store until it closes. Raises `RewardFailure` when too many attempts fail, and what the engines
        fail with for good."""
        await self._loop.run(store)

    def stats(self) -> dict[str, float]:
        """Cumulative counters, like those of `RolloutWorker`."""
        twice = self._counts["twice_groups"] + self._loop.num_aborted
        return {"busy_s": self._loop.busy_s, **self._counts, "twice_groups": twice}

    async def _roll(self, store: StoreClient, lease: Lease, group_id: int, rows: Rows) -> None:
        """Play all attempts of a group, then write."""
        task = Task.from_json(rows.strings("task")[0])
        attempts = await self._runner.group(task, self._samplings(group_id, len(rows)))
        kept = [position for position, attempt in enumerate(attempts) if attempt.outcome.is_trained]
        try:
            await self._drop(store, lease, rows, attempts)
            if kept:
                columns = row_columns([attempts[position] for position in kept], self._reward_column)
                if self._writes is not None:
                    columns = {name: values for name, values in columns.items() if name in self._writes}
                await store.write(lease, rows.row_ids[kept], columns)
        except LeaseSuperseded:
            self._counts["twice_groups"] += 1
            return
        except LeaseExpired:
            self._counts["late_groups"] += 1
            return
        self._counts["groups"] += 1
        self._counts["samples"] += len(kept)
        self._counts["tokens"] += sum(attempts[position].num_sampled for position in kept)
        self._errors.check()

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
        sampling = replace(self._sampling, priority=group_id)
        if self._seed is None:
            return [sampling] * count
        first = sample_seed(self._seed, group_id)
        return [sampling.seeded(first + index) for index in range(count)]
