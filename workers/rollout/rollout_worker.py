"""The pull loop of a rollout worker: prompts out of the store, samples back in, as many groups at a time as the engine
decodes.

    lease groups ─▶ engine.generate (one task a group) ─▶ write response_ids, behavior_logprobs, token_versions, …

An engine that dies ends it with `WorkerDied`; its leases go back. The loop itself, `GroupLoop`, serves both prompts
with one response each and tasks of environments. It never waits for a group while another could start; the store's
credits say how many there may be. A group that the store has given to a second worker as well is aborted once the other
one has answered it.
"""

import asyncio
import hashlib
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from penstock.algorithms.graph.columns import ROUTED_EXPERTS
from penstock.conf.errors import (
    DataError,
    DeadlineExceeded,
    EngineFailure,
    LeaseExpired,
    PromptRefused,
    WeightError,
    WorkerFailed,
)
from penstock.conf.rollout import RolloutConfig
from penstock.store.client.lease import Lease
from penstock.store.client.store_client import StoreClient
from penstock.store.data.rows import Rows
from penstock.store.errors import LeaseSuperseded
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.probing import RecentSamples
from penstock.workers.protocols import Completion, RolloutEngine, Sampling, truncated_by
from penstock.workers.rollout.rollout_engines import EngineMeter
from penstock.workers.runtime.async_tasks import BusyClock, cancel_all
from penstock.workers.runtime.serving import ErrorShare

STAGE, GREEDY_STAGE = "rollout", "greedy_rollout"
BAD_LOGPROBS = "bad_logprobs"
PAUSED, READ_AGAIN = "rollout/paused_s", "rollout/prefilled_again"
"""Counters of an engine, and metrics of a step: see `SamplingProgress`."""
DRAFTED, ACCEPTED = "drafted", "accepted"
"""Counters of an engine's drafted tokens (`rollout.speculation`)."""
ERROR_WINDOW = 100
"""Number of samples over which the share of bad ones is taken."""
LOOK_S = 1.0
"""Seconds between two looks at how many samples wait to be admitted."""
NUM_SHOWN = 5
"""Tokens of a prompt, or names of weights, in a message."""
LeasedGroup = tuple[int, int]
"""A lease and a group of it."""
Written = tuple[int, int]
"""Numbers of samples and of their tokens."""
AnswerGroup = Callable[[StoreClient, Lease, int, Rows], Awaitable[Written | None]]
"""Function that answers one group, by its id, and writes; it returns what is to be counted, None for nothing. Raises
`LeaseSuperseded` and `LeaseExpired`, which are counted, too."""


