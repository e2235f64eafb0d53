"""How attempts end, whatever an environment does."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.algorithms.catalogue import dataflow_of
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.algorithms.losses import ppo_clip_loss
from penstock.conf.errors import DeadlineExceeded, LimitReached
from penstock.metering.meters import Meters
from penstock.orchestrator.configuration.compose import load_config
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store import Store
from penstock.store.spec import StoreSpec
from penstock.workers.agents.attempts import AttemptColumns, AttemptResult, EnvironmentWorker
from penstock.workers.agents.environment import Task
from penstock.workers.agents.scoring import NUM_PROCESSES, Scoring
from penstock.workers.agents.trajectory import COMPLETED, FAILED, REJECTED, TRUNCATED, row_columns, segments_of
from penstock.workers.protocols import Sampling
from penstock.workers.rollout.rollout_worker import GroupIntake
from penstock.workers.runtime.async_tasks import UserCodeExit, contained_task_factory
from penstock.workers.runtime.serving import ErrorShare
from tests.metering.measured import measured
from tests.workers.agents.played import TASK, Played, ScriptedEngines, make_runner, play


def say(text: str) -> Any:
    return lambda prompt, sampling: text


def asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def talk(ctx: Any, turns: int = 2) -> None:
    messages = asked("hello")
    for _ in range(turns):
        turn = await ctx.sample(messages)
        messages = [*messages, turn.message, {"role": "user", "content": "go on"}]


def test_turns_that_go_on_are_one_segment_of_the_tokens_that_were_sampled() -> None:
    async def run(ctx: Any) -> None:
        await talk(ctx)
        ctx.reward(0.5, ctx.turns[0])
        ctx.reward(1.0)

    attempt, counts = play(Played(run), say("yes"))
    assert attempt.outcome.kind == COMPLETED
    assert (attempt.reward, attempt.turn_rewards) == (1.5, {0: 0.5})
    assert len(segments_of(attempt.turns)) == 1
    assert [turn.parent for turn in attempt.turns] == [None, 0]
    assert counts["turns"] == 2
    assert [message["content"] for message in attempt.said] == ["hello", "yes", "go on", "yes", "completed"]


def test_the_first_turn_has_the_seed_of_a_response_and_later_ones_their_own() -> None:
    engines = ScriptedEngines(say("yes"))
    runner = make_runner(Played(talk), engines)
    asyncio.run(runner.attempt(TASK, Sampling(max_tokens=8, seed=5)))
    first, second = [sampling.seed for _, sampling in engines.asked]
    assert first == 5
    assert second not in (None, 5)
    asyncio.run(runner.attempt(TASK, Sampling(max_tokens=8, seed=5)))
    assert [sampling.seed for _, sampling in engines.asked] == [first, second] * 2


def test_an_attempt_that_never_ends_is_truncated_by_its_turns() -> None:
    attempt, counts = play(Played(lambda ctx: talk(ctx, 1000)), say("y"), max_turns=3)
    assert (attempt.outcome.kind, attempt.outcome.reason, len(attempt.turns)) == (TRUNCATED, "turns", 3)
    assert (counts["attempts_truncated"], counts["truncated_by_turns"]) == (1, 1)


def test_an_attempt_is_rejected_by_the_limits_that_a_run_drops() -> None:
    attempt, _ = play(Played(lambda ctx: talk(ctx, 1000)), say("y"), max_turns=3)
    assert attempt.without({"time", "length"}) is attempt
    outcome = attempt.without({"turns"}).outcome
    assert (outcome.kind, outcome.reason, outcome.is_trained) == (REJECTED, "truncated_by_turns", False)


def test_sampled_tokens_are_limited_too() -> None:
    attempt, _ = play(Played(lambda ctx: talk(ctx, 1000)), say("yes"), max_tokens=10)
    assert (attempt.outcome.kind, attempt.outcome.reason) == (TRUNCATED, "tokens")
    assert attempt.num_sampled == 10


async def ask_once(ctx: Any) -> None:
    await ctx.sample(asked("hello"))
    ctx.reward(1.0)


def test_an_attempt_whose_last_turn_was_cut_is_truncated_and_trained() -> None:
    cut = Sampling(max_tokens=5)
    attempt, counts = play(Played(ask_once), say("a long answer"), sampling=cut)
    assert (attempt.outcome.kind, attempt.outcome.reason, attempt.reward) == (TRUNCATED, "length", 1.0)
    assert attempt.outcome.is_trained
    assert row_columns([attempt])["finish_reason"] == ["length"]
    assert (counts["attempts_truncated"], counts["truncated_by_length"], counts["turns_cut"]) == (1, 1, 1)


def test_a_turn_that_the_attempts_limit_has_cut_is_truncated_by_its_tokens() -> None:
    attempt, counts = play(Played(ask_once), say("a long answer"), max_tokens=5)
    assert (attempt.outcome.kind, attempt.outcome.reason, counts["turns_cut"]) == (TRUNCATED, "tokens", 1)


def test_a_turn_that_ends_by_itself_or_as_short_as_it_was_asked_for_is_complete() -> None:
    async def choose(ctx: Any) -> None:
        await ctx.sample(asked("a or b?"), max_tokens=1)

    attempt, counts = play(Played(choose), say("a, since"))
    assert (attempt.outcome.kind, len(attempt.turns[0].output_ids), counts["turns_cut"]) == (COMPLETED, 1, 0)
    attempt, counts = play(Played(choose), say("a, since"), max_tokens=1)
    assert (attempt.outcome.kind, counts["turns_cut"]) == (COMPLETED, 0)
    assert play(Played(ask_once), say("yes"), sampling=Sampling(max_tokens=4))[0].outcome.kind == COMPLETED


def test_a_cut_turn_that_the_attempt_goes_on_from_counts_and_truncates_nothing() -> None:
    def script(prompt: str, sampling: Sampling) -> str:
        return "yes" if "go on" in prompt else "a long answer"

    attempt, counts = play(Played(talk), script, sampling=Sampling(max_tokens=5))
    assert (attempt.outcome.kind, counts["turns_cut"]) == (COMPLETED, 1)


def test_a_conversation_that_outgrows_the_model_is_truncated() -> None:
    async def run(ctx: Any) -> None:
        messages = asked("hello")
        while True:
            turn = await ctx.sample(messages)
            messages += [turn.message, {"role": "user", "content": "x" * 60}]

    attempt, _ = play(Played(run), say("yes"))
    assert (attempt.outcome.kind, attempt.outcome.reason) == (TRUNCATED, "context")
    assert all(len(turn.prompt_ids) + len(turn.output_ids) <= 200 for turn in attempt.turns)


def test_a_limit_that_the_environment_swallows_still_truncates() -> None:
    async def run(ctx: Any) -> None:
        try:
            await talk(ctx, 1000)
        except LimitReached:
            ctx.reward(1.0)

    attempt, _ = play(Played(run), say("y"), max_turns=2)
    assert (attempt.outcome.kind, attempt.outcome.reason, attempt.reward) == (TRUNCATED, "turns", 1.0)


def test_one_that_turns_the_limit_into_an_error_of_its_own_is_truncated_as_well() -> None:
    async def run(ctx: Any) -> None:
        try:
            await talk(ctx, 1000)
        except LimitReached:
            raise RuntimeError("the agent gave up") from None

    assert play(Played(run), say("y"), max_turns=2)[0].outcome.kind == TRUNCATED


def test_what_raises_fails_and_is_no_reward_of_zero() -> None:
    async def run(ctx: Any) -> None:
        await talk(ctx)
        raise ValueError("the game crashed")

    attempt, counts = play(Played(run), say("y"))
    assert (attempt.outcome.kind, attempt.outcome.reason) == (FAILED, "environment_error")
    assert attempt.outcome.detail == "ValueError: the game crashed"
    assert not attempt.outcome.is_trained
    assert counts["attempts_failed"] == 1


def test_what_is_rejected_is_counted_under_its_reason() -> None:
    async def run(ctx: Any) -> None:
        await talk(ctx)
        ctx.reject("not this one!")

    attempt, _ = play(Played(run), say("y"))
    assert (attempt.outcome.kind, attempt.outcome.reason) == (REJECTED, "rejected_not_this_one")


def test_an_environment_that_has_nothing_sampled_fails() -> None:
    async def run(ctx: Any) -> None:
        ctx.reward(1.0)

    assert play(Played(run), say("y"))[0].outcome.reason == "no_turn"


def test_a_task_whose_prompt_is_too_long_for_a_turn_fails_and_says_so() -> None:
    outcome = play(Played(talk), say("y"), max_model_len=4)[0].outcome
    assert (outcome.kind, outcome.reason) == (FAILED, "no_turn")
    assert "rollout.max_model_len" in outcome.detail


def test_one_that_hangs_is_truncated_by_time_and_fails_without_a_turn() -> None:
    async def late(ctx: Any) -> None:
        await talk(ctx)
        await asyncio.sleep(60)

    async def hangs(ctx: Any) -> None:
        await asyncio.sleep(60)

    assert play(Played(late), say("y"), timeout_s=0.2)[0].outcome.reason == "time"
    failed = play(Played(hangs), say("y"), timeout_s=0.1)[0].outcome
    assert (failed.kind, failed.reason) == (FAILED, "timeout")


@pytest.mark.real
def test_a_wait_for_a_free_reward_process_is_not_in_the_time_of_an_attempt() -> None:
    """An attempt that has begun later is over while the first one still waits."""

    async def scenario() -> None:
        scoring, asked_for = Scoring("digits", timeout_s=60), asyncio.Event()

        async def scored(ctx: Any) -> None:
            turn = await ctx.sample(asked("hello"))
            asked_for.set()
            ctx.reward(await ctx.scored(scoring.score(turn.answer, {})))

        async def hangs(ctx: Any) -> None:
            await ctx.sample(asked("hello"))
            await asyncio.Event().wait()

        await scoring.score("1", {})
        busy = [await scoring.pool.take() for _ in range(NUM_PROCESSES)]
        engines, sampling = ScriptedEngines(say("42")), Sampling(max_tokens=8)
        first = asyncio.ensure_future(make_runner(Played(scored), engines, timeout_s=10).attempt(TASK, sampling))
        await asked_for.wait()
        second = await make_runner(Played(hangs), engines, timeout_s=10).attempt(TASK, sampling)
        assert second.outcome.reason == "time"
        for process in busy:
            scoring.pool.give_back(process, whole=True)
        assert ((await first).outcome.kind, (await first).reward) == (COMPLETED, 1.0)
        await scoring.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 900))


def test_one_that_does_not_hear_its_end_gets_nothing_sampled_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.workers.agents.attempts.GRACE_S", 0.1)
    asked_late: list[BaseException] = []

    async def deaf(ctx: Any) -> None:
        await talk(ctx, 1)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.3)
            try:
                await ctx.sample(asked("one more"))
            except LimitReached as error:
                asked_late.append(error)

    async def both() -> Any:
        runner = make_runner(Played(deaf), ScriptedEngines(say("y")), timeout_s=0.1)
        attempt = await runner.attempt(TASK, Sampling(max_tokens=8))
        await asyncio.sleep(0.5)
        return attempt, runner.counts

    attempt, counts = asyncio.run(both())
    assert (attempt.outcome.reason, len(attempt.turns)) == ("time", 1)
    assert counts["attempts_stuck"] == 1
    assert len(asked_late) == 1


def test_engines_that_are_gone_for_good_end_the_run() -> None:
    def gone(prompt: str, sampling: Sampling) -> str:
        raise DeadlineExceeded("no engine was there")

    with pytest.raises(DeadlineExceeded):
        play(Played(talk), gone)


def test_turns_have_the_state_that_the_environment_says_or_what_they_read() -> None:
    async def run(ctx: Any) -> None:
        await talk(ctx, 3)
        await ctx.sample(asked("here"), state="here")
        await ctx.sample(asked("there"), state="here")

    attempt, _ = play(Played(run), say("yes"), max_tokens=400)
    first, second, third, here, there = row_columns([attempt])["turn_states"][0].tolist()
    assert len({first, second, here}) == 3
    assert (second, here) == (third, there)


def test_a_transcript_names_the_turns_in_it() -> None:
    attempt, _ = play(Played(talk), say("yes"))
    assert [message.get("turn") for message in attempt.said] == [None, 0, None, 1, None]


def test_a_turn_of_an_opponent_is_not_trained() -> None:
    async def run(ctx: Any) -> None:
        await ctx.sample(asked("me"))
        await ctx.sample(asked("you"), train=False)

    attempt, _ = play(Played(run), say("y"))
    assert len(attempt.turns) == 1


def test_a_reward_that_is_no_number_fails_the_attempt() -> None:
    async def run(ctx: Any) -> None:
        await talk(ctx)
        ctx.reward(float("nan"))

    assert "finite" in play(Played(run), say("y"))[0].outcome.detail


class Duel:
    """The proposer says a number; the solver, unless it is 0, says one too."""

    async def run(self, task: Task, ctx: Any) -> None:
        first = await ctx.sample(asked("a number"), policy="proposer")
        ctx.reward(0.25)
        if int(first.answer) > 0:
            turn = await ctx.sample(asked(first.answer))
            ctx.reward(1.0, turn=turn)
        if int(first.answer) > 1:
            raise ValueError("too large")
        ctx.reward(-0.5, policy="proposer")


def duel(numbers: Sequence[str], **more: Any) -> Any:
    said = iter(numbers)
    engines = ScriptedEngines(lambda prompt, sampling: next(said) if sampling.policy == "proposer" else "7")
    return make_runner(Duel(), engines, policies=["solver", "proposer"], **more)


def test_policies_that_speak_have_turns_rewards_and_conversations_of_their_own() -> None:
    attempt = asyncio.run(duel(["1"]).attempt(TASK, Sampling(max_tokens=8, seed=5)))
    assert [(turn.policy, turn.answer) for turn in attempt.turns] == [("proposer", "1"), ("solver", "7")]
    assert (attempt.reward, attempt.rewards) == (1.25, {"solver": 1.25, "proposer": -0.25})
    solver, proposer = attempt.of_policy("solver"), attempt.of_policy("proposer")
    assert [message["content"] for message in solver.said] == ["1", "7", "completed"]
    assert [message.get("reward") for message in proposer.said] == [None, None, -0.25]
    assert row_columns([solver, proposer])["turn_rewards"][0].tolist() == [1.0]
    assert AttemptResult.of(attempt) == AttemptResult(attempt.outcome, 1.25, "7", attempt.rewards)


def test_a_reward_for_an_unknown_policy_fails_the_attempt() -> None:
    async def run(ctx: Any) -> None:
        await ctx.sample(asked("hello"), policy="solver")
        ctx.reward(1.0, policy="solver")
        ctx.reward(1.0, policy="judge")

    engines = ScriptedEngines(say("y"))
    attempt = asyncio.run(make_runner(Played(run), engines, policies=["solver"]).attempt(TASK, Sampling(max_tokens=8)))
    assert "policy=judge" in attempt.outcome.detail
    assert (attempt.reward, attempt.rewards, row_columns([attempt]).get("policy")) == (1.0, {}, None)


def worker_of(runner: Any, flow: Dataflow, dropped: Sequence[str] = ()) -> tuple[Any, ErrorShare]:
    errors = ErrorShare(1.0, 100, "attempts", "environment")
    names = [column.name for column in flow.stage("rollout").writes]
    size = flow.samples_per_prompt
    intake = GroupIntake("Environment-0", Sampling(max_tokens=8), 3, size, 8, dropped=frozenset(dropped))
    policies = flow.policies if len(flow.policies) > 1 else ("",)
    return EnvironmentWorker(runner, intake, errors, AttemptColumns(names), policies), errors


Row = tuple[str, float]
SOLVER, PROPOSER = ("solver", 1.25), ("proposer", -0.25)


def rows_of_duels(
    numbers: Sequence[str], num_groups: int, num_rows: int, lost: Sequence[int] = ()
) -> tuple[dict[int, Row], dict[str, float], ErrorShare]:
    """Policy and reward of the rows of groups of three attempts by their ids, what the store counts, and the share of
    errors. `lost`: rows that a worker before has dropped, and then given the others back."""
    words = ["environment.name=x.py:X", "data.source=environment", "model.path=somewhere", "max_staleness=2"]
    flow = Dataflow().rollout("solver", samples_per_prompt=3).reward()
    flow.compute(lambda reward: reward - reward.mean(), reads=["reward"], writes=["advantage"], name="compare")
    flow.train("solver", loss=ppo_clip_loss).train("proposer", loss=ppo_clip_loss)
    config = load_config(words)
    flow = dataflow_of(config, flow)
    found: dict[int, Row] = {}

    async def scenario() -> tuple[dict[str, float], ErrorShare]:
        store = Store(StoreSpec.of(flow, config))
        client = StoreClient(store)
        await client.put_groups([{"task": json.dumps(TASK.as_columns())}] * num_groups)
        if lost:
            lease = await client.lease("rollout", 1, "before")
            assert lease
            await client.drop(lease, lost, "lost")
            await client.release(lease)
        worker, errors = worker_of(duel(numbers), flow)
        running = asyncio.ensure_future(worker.run(client))
        while len(found) < num_rows:
            lease = await client.lease("compare", 1, "compare")
            assert lease
            rows = lease.rows
            values = zip(rows.strings("policy"), rows["reward"].tolist(), strict=True)
            found.update(zip(rows.row_ids.tolist(), values, strict=True))
            await client.write(lease, rows.row_ids, {"advantage": [0.0] * len(rows)})
        counts = await store.stats()
        await store.close("done")
        await running
        return counts, errors

    return found, *asyncio.run(asyncio.wait_for(scenario(), 600))


def test_a_group_has_a_row_of_each_policy_and_silent_ones_are_counted() -> None:
    """Of the first group, attempt 1 is without the solver and attempt 2 fails; of the second, attempt 2 is without
    it."""
    found, counts, errors = rows_of_duels(["1", "0", "2", "1", "1", "0"], 2, 8)
    assert [row for row in sorted(found) if found[row] == SOLVER] == [0, 6, 7]
    assert [row for row in sorted(found) if found[row] == PROPOSER] == [3, 4, 9, 10, 11]
    assert (errors.succeeded, errors.failed) == (5, 1)
    assert (counts["dropped/silent"], counts["dropped/environment_error"]) == (2, 2)


def test_the_rest_of_a_group_is_played_in_its_places() -> None:
    found, counts, errors = rows_of_duels(["1", "1"], 1, 3, lost=[1, 2, 5])
    assert found == {0: SOLVER, 3: PROPOSER, 4: PROPOSER}
    assert (errors.succeeded, counts["dropped/lost"]) == (2, 3)


class Compared:
    """Attempts are rewarded by comparison; the one that says no fails."""

    async def run(self, task: Task, ctx: Any) -> None:
        turn = await ctx.sample(asked("hello"))
        assert turn.text != "no"

    async def score_group(self, task: Task, attempts: Any) -> list[float]:
        return [float(len(attempts) * 10 + index) for index in range(len(attempts))]


def test_groups_are_scored_together_without_those_that_failed() -> None:
    answers = iter(["a", "no", "b"])
    runner = make_runner(Compared(), ScriptedEngines(lambda prompt, sampling: next(answers)))
    found = asyncio.run(runner.group(TASK, [Sampling(max_tokens=8, seed=seed) for seed in range(3)]))
    assert [attempt.outcome.kind for attempt in found] == [COMPLETED, FAILED, COMPLETED]
    assert (found[0].reward, found[2].reward) == (20.0, 21.0)


def test_a_comparison_that_raises_fails_all_of_the_group() -> None:
    class Broken(Compared):
        async def score_group(self, task: Task, attempts: Any) -> list[float]:
            raise RuntimeError("no judge")

    runner = make_runner(Broken(), ScriptedEngines(say("a")))
    found = asyncio.run(runner.group(TASK, [Sampling(max_tokens=8)] * 2))
    assert [attempt.outcome.detail for attempt in found] == ["RuntimeError: no judge"] * 2


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_comparison_that_gives_no_finite_number_fails_all_of_the_group(reward: float) -> None:
    class Broken(Compared):
        async def score_group(self, task: Task, attempts: Any) -> list[float]:
            return [1.0, reward]

    runner = make_runner(Broken(), ScriptedEngines(say("a")))
    found = asyncio.run(runner.group(TASK, [Sampling(max_tokens=8)] * 2))
    assert [attempt.outcome.kind for attempt in found] == [FAILED] * 2
    assert f"a reward is a finite number, not {reward}" in found[0].outcome.detail


def test_attempts_are_measured_by_their_outcome() -> None:
    async def fails(ctx: Any) -> None:
        await talk(ctx, 1)
        raise ValueError("no such move")

    meters = Meters()
    for run in (talk, fails):
        asyncio.run(make_runner(Played(run), ScriptedEngines(say("y")), meters=meters).attempt(TASK, Sampling()))
    found = measured(meters)
    assert found.pop("environment_attempt_seconds_sum") > 0
    assert found == {
        "environment_turns_total": 3, "environment_attempts_total completed": 1, "environment_attempts_total failed": 1,
        "environment_attempt_seconds_count": 2,
    }  # fmt: skip


class Leaks:
    """Raises what ends a task or a whole loop. `where`: in which part of an attempt."""

    def __init__(self, what: type[BaseException], where: str) -> None:
        self._what, self._where = what, where

    async def run(self, task: Task, ctx: Any) -> None:
        await ctx.sample(asked("hello"))
        ctx.reward(1.0)
        if self._where == "run":
            raise self._what("of its own")
        if self._where == "task":
            await asyncio.gather(self._raise(), asyncio.sleep(0))

    async def score_group(self, task: Task, attempts: Any) -> list[float]:
        if self._where == "score_group":
            raise self._what("of its own")
        return [attempt.reward for attempt in attempts]

    async def _raise(self) -> None:
        raise self._what("of its own")


class Stop(BaseException):
    """Such as test frameworks raise."""


@pytest.mark.parametrize("what", [asyncio.CancelledError, SystemExit, KeyboardInterrupt, Stop, GeneratorExit])
@pytest.mark.parametrize("where", ["run", "task", "score_group"])
def test_an_environment_that_would_end_more_than_itself_fails_its_attempt(
    what: type[BaseException], where: str
) -> None:
    runner = make_runner(Leaks(what, where), ScriptedEngines(say("yes")))

    async def scenario() -> Any:
        asyncio.get_running_loop().set_task_factory(contained_task_factory)
        return await runner.group(TASK, [Sampling(max_tokens=8)] * 2)

    for attempt in asyncio.run(scenario()):
        assert (attempt.outcome.kind, attempt.outcome.reason) == (FAILED, "environment_error")
        assert what.__name__ in attempt.outcome.detail


class Plain:
    """What is due as coroutines is plain functions. `where`: in which of them it raises."""

    def __init__(self, what: type[BaseException], where: str) -> None:
        self._what, self._where = what, where

    def run(self, task: Task, ctx: Any) -> Any:
        if self._where == "run":
            raise self._what("of its own")
        return ctx.sample(asked("hello"))

    def score_group(self, task: Task, attempts: Any) -> Any:
        raise self._what("of its own")


@pytest.mark.parametrize("what", [ValueError, asyncio.CancelledError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["run", "score_group"])
def test_a_plain_function_that_would_end_more_than_itself_fails_its_attempt(
    what: type[BaseException], where: str
) -> None:
    runner = make_runner(Plain(what, where), ScriptedEngines(say("yes")))
    for attempt in asyncio.run(runner.group(TASK, [Sampling(max_tokens=8)] * 2)):
        assert (attempt.outcome.kind, attempt.outcome.reason) == (FAILED, "environment_error")
        assert what.__name__ in attempt.outcome.detail


def test_the_end_of_an_environment_is_contained_where_it_is_a_plain_function() -> None:
    class Ends(Played):
        def aclose(self) -> Any:
            raise SystemExit("of its own")

    with pytest.raises(UserCodeExit, match="SystemExit"):
        asyncio.run(make_runner(Ends(talk), ScriptedEngines(say("yes"))).close())


def test_an_attempt_that_is_cancelled_from_outside_is_cancelled() -> None:
    async def scenario() -> None:
        begun = asyncio.Event()

        async def run(ctx: Any) -> None:
            begun.set()
            await asyncio.sleep(3600)

        playing = asyncio.ensure_future(make_runner(Played(run), ScriptedEngines(say("y"))).group(TASK, [Sampling()]))
        await begun.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(scenario())


def test_no_more_attempts_are_under_way_than_there_may_be() -> None:
    async def scenario() -> None:
        most = 0

        async def run(ctx: Any) -> None:
            nonlocal most
            most = max(most, runner.num_in_flight)
            await talk(ctx)

        runner = make_runner(Played(run), ScriptedEngines(say("yes")), max_attempts=3)
        found = await asyncio.gather(*(runner.attempt(TASK, Sampling(max_tokens=8)) for _ in range(10)))
        assert [attempt.outcome.kind for attempt in found] == [COMPLETED] * 10
        assert (most, runner.num_in_flight, runner.num_done) == (3, 0, 10)

    asyncio.run(scenario())
