"""Attempts at the tasks of an environment: played from a task and a seed to a trajectory, and written as rows.

    lease groups ─▶ an attempt for each row, concurrently ─▶ write what is trained, drop the rest with its reason

    completed   `run` returned
    truncated   a limit was reached: turns, tokens, context or time; or one cut the last turn
    rejected    the environment excluded it
    failed      it raised, had the policy sample nothing, or its time was over while its answer was scored

A failure that is not the policy's doing (`InfrastructureError`) is played again before it counts. Truncated attempts
are trained as far as they went, unless `rollout.truncated` says otherwise. Rejected and failed attempts are not
trained, and never count as a reward of zero.

The loop over leases is that of `rollout/rollout_worker.py`.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.algorithms.graph.columns import PROMPT_PICTURES
from penstock.conf.environment import EnvironmentConfig
from penstock.conf.errors import (
    AttemptOver,
    DataError,
    InfrastructureError,
    LeaseExpired,
    LimitReached,
    PenstockError,
    Rejected,
    WorkspaceError,
)
from penstock.metering import table
from penstock.metering.meters import Meters
from penstock.store.client.lease import Lease
from penstock.store.client.store_client import StoreClient
from penstock.store.data.rows import Rows
from penstock.workers.agents.admission import AdmissionControl, AttemptGate
from penstock.workers.agents.environment import Context, Task, finite
from penstock.workers.agents.gateway.http_server import AttemptKeys
from penstock.workers.agents.gateway.turn_sampler import TurnSampler
from penstock.workers.agents.toolbox import Toolbox, ToolThreads
from penstock.workers.agents.trajectory import (
    COMPLETED,
    FAILED,
    REJECTED,
    TRUNCATED,
    AttemptOutcome,
    Trajectory,
    row_columns,
)
from penstock.workers.protocols import Sampling, truncated_by
from penstock.workers.rollout.rollout_worker import STAGE, GroupIntake, GroupLoop, Written
from penstock.workers.runtime.async_tasks import (
    TimeBudget,
    UserCodeExit,
    call_user_code,
    contained_result,
    run_contained,
    silence_failure,
    start_contained,
)
from penstock.workers.runtime.serving import ErrorShare
from penstock.workers.sandbox.execution import Limits
from penstock.workers.sandbox.sandbox import Sandbox
from penstock.workers.sandbox.workspace import LIMITS, Workspace, Workspaces

GRACE_S = 5.0
"""Seconds for an attempt that is cancelled to end; after that it is left running."""
TEARDOWN_S = 30.0
PAUSE_S = 1.0
"""Seconds before an attempt is played again the first time; each further pause is twice as long."""
INFRASTRUCTURE = "infrastructure"
"""Reason of a failure that is tried again."""
MakeSampler = Callable[[Sampling], TurnSampler]
PICTURES = PROMPT_PICTURES[0]
ERROR_WINDOW = 100
"""Number of attempts over which the share of failures is taken."""


@dataclass(frozen=True)
class AttemptResult:
    """The result of an attempt for evaluation."""

    outcome: AttemptOutcome
    reward: float = 0.0
    """Reward by the environment; of the policy of `flow.rollout`, where several are trained."""
    text: str = ""
    """Text of the last answer, without thinking and calls, for reward functions. Empty for an attempt that is not
    trained."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards of the policies that spoke, where several are trained."""

    @classmethod
    def of(cls, attempt: Trajectory) -> "AttemptResult":
        spoke = {turn.policy for turn in attempt.turns} if attempt.outcome.is_trained else set()
        rewards = {name: reward for name, reward in attempt.rewards.items() if name in spoke}
        own = attempt.of_policy(attempt.policy)
        return (
            cls(own.outcome, own.reward, own.text, rewards)
            if own.outcome.is_trained
            else cls(own.outcome, rewards=rewards)
        )


