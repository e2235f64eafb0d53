"""The pull loop of a rollout worker: prompts out of the store, samples back in, as many groups at a time as the engine
decodes.

    lease groups ─▶ engine.generate (one task a group) ─▶ write response_ids, behavior_logprobs, token_versions, …

The loop itself is `groups.py`'s. An engine that dies ends it with `WorkerDied`; its leases go back.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from penstock.conf.errors import DataError, DeadlineExceeded, LeaseExpired, PromptRefused
from penstock.store.client.client import StoreClient
from penstock.store.client.lease import Lease
from penstock.store.data.rows import Rows
from penstock.store.errors import AnsweredByAnother
from penstock.workers.protocols import Completion, RolloutEngine, Sampling
from penstock.workers.rollout.groups import GroupLoop

STAGE, GREEDY_STAGE = "rollout", "greedy_rollout"


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
        self._greedy = greedy
        self._engine = engine
        self._sampling = sampling
        self._name = name
        self._seed = seed
        self._timeout_s = generate_timeout_s
        self._loop = GroupLoop(
            GREEDY_STAGE if greedy else STAGE, name, self._roll,
            max_groups=max(1, max_concurrent_samples // num_samples), num_workers=num_workers, hears_answers=not greedy,
        )  # fmt: skip
        self._counts = {"samples": 0, "tokens": 0, "groups": 0, "late_groups": 0, "twice_groups": 0}

    async def run(self, store: StoreClient) -> None:
        """Serve the store until it closes. Raises `WorkerDied` and `DeadlineExceeded` of the engine."""
        await self._loop.run(store)

    def stats(self) -> dict[str, float]:
        """Cumulative counters. `busy_s`: seconds with at least one group in flight. `late_groups`: finished after their
        lease was over. `twice_groups`: another engine had them as well, and was first."""
        twice = self._counts["twice_groups"] + self._loop.num_aborted
        return {"busy_s": self._loop.busy_s, **self._counts, "twice_groups": twice}

    async def _roll(self, store: StoreClient, lease: Lease, group_id: int, rows: Rows) -> None:
        """Generate the responses to one group, then write them."""
        num_samples = 1 if self._greedy else len(rows)
        try:
            completions = await self._generate(group_id, rows.arrays("prompt_ids")[0].tolist(), num_samples)
        except DataError as error:
            reason = "invalid_prompt" if isinstance(error, PromptRefused) else "refused_request"
            await store.drop(lease, rows.row_ids, reason, str(error))
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
    """The columns that the rollout stage writes, an entry for each completion; token columns as `[T_i]` arrays."""
    return {
        "response_ids": [np.asarray(completion.token_ids, dtype=np.int32) for completion in completions],
        "response_text": [completion.text for completion in completions],
        "finish_reason": [completion.finish_reason for completion in completions],
        "behavior_logprobs": [np.asarray(completion.logprobs, dtype=np.float32) for completion in completions],
        "token_versions": [np.asarray(completion.versions, dtype=np.int32) for completion in completions],
    }
