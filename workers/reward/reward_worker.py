"""The reward role: leases samples, has the pool score them, writes the reward, drops what failed.

    store ─ task, response_text ─▶ RewardWorker ─▶ RewardPool ─▶ child processes
      ▲────────── reward, or dropped/reward_error ──┘

The controller watches `run` end, and asks for `stats`. Evaluation calls `score`.
"""

import json
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import LeaseExpired
from penstock.conf.reward import RewardConfig
from penstock.metering import table
from penstock.metering.meters import Meters
from penstock.store.client.lease import Lease
from penstock.store.client.store_client import StoreClient
from penstock.store.data.rows import Rows
from penstock.workers.reward.reward_result import RewardError, RewardResult, ScoringPool
from penstock.workers.reward.signatures import Response
from penstock.workers.runtime.async_tasks import BusyClock, run_all
from penstock.workers.runtime.serving import ErrorShare

DROP_REASON, NOT_COUNTED = "reward_error", "no_reward"
"""Reasons to drop a sample: its reward failed; the function gave None for it."""
LOGGED_SUM, LOGGED_COUNT = "logged_sum/", "logged_count/"
"""Beginnings of the counts of metrics that the function logs."""
TOKENS = "response_ids"
"""Column of sampled tokens."""
WRITE_AFTER_S = 0.25
"""Longest time, in seconds, that results wait for others of their lease, so that a hanging reward delays no other
sample."""


@dataclass(frozen=True)
class RewardStage:
    """The stage of the dataflow that a worker serves."""

    name: str = "reward"
    column: str = "reward"
    """The column that it writes."""
    text: str = "response_text"
    """The column to score."""
    takes_nan: bool = False
    """True if the column is NaN for a sample that the function does not count; otherwise the sample is dropped."""


REWARD = RewardStage()


class RewardWorker:
    """Scores samples of one reward stage until the store is closed.

    Lifecycle: `start` (loads the function in every process), `run` (returns when the store closes, raises
    `RewardFailure` when too many rewards failed; then it may be called with another), `close`. `score` and `stats` may
    be called at any time in between.
    """

    def __init__(
        self,
        pool: ScoringPool,
        config: RewardConfig,
        stage: RewardStage = REWARD,
        *,
        name: str = "reward-0",
        max_samples: int = 64,
        meters: Meters | None = None,
    ) -> None:
        """`meters`: for its measurements."""
        self.pool, self.name, self.stage = pool, name, stage
        self.max_samples, self._meters = max_samples, meters or Meters()
        self.errors = ErrorShare(config.max_error_share, config.error_window)
        self.num_in_flight = 0
        """Number of samples leased and not scored yet."""
        self._clock = BusyClock()

    async def start(self) -> None:
        await self.pool.start()
        self._meters.add(table.REWARD_SAMPLES, 0)

    async def close(self) -> None:
        await self.pool.close()

    async def run(self, store: StoreClient) -> None:
        """Lease, score and write, in the pool's lanes, until the store closes."""
        await run_all(self._lane(store) for _ in range(self.pool.num_lanes))

    async def score(self, tasks: Sequence[str | Mapping[str, Any]], responses: Sequence[Any]) -> list[RewardResult]:
        """Score responses: a reward, or the `RewardError` in its place, for each. For evaluation: not counted. A
        response is a `Response`, or an environment's answer."""
        texts = [task if isinstance(task, str) else json.dumps(dict(task)) for task in tasks]
        with self._clock.interval():
            return await self.pool.score(responses, texts)

    @property
    def last_error(self) -> str:
        """Error of the sample that failed last; empty if none has."""
        return self.errors.last_error

    @property
    def num_scored(self) -> int:
        """Number of samples so far, also those whose reward failed."""
        return self.errors.succeeded + self.errors.failed + self.errors.not_counted

    def stats(self) -> dict[str, float]:
        """Counts since the start. `busy_s`: seconds in which at least one sample was being scored;
        `process_busy_s`: the same, added up over the processes."""
        return {
            "rewarded": self.errors.succeeded,
            "failed": self.errors.failed,
            "busy_s": self._clock.seconds(),
            "process_busy_s": self.pool.busy_s,
            "replaced_processes": self.pool.replaced,
            **{f"{LOGGED_SUM}{name}": total for name, (total, _) in self.pool.logged.items()},
            **{f"{LOGGED_COUNT}{name}": count for name, (_, count) in self.pool.logged.items()},
        }

    async def _lane(self, store: StoreClient) -> None:
        async with store.leases(self.stage.name, self.max_samples, self.name, ahead=0) as leases:
            async for lease in leases:
                with self._clock.interval(), suppress(LeaseExpired):  # expired: the rows are somebody else's by now
                    await self._serve(store, lease)
                self.errors.check()

    async def _serve(self, store: StoreClient, lease: Lease) -> None:
        """Score the rows of a lease, writing results in as few calls as waiting `WRITE_AFTER_S` allows."""
        known: list[tuple[int, RewardResult]] = []
        leased = written = time.perf_counter()
        rows = lease.rows
        left = len(rows)
        self.num_in_flight += left
        try:
            async for position, result in self.pool.stream(
                responses_of(rows, self.stage.text, lease.version), rows.strings("task")
            ):
                self._count(result)
                self._measure(result, time.perf_counter() - leased)
                known.append((int(rows.row_ids[position]), result))
                left -= 1
                self.num_in_flight -= 1
                if time.perf_counter() - written > WRITE_AFTER_S:
                    self.errors.check()
                    await self._write(store, lease, known)
                    known, written = [], time.perf_counter()
        finally:
            self.num_in_flight -= left
        await self._write(store, lease, known)

    def _count(self, result: RewardResult) -> None:
        if result is None and not self.stage.takes_nan:
            self.errors.leave_out()
        else:
            self.errors.add(str(result) if isinstance(result, RewardError) else None)

    def _measure(self, result: RewardResult, seconds: float) -> None:
        self._meters.observe(table.REWARD_LATENCY, seconds)
        if isinstance(result, RewardError):
            self._meters.add(table.REWARD_ERRORS, reason=result.kind)
        else:
            self._meters.add(table.REWARD_SAMPLES)

    async def _write(self, store: StoreClient, lease: Lease, known: Sequence[tuple[int, RewardResult]]) -> None:
        none = float("nan") if self.stage.takes_nan else None
        values = [(row, none if result is None else result) for row, result in known]
        good = [(row, value) for row, value in values if isinstance(value, float)]
        if good:
            await store.write(lease, [row for row, _ in good], {self.stage.column: [score for _, score in good]})
        if left_out := [row for row, value in values if value is None]:
            await store.drop(lease, left_out, NOT_COUNTED)
        bad: dict[str, list[int]] = {}
        for row, result in known:
            if isinstance(result, RewardError):
                bad.setdefault(str(result), []).append(row)
        for detail, rows in bad.items():
            await store.drop(lease, rows, DROP_REASON, detail)


def responses_of(rows: Rows, text: str = "response_text", version: int = 0) -> list[Response]:
    """The responses of rows, with their tokens where these are there. `text`: the column of texts."""
    texts = rows.strings(text)
    if TOKENS not in rows:
        return [Response(one, version=version) for one in texts]
    tokens = [array("i", ids.tobytes()) for ids in rows.arrays(TOKENS)]
    return [Response(one, ids, version) for one, ids in zip(texts, tokens, strict=True)]