class AttemptRunner:
    """Plays the attempts of one environment. Lifecycle: any number of attempts, concurrently; then `close`."""

    def __init__(
        self,
        environment: Any,
        config: EnvironmentConfig,
        make_sampler: MakeSampler,
        keys: AttemptKeys,
        *,
        counts: Counter[str] | None = None,
        meters: Meters | None = None,
        gate: AttemptGate | None = None,
    ) -> None:
        """`keys`: admit agents over HTTP. `counts`, `meters`: for metrics. `gate`: of the actor; None: as many attempts
        are under way as the configuration allows."""
        self._meters = meters or Meters()
        self._meters.add(table.ENVIRONMENT_TURNS, 0)
        self._meters.add(table.ENVIRONMENT_ATTEMPTS, 0, outcome=COMPLETED)
        self.environment = environment
        self._config, self.make_sampler, self._keys = config, make_sampler, keys
        self._threads = ToolThreads(config.tool_threads)
        self._gate = gate or AttemptGate(AdmissionControl(config.max_attempts))
        self._gate_apart = AttemptGate(AdmissionControl(config.max_attempts))
        """The gate of attempts that other engines play."""
        self.counts = counts if counts is not None else Counter()
        self._sandboxes: dict[Limits, Sandbox] = {}
        self._workspaces: Workspaces | None = None
        self.num_in_flight = self.num_done = 0
        """Numbers of attempts."""

    async def attempt(self, task: Task, sampling: Sampling, make_sampler: MakeSampler | None = None) -> Trajectory:
        """Play an attempt. `sampling`: with the attempt's seed. `make_sampler`: where other engines play it than those
        of the runner. It waits while as many are under way as the engines have memory for. Raises what ends a run:
        engines that are gone for good."""
        make = make_sampler or self.make_sampler
        gate = self._gate if make_sampler is None else self._gate_apart
        number = 0
        while True:
            async with gate.place(sampling.priority) as place:
                place.conversation = sampler = make(sampling)
                found = await self._attempt(task, sampler, is_last=number == self._config.retries)
            if found is not None:
                return found
            self.counts["attempts_retried"] += 1
            await asyncio.sleep(PAUSE_S * 2**number)  # without a place: another attempt has it meanwhile
            number += 1

    async def _attempt(self, task: Task, sampler: TurnSampler, *, is_last: bool) -> Trajectory | None:
        """Play it once. None: it is to be played again, unless this was the last time."""
        base_url, key = self._keys.admit(sampler)
        ctx = Context(sampler, base_url, key, self._toolbox, self._sandbox, self._workspace, self.counts)
        self.num_in_flight += 1
        began = time.perf_counter()
        try:
            outcome = await self._play(task, ctx, sampler)
        finally:
            sampler.end(AttemptOver("the attempt has ended"))
            await self._tear_down(task, ctx)
            self.num_in_flight -= 1
            self.num_done += 1
            self._keys.dismiss(key)
        if outcome.reason == INFRASTRUCTURE and not is_last:
            return None
        if outcome.is_trained and not sampler.turns:
            why = outcome.detail or "the environment had the policy sample nothing"
            outcome = AttemptOutcome(FAILED, "no_turn", why)
        self.counts["turns_cut"] += sum(turn.is_cut for turn in sampler.turns)
        self.counts[f"attempts_{outcome.kind}"] += 1
        self._meters.add(table.ENVIRONMENT_ATTEMPTS, outcome=outcome.kind)
        self._meters.add(table.ENVIRONMENT_TURNS, len(sampler.turns))
        self._meters.observe(table.ENVIRONMENT_ATTEMPT, time.perf_counter() - began)
        if outcome.kind == TRUNCATED:
            self.counts[truncated_by(outcome.reason)] += 1
        total, policy = ctx.total_reward, sampler.speaker
        rewards = {name: total + own for name, own in ctx.policy_rewards.items()}
        said = _transcript(sampler, outcome, rewards or {policy: total})
        own = rewards.get(policy, total)
        return Trajectory(sampler.turns, outcome, own, dict(ctx.turn_rewards), said, policy, rewards)

    async def group(
        self, task: Task, samplings: Sequence[Sampling], make_sampler: MakeSampler | None = None
    ) -> list[Trajectory]:
        """Play an attempt for each sampling, concurrently, with the rewards of `score_group` where there is one.
        `make_sampler`: as of `attempt`."""
        playing = [asyncio.ensure_future(self.attempt(task, sampling, make_sampler)) for sampling in samplings]
        try:
            found = list(await asyncio.gather(*playing))
        finally:
            for attempt in playing:
                attempt.cancel()
        score = getattr(self.environment, "score_group", None)
        kept = [index for index, attempt in enumerate(found) if attempt.outcome.is_trained]
        if score is None or not kept:
            return found
        try:
            rewards = await run_contained(
                _group_rewards(score, task, [found[index] for index in kept]), self._config.timeout_s
            )
            for index, reward in zip(kept, rewards, strict=True):
                found[index] = found[index].with_reward(reward)
        except Exception as error:  # noqa: BLE001 - it is the environment's, whatever it raises
            for index in kept:
                found[index] = found[index].ended(_failure(error))
        return found

    async def _play(self, task: Task, ctx: Context, sampler: TurnSampler) -> AttemptOutcome:
        budget = TimeBudget(self._config.timeout_s)
        playing = start_contained(self._set_up_and_run(task, ctx), budget)
        try:
            in_time = await budget.ends_in_time(playing)
        except asyncio.CancelledError:
            await self._cancel(playing)
            raise
        if not in_time:
            text = f"the attempt took longer than {self._config.timeout_s:g} s (environment.timeout_s)"
            is_scoring = ctx.is_scoring
            sampler.end(LimitReached("time", text))
            await self._cancel(playing)
            if is_scoring and sampler.turns:
                return AttemptOutcome(FAILED, "timeout_in_reward", f"{text}, and its answer was not scored yet")
            return AttemptOutcome(TRUNCATED, "time", text) if sampler.turns else AttemptOutcome(FAILED, "timeout", text)
        error = _raised(playing)
        if isinstance(error, InfrastructureError):
            return AttemptOutcome(FAILED, INFRASTRUCTURE, str(error))
        if isinstance(error, LimitReached) or (error is None and sampler.limit):
            return AttemptOutcome(
                TRUNCATED, error.limit if isinstance(error, LimitReached) else sampler.limit, str(error)
            )
        if error is None:
            return self._completed(sampler)
        if isinstance(error, Rejected):
            return AttemptOutcome(REJECTED, f"rejected_{_metric_word(error.reason)}", str(error))
        if sampler.limit:  # it did not let the end of its turns pass as it was
            return AttemptOutcome(TRUNCATED, sampler.limit, str(error))
        if isinstance(error, PenstockError) and not isinstance(error, AttemptOver | DataError | WorkspaceError):
            raise error
        return _failure(error)

    async def _set_up_and_run(self, task: Task, ctx: Context) -> None:
        if hasattr(self.environment, "setup"):
            try:
                await call_user_code(self.environment.setup, task, ctx)
            except PenstockError:
                raise
            except Exception as error:
                raise InfrastructureError(f"setup: {type(error).__name__}: {error}") from error
        await call_user_code(self.environment.run, task, ctx)

    async def _tear_down(self, task: Task, ctx: Context) -> None:
        if not hasattr(self.environment, "setup") or not hasattr(self.environment, "teardown"):
            return
        try:
            await run_contained(call_user_code(self.environment.teardown, task, ctx), TEARDOWN_S)
        except Exception:  # noqa: BLE001 - it is the environment's, whatever it raises
            self.counts["teardown_failed"] += 1

    def _completed(self, sampler: TurnSampler) -> AttemptOutcome:
        """The outcome after `run` has returned. Where a limit cut the last turn, its answer is not complete."""
        if not sampler.turns or not sampler.turns[-1].is_cut:
            return AttemptOutcome()
        if sampler.num_sampled >= self._config.max_tokens:
            text = f"its last turn was cut by environment.max_tokens={self._config.max_tokens}"
            return AttemptOutcome(TRUNCATED, "tokens", text)
        text = "its last turn was cut by rollout.sampling.max_tokens or the model's context"
        return AttemptOutcome(TRUNCATED, "length", text)

    async def _cancel(self, playing: "asyncio.Task[None]") -> None:
        """Ask an attempt to end. One that ignores this is left running, and gets nothing sampled any more."""
        playing.cancel()
        await asyncio.wait([playing], timeout=GRACE_S)
        if not playing.done():
            self.counts["attempts_stuck"] += 1
        silence_failure(playing)

    async def close(self) -> None:
        """Close the environment, and the sandboxes and workspaces that it has used."""
        for sandbox in self._sandboxes.values():
            sandbox.close()
        if self._workspaces is not None:
            await self._workspaces.close()
        if hasattr(self.environment, "aclose"):
            await run_contained(call_user_code(self.environment.aclose))

    def _sandbox(self, limits: Limits | None) -> Sandbox:
        limits = limits or Limits.of(self._config.sandbox)
        if limits not in self._sandboxes:
            self._sandboxes[limits] = Sandbox(limits, num_workers=self._config.sandbox.num_workers)
        return self._sandboxes[limits]

    def _workspace(
        self, *arguments: Any, limits: Limits | None = None, **options: Any
    ) -> AbstractAsyncContextManager[Workspace]:
        self._workspaces = self._workspaces or Workspaces()
        limits = limits or LIMITS
        if self._config.sandbox.require_cgroup:
            limits = replace(limits, require_cgroup=True)
        return self._workspaces.open(*arguments, limits=limits, **{"disk": self._config.workspace_disk, **options})

    def _toolbox(self, tools: Any) -> Toolbox:
        return Toolbox(tools, self._config, self._threads, self.counts)