def sample_seed(run_seed: int, group_id: int) -> int:
    """Seed of a group's first sample (sample i uses seed + i): a pure function, so that a group sampled again is the
    same."""
    digest = hashlib.blake2b(f"{run_seed}/{group_id}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class GroupIntake:
    """How one worker takes groups out of the store, and samples them."""

    name: str
    """Name of the worker."""
    sampling: Sampling
    seed: int | None
    """Seed of the run; None for unseeded sampling."""
    group_size: int
    """Number of samples of a group that the worker makes."""
    max_samples: int
    """Largest number of samples under way."""
    num_workers: int = 1
    """Number of workers of this kind, which share the groups."""
    dropped: frozenset[str] = frozenset()
    """Limits whose truncated samples are dropped (`rollout.truncated`)."""
    max_error_share: float = RolloutConfig.max_error_share
    """Share of the last samples that may have bad log-probabilities."""
    room: Callable[[], int] | None = None
    """Function that returns how many more samples may begin, less those that wait to; None: there is always room."""

    def max_groups(self, num_held: int) -> int:
        """Largest number of groups that are held, where `num_held` are now: those for which there is room, and one more
        as long as less than a group waits."""
        most = max(1, self.max_samples // self.group_size)
        if self.room is None:
            return most
        return min(most, num_held + max(0, 1 + math.ceil(self.room() / self.group_size)))

    def seed_of(self, group_id: int) -> int | None:
        """Seed of a group's first sample."""
        return None if self.seed is None else sample_seed(self.seed, group_id)


class RolloutWorker:
    """Lifecycle: `run` returns when the store is closed; then it may be called with another. `stats` at any time."""

    def __init__(
        self,
        engine: RolloutEngine,
        intake: GroupIntake,
        *,
        timeout_s: float = 1800.0,
        greedy: bool = False,
        meter: EngineMeter | None = None,
        recent: RecentSamples | None = None,
    ) -> None:
        """`timeout_s`: limit of a group, in seconds. `greedy`: serve the greedy stage instead, one response for all
        samples of a group. `meter`: the engine's; None: its work is not measured. `recent`: notes what is written, to
        be scored again."""
        self._engine, self._intake, self._timeout_s, self._greedy = engine, intake, timeout_s, greedy
        self._recent = recent
        self._meter = meter or EngineMeter(engine, None)
        self._errors = ErrorShare(intake.max_error_share, ERROR_WINDOW, "samples", "rollout", EngineFailure)
        stage = GREEDY_STAGE if greedy else STAGE
        self._loop = GroupLoop(stage, intake, self._answer_group, may_be_answered_twice=not greedy)

    async def run(self, store: StoreClient) -> None:
        """Serve the store until it closes. Raises `WorkerDied` and `DeadlineExceeded` of the engine, `EngineFailure`
        when too many samples have bad log-probabilities."""
        await self._loop.run(store)

    def stats(self) -> dict[str, float]:
        return self._loop.stats()

    async def _answer_group(self, store: StoreClient, lease: Lease, group_id: int, rows: Rows) -> Written | None:
        """Generate the responses to one group, then write them."""
        num_samples = 1 if self._greedy else len(rows)
        try:
            completions = await self._generate(group_id, rows, num_samples)
        except DataError as error:
            reason = "invalid_prompt" if isinstance(error, PromptRefused) else "refused_request"
            await store.drop(lease, rows.row_ids, reason, str(error))
            return None
        if self._greedy:
            with suppress(LeaseExpired):
                await store.write(lease, rows.row_ids, {"greedy_text": [completions[0].text] * len(rows)})
            return None
        reasons = [self._drop_reason(completion) for completion in completions]
        fault = ""
        if BAD_LOGPROBS in reasons:
            prompt_ids, bad = rows.arrays("prompt_ids")[0].tolist(), completions[reasons.index(BAD_LOGPROBS)]
            fault = await fault_of(self._engine, self._intake.name, prompt_ids, bad)
        for reason in sorted({*reasons} - {""}):
            lost = [position for position, found in enumerate(reasons) if found == reason]
            detail = f"group {group_id}: {len(lost)} of {len(reasons)}" + (
                f". {fault}" if reason == BAD_LOGPROBS else ""
            )
            await store.drop(lease, rows.row_ids[lost], reason, detail)
        for reason in reasons:
            self._errors.add(fault if reason == BAD_LOGPROBS else None)
        kept = [position for position, reason in enumerate(reasons) if not reason]
        if kept:
            await store.write(lease, rows.row_ids[kept], response_columns([completions[i] for i in kept]))
            if self._recent is not None and "pictures" not in rows:
                prompt_ids = rows.arrays("prompt_ids")[0].tolist()
                self._recent.note(prompt_ids, self._intake.sampling, [completions[i] for i in kept])
        self._errors.check()
        return len(kept), sum(len(completion.token_ids) for completion in completions)

    def _drop_reason(self, completion: Completion) -> str:
        """The reason to drop a response; empty: it is kept."""
        if not completion.token_ids:
            return "empty_response"
        if not completion.is_finite:
            return BAD_LOGPROBS
        return truncated_by(completion.finish_reason) if completion.finish_reason in self._intake.dropped else ""

    async def _generate(self, group_id: int, rows: Rows, num_samples: int) -> list[Completion]:
        prompt_ids, pictures = rows.arrays("prompt_ids")[0].tolist(), prompt_pictures(rows)
        sampling = self._intake.sampling
        sampling = sampling.greedy() if self._greedy else sampling.seeded(self._intake.seed_of(group_id))
        seen = () if pictures is None else (pictures,)
        generation = self._engine.generate(prompt_ids, num_samples, sampling, *seen)
        try:
            with self._meter.sampling(num_samples):
                return await asyncio.wait_for(generation, self._timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{self._intake.name}: group {group_id} ({num_samples} samples, prompt of {len(prompt_ids)} tokens) "
                f"was not done after {self._timeout_s:g} s. Raise rollout.generate_timeout_s or lower "
                "rollout.sampling.max_tokens."
            ) from None


async def fault_of(engine: RolloutEngine, name: str, prompt_ids: Sequence[int], completion: Completion) -> str:
    """Describe a sample that is not finite, and whether the engine's weights may be the cause. `name`: of the engine.
    Raises `WorkerDied`."""
    place = next(index for index, value in enumerate(completion.logprobs) if not math.isfinite(value))
    shown = ", ".join(map(str, prompt_ids[:NUM_SHOWN])) + (", …" if len(prompt_ids) > NUM_SHOWN else "")
    return (
        f"{name}: the log-probability of token {place + 1} of {len(completion.logprobs)} is "
        f"{completion.logprobs[place]}, at version {completion.versions[place]}, after a prompt of {len(prompt_ids)} "
        f"tokens ({shown}). {await _weights_text(engine)}"
    )


async def _weights_text(engine: RolloutEngine) -> str:
    try:
        names = await engine.nonfinite_weights()
    except WeightError as error:
        return f"Whether its weights are finite is not known: {error}"
    if not names:
        return "Its weights are all finite: the cause is in what the engine computes."
    more = ", …" if len(names) > NUM_SHOWN else ""
    return f"{len(names)} of its weights are not finite: {', '.join(names[:NUM_SHOWN])}{more}."


def prompt_pictures(rows: Rows) -> PromptPictures | None:
    """The pictures of a group's prompt; None for a prompt without any."""
    if "pictures" not in rows:
        return None
    encoded, ranges = rows.blobs("pictures")[0], rows.arrays("picture_ranges")[0]
    return PromptPictures.of({"pictures": encoded, "picture_ranges": ranges})


def response_columns(completions: Sequence[Completion]) -> dict[str, list[object]]:
    """The columns that the rollout stage writes, an entry for each completion; token columns as `[T_i]` arrays."""
    columns: dict[str, list[object]] = {
        "response_ids": [np.asarray(completion.token_ids, dtype=np.int32) for completion in completions],
        "response_text": [completion.text for completion in completions],
        "finish_reason": [completion.finish_reason for completion in completions],
        "behavior_logprobs": [np.asarray(completion.logprobs, dtype=np.float32) for completion in completions],
        "token_versions": [np.asarray(completion.versions, dtype=np.int32) for completion in completions],
    }
    if any(completion.routed_experts for completion in completions):
        columns[ROUTED_EXPERTS] = [np.frombuffer(completion.routed_experts, np.uint8) for completion in completions]
    return columns


class GroupLoop:
    """The loop of workers that answer prompts: a task for each group. Lifecycle: `run` returns when the store is
    closed; then it may be called with another."""

    def __init__(self, stage: str, intake: GroupIntake, answer: AnswerGroup, *, may_be_answered_twice: bool) -> None:
        """`may_be_answered_twice`: another worker may be given a group as well."""
        self._stage, self._intake, self._answer_group = stage, intake, answer
        self._is_answered_twice = may_be_answered_twice
        self._clock = BusyClock()
        self._aborted: set[asyncio.Task[None]] = set()
        self._counts = {"samples": 0, "tokens": 0, "groups": 0, "late_groups": 0, "twice_groups": 0}

    def stats(self) -> dict[str, float]:
        """Cumulative counters. `busy_s`: seconds with at least one group in flight. `late_groups`: finished after their
        lease was over. `twice_groups`: another worker had them as well, and was first."""
        return {"busy_s": self._clock.seconds(), **self._counts}

    async def run(self, store: StoreClient) -> None:
        """Answer groups until the store is closed. Raises what a group fails with. However it ends, groups in flight
        are cancelled; a client that has retired finishes them first."""
        groups: dict[asyncio.Task[None], LeasedGroup] = {}
        asking: asyncio.Task[Lease | None] | None = None
        others = await self._other_answers(store)
        try:
            takes_more = True
            while takes_more or groups:
                if takes_more and asking is None and len(groups) < self._intake.max_groups(len(groups)):
                    asking = asyncio.create_task(self._ask(store, len(groups)))
                waits = {*groups, *(task for task in (asking, others) if task is not None)}
                look_s = None if self._intake.room is None else LOOK_S
                done, _ = await asyncio.wait(waits, timeout=look_s, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in groups if task in done]:
                    self._settle(task, groups.pop(task))
                if others is not None and others in done:
                    self._abort(groups, others.result() or ())
                    others = await self._other_answers(store) if others.result() is not None else None
                if asking is not None and asking in done:
                    lease, asking = asking.result(), None
                    if lease is not None:
                        groups |= self._started(store, lease)
                    elif store.has_retired:
                        takes_more = False
                    else:
                        return
        finally:
            await cancel_all({*groups, *(task for task in (asking, others) if task is not None)})

    async def _ask(self, store: StoreClient, num_held: int) -> Lease | None:
        """Lease groups up to the worker's limit and its share."""
        name, most = self._intake.name, self._intake.max_groups(num_held)
        return await store.lease(self._stage, most, name, max_held=most, num_peers=self._intake.num_workers)

    async def _other_answers(self, store: StoreClient) -> "asyncio.Task[list[LeasedGroup] | None] | None":
        """A task that waits for the answers of other workers; None where groups are never answered twice."""
        if not self._is_answered_twice or not (await store.spec()).straggler_factor:
            return None
        return asyncio.create_task(store.superseded())

    def _settle(self, task: "asyncio.Task[None]", place: LeasedGroup) -> None:
        """Raise the error of a group. A cancellation from outside would lose the group silently."""
        is_ours = task in self._aborted
        self._aborted.discard(task)
        if not task.cancelled():
            task.result()
        elif not is_ours:
            raise WorkerFailed(f"{self._intake.name}: the task of group {place[1]} was cancelled by what it called.")

    def _abort(self, groups: "dict[asyncio.Task[None], LeasedGroup]", answered: Sequence[LeasedGroup]) -> None:
        """Cancel groups that another worker has answered first."""
        for task, place in groups.items():
            if place in answered and task.cancel():
                self._counts["twice_groups"] += 1
                self._aborted.add(task)

    def _started(self, store: StoreClient, lease: Lease) -> "dict[asyncio.Task[None], LeasedGroup]":
        """Start a task for each group of the lease."""
        tasks = {}
        for group_id, positions in lease.rows.groups():
            self._clock.enter()
            task = asyncio.create_task(self._answer(store, lease, group_id, lease.rows.select(positions)))
            task.add_done_callback(lambda _: self._clock.leave())
            tasks[task] = lease.id, group_id
        return tasks

    async def _answer(self, store: StoreClient, lease: Lease, group_id: int, rows: Rows) -> None:
        try:
            written = await self._answer_group(store, lease, group_id, rows)
        except LeaseSuperseded:
            self._counts["twice_groups"] += 1
        except LeaseExpired:
            self._counts["late_groups"] += 1
        else:
            if written is not None:
                self._counts["groups"] += 1
                self._counts["samples"] += written[0]
                self._counts["tokens"] += written[1]
