"""The pull loop of a rollout worker: prompts out of the store, samples back in, as many groups at a time as the engine
decodes.

    lease groups ─▶ engine.generate (one task a group) ─▶ write response_ids, behavior_logprobs, token_versions, …

Run by the Ray shell `actor.py` and, in-process, by tests and simulations. The loop never waits for a group while
another could start; the store's credits say how many there may be. A group that the store has given to a second engine
as well is aborted once the other one has answered it. An engine that dies ends the loop with `WorkerDied`,
which ends the run; its leases go back.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from penstock.conf.errors import DataError, DeadlineExceeded, LeaseExpired
from penstock.store.client.client import StoreClient
from penstock.store.client.lease import Lease
from penstock.store.data.rows import Rows
from penstock.store.errors import AnsweredByAnother
from penstock.workers.concurrent_tasks import BusyClock, cancel_all
from penstock.workers.protocols import Completion, RolloutEngine, Sampling

STAGE, GREEDY_STAGE = "rollout", "greedy_rollout"
Place = tuple[int, int]
"""A lease and a group of it."""


def sample_seed(run_seed: int, group_id: int) -> int:
    """Seed of a group's first sample (sample i uses seed + i): a pure function, so a group re-rolled elsewhere is the
    same."""
    digest = hashlib.blake2b(f"{run_seed}/{group_id}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


class RolloutWorker:
    """Lifecycle: `run` returns when the store is closed; then it may be called with another. `stats` at any time."""

    def __init__(
        self,
        engine: RolloutEngine,
        sampling: Sampling,
        name: str,
        seed: int | None,
        *,
        num_samples: int,
        max_concurrent_samples: int,
        generate_timeout_s: float = 1800.0,
        greedy: bool = False,
        num_workers: int = 1,
    ) -> None:
        """`seed`: of the run, None for unseeded sampling. `num_samples`: samples in a group. `greedy`: serve the
        greedy stage instead, one response for all samples of a group. `num_workers`: of this kind, which share the
        groups."""
        self._stage = GREEDY_STAGE if greedy else STAGE
        self._greedy = greedy
        self._engine = engine
        self._sampling = sampling
        self._name = name
        self._seed = seed
        self._num_samples = num_samples
        self._max_groups = max(1, max_concurrent_samples // num_samples)
        self._timeout_s = generate_timeout_s
        self._num_workers = num_workers
        self._clock = BusyClock()
        self._counts = {"samples": 0, "tokens": 0, "groups": 0, "late_groups": 0, "twice_groups": 0}

    async def run(self, store: StoreClient) -> None:
        """Raises `WorkerDied` and `DeadlineExceeded` of the engine. However it ends, groups in flight are cancelled; a
        client that has retired finishes them first."""
        groups: dict[asyncio.Task[None], Place] = {}
        asking: asyncio.Task[Lease | None] | None = None
        hearing = await self._hearing(store)
        try:
            takes_more = True
            while takes_more or groups:
                if takes_more and asking is None and len(groups) < self._max_groups:
                    asking = asyncio.create_task(self._ask(store))
                waits = {*groups, *(task for task in (asking, hearing) if task is not None)}
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in groups if task in done]:
                    del groups[task]
                    if not task.cancelled():
                        task.result()
                if hearing is not None and hearing in done:
                    self._abort(groups, hearing.result() or ())
                    hearing = await self._hearing(store) if hearing.result() is not None else None
                if asking is not None and asking in done:
                    lease, asking = asking.result(), None
                    if lease is not None:
                        groups |= self._started(store, lease)
                    elif store.has_retired:
                        takes_more = False
                    else:
                        return
        finally:
            await cancel_all({*groups, *(task for task in (asking, hearing) if task is not None)})

    def stats(self) -> dict[str, float]:
        """Cumulative. `busy_s`: seconds with at least one group in flight. `late_groups`: finished after their lease
        was over. `twice_groups`: another engine had them as well, and was first."""
        return {"busy_s": self._clock.seconds(), **self._counts}

    async def _ask(self, store: StoreClient) -> Lease | None:
        """As many groups as there is room for when they come, and no more than the share of one worker."""
        most = self._max_groups
        return await store.lease(self._stage, most, self._name, max_held=most, num_peers=self._num_workers)

    async def _hearing(self, store: StoreClient) -> "asyncio.Task[list[Place] | None] | None":
        """Waits for the answers of other engines; None where groups are never sampled twice."""
        if self._greedy or not (await store.spec()).straggler_factor:
            return None
        return asyncio.create_task(store.answered())

    def _abort(self, groups: "dict[asyncio.Task[None], Place]", answered: Sequence[Place]) -> None:
        """Another engine was first."""
        for task, place in groups.items():
            if place in answered and task.cancel():
                self._counts["twice_groups"] += 1

    def _started(self, store: StoreClient, lease: Lease) -> "dict[asyncio.Task[None], Place]":
        """A task for each group of the lease."""
        tasks = {}
        for group_id, positions in lease.rows.groups():
            self._clock.enter()
            task = asyncio.create_task(self._roll(store, lease, group_id, lease.rows.select(positions)))
            task.add_done_callback(lambda _: self._clock.leave())
            tasks[task] = lease.id, group_id
        return tasks

    async def _roll(self, store: StoreClient, lease: Lease, group_id: int, rows: Rows) -> None:
        """One group: generate, then write."""
        num_samples = 1 if self._greedy else len(rows)
        try:
            completions = await self._generate(group_id, rows.arrays("prompt_ids")[0].tolist(), num_samples)
        except DataError as error:
            await store.drop(lease, rows.row_ids, "invalid_prompt", str(error))
            return
        if self._greedy:
            with suppress(LeaseExpired):
                await store.write(lease, rows.row_ids, {"greedy_text": [completions[0].text] * len(rows)})
            return
        kept = [position for position, completion in enumerate(completions) if completion.token_ids]
        empty = [position for position, completion in enumerate(completions) if not completion.token_ids]
        try:
            if empty:
                await store.drop(
                    lease, rows.row_ids[empty], "empty_response", f"group {group_id}: no token was sampled"
                )
            if kept:
                await store.write(lease, rows.row_ids[kept], response_columns([completions[i] for i in kept]))
        except AnsweredByAnother:
            self._counts["twice_groups"] += 1
            return
        except LeaseExpired:
            self._counts["late_groups"] += 1
            return
        self._counts["groups"] += 1
        self._counts["samples"] += len(kept)
        self._counts["tokens"] += sum(len(completion.token_ids) for completion in completions)

    async def _generate(self, group_id: int, prompt_ids: list[int], num_samples: int) -> list[Completion]:
        seed = None if self._seed is None else sample_seed(self._seed, group_id)
        sampling = self._sampling.greedy() if self._greedy else self._sampling.seeded(seed)
        generation = self._engine.generate(prompt_ids, num_samples, sampling)
        try:
            return await asyncio.wait_for(generation, self._timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._name}: group {group_id} ({num_samples} samples, prompt of {len(prompt_ids)} tokens) was not "
                f"done after {self._timeout_s:g} s. Raise rollout.generate_timeout_s or lower "
                "rollout.sampling.max_tokens."
            ) from None


def response_columns(completions: Sequence[Completion]) -> dict[str, list[object]]:
    """The columns that the rollout stage writes, one entry a completion; token columns as `[T_i]` arrays."""
    return {
        "response_ids": [np.asarray(completion.token_ids, dtype=np.int32) for completion in completions],
        "response_text": [completion.text for completion in completions],
        "finish_reason": [completion.finish_reason for completion in completions],
        "behavior_logprobs": [np.asarray(completion.logprobs, dtype=np.float32) for completion in completions],
        "token_versions": [np.asarray(completion.versions, dtype=np.int32) for completion in completions],
    }