async def _group_rewards(
    score: Callable[..., Any], task: Task, attempts: list[Trajectory]
) -> list[float | dict[str, float]]:
    """The rewards of `score_group`. Raises `ValueError` for what is no finite number."""
    return [
        {name: finite(own) for name, own in reward.items()} if isinstance(reward, Mapping) else finite(reward)
        for reward in await score(task, attempts)
    ]


def _raised(playing: "asyncio.Task[None]") -> Exception | None:
    """The error that an attempt ended with; None for none."""
    try:
        contained_result(playing)
    except Exception as error:  # noqa: BLE001 - it is the environment's, whatever it raises
        return error
    return None


def _failure(error: Exception) -> AttemptOutcome:
    if isinstance(error, UserCodeExit):
        return AttemptOutcome(FAILED, "environment_error", str(error))
    return AttemptOutcome(FAILED, "environment_error", f"{type(error).__name__}: {error}")


def _metric_word(reason: str) -> str:
    """The reason in a form that a metric's name can have."""
    return re.sub(r"\W+", "_", reason).strip("_")[:40] or "rejected"


def _transcript(sampler: TurnSampler, outcome: AttemptOutcome, rewards: Mapping[str, float]) -> list[dict[str, Any]]:
    """Messages for people: the last conversation of each policy, with the ids of its turns, and how it ended."""
    end = outcome.kind if not outcome.reason else f"{outcome.kind}: {outcome.reason}"
    turns = {id(turn.message): {"turn": turn.id} for turn in sampler.turns}
    said: list[dict[str, Any]] = []
    for name, reward in rewards.items():
        own = {"policy": name} if name else {}
        said += [{**message, **turns.get(id(message), {}), **own} for message in sampler.last_messages.get(name, ())]
        said.append({"role": "outcome", "content": end, "reward": reward, **own})
    return said


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

    def __init__(
        self,
        runner: AttemptRunner,
        intake: GroupIntake,
        errors: ErrorShare,
        columns: AttemptColumns,
        policies: Sequence[str] = ("",),
    ) -> None:
        """`policies`: those that are trained, each of which has a row in every attempt: row k * G + i of a group of G
        attempts is that of policy k in attempt i. An empty name: there is one."""
        self._policies = policies
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
        size = self._intake.group_size
        places = [divmod(row, size) for row in (rows.row_ids - group_id * size * len(self._policies)).tolist()]
        numbers = sorted({number for _, number in places})
        played = dict(zip(numbers, await self._runner.group(task, self._samplings(group_id, numbers)), strict=True))
        for outcome in (attempt.outcome for attempt in played.values()):
            self._errors.add(outcome.detail if outcome.kind == FAILED else None)
        attempts = [
            played[number].without(self._intake.dropped).of_policy(self._policies[policy]) for policy, number in places
        ]
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
            if not outcome.is_trained:
                lost.setdefault((outcome.reason, outcome.detail), []).append(row)
        for (reason, detail), row_ids in lost.items():
            with suppress(LeaseExpired):
                await store.drop(lease, row_ids, reason, detail)

    def _samplings(self, group_id: int, numbers: Sequence[int]) -> list[Sampling]:
        """Samplings of the attempts of these numbers: the seeds that the group's responses would have without an
        environment. Groups that were admitted earlier, whose tokens would be too old first, are served first."""
        sampling, first = replace(self._intake.sampling, priority=group_id), self._intake.seed_of(group_id)
        return [sampling if first is None else sampling.seeded(first + index) for index in numbers]
