"""What an attempt needs is made before it and given back after it, and is tried again where it fails."""

import asyncio
from typing import Any

import pytest

from penstock.conf.errors import InfrastructureError
from penstock.workers.agents import attempts
from penstock.workers.agents.environment import Task
from penstock.workers.agents.trajectory import COMPLETED, FAILED, REJECTED, TRUNCATED
from penstock.workers.protocols import Sampling
from tests.workers.agents.played import ScriptedEngines, make_runner, play

ASKED = [{"role": "user", "content": "hello"}]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "PAUSE_S", 0.0)


class Surrounded:
    """Notes what is called; `fails`: errors of the first calls of a method, by its name."""

    def __init__(self, **fails: list[Exception | None]) -> None:
        self.calls: list[str] = []
        self._fails = fails

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if self._fails.get(name) and (error := self._fails[name].pop(0)) is not None:
            raise error

    async def setup(self, task: Task, ctx: Any) -> None:
        self._note("setup")
        ctx.surroundings = len(self.calls)

    async def run(self, task: Task, ctx: Any) -> None:
        await ctx.sample(ASKED)
        self._note(f"run {ctx.surroundings}")
        self._note("run")
        ctx.reward(1.0)

    async def teardown(self, task: Task, ctx: Any) -> None:
        self._note("teardown")


def say(prompt: str, sampling: Any) -> str:
    return "yes"


def test_what_setup_makes_is_there_and_is_given_back() -> None:
    environment = Surrounded()
    attempt, counts = play(environment, say)
    assert attempt.outcome.kind == COMPLETED
    assert environment.calls == ["setup", "run 1", "run", "teardown"]
    assert counts["attempts_retried"] == counts["teardown_failed"] == 0


def test_a_setup_that_fails_once_is_tried_again() -> None:
    environment = Surrounded(setup=[OSError("no container")])
    attempt, counts = play(environment, say)
    assert (attempt.outcome.kind, attempt.reward, len(attempt.turns)) == (COMPLETED, 1.0, 1)
    assert environment.calls == ["setup", "teardown", "setup", "run 3", "run", "teardown"]
    assert (counts["attempts_retried"], counts["attempts_completed"], counts["attempts_failed"]) == (1, 1, 0)


def test_a_setup_that_always_fails_fails_the_attempt_with_what_it_raised() -> None:
    environment = Surrounded(setup=[OSError("no container")] * 9)
    attempt, counts = play(environment, say, retries=1)
    assert (attempt.outcome.kind, attempt.outcome.reason) == (FAILED, "infrastructure")
    assert attempt.outcome.detail == "setup: OSError: no container"
    assert environment.calls == ["setup", "teardown"] * 2
    assert (counts["attempts_retried"], counts["attempts_failed"]) == (1, 1)


def test_an_attempt_whose_container_dies_is_played_from_its_start() -> None:
    environment = Surrounded(run=[InfrastructureError("it is gone")])
    attempt, counts = play(environment, say)
    assert (attempt.outcome.kind, len(attempt.turns), attempt.reward) == (COMPLETED, 1, 1.0)
    assert counts["attempts_retried"] == 1


def test_a_tool_says_that_the_infrastructure_failed_and_not_the_model() -> None:
    tries = []

    def read() -> str:
        """Read."""
        tries.append(1)
        if len(tries) == 1:
            raise InfrastructureError("the disk is gone")
        return "42"

    class Reads:
        async def run(self, task: Task, ctx: Any) -> None:
            turn = await ctx.sample(ASKED, tools=[read])
            answers = await ctx.use_tools(turn, [read])
            ctx.reward(float(answers[0]["content"] == "42"))

    attempt, counts = play(Reads(), lambda prompt, sampling: "[read()]")
    assert (attempt.outcome.kind, attempt.reward) == (COMPLETED, 1.0)
    assert (counts["attempts_retried"], len(tries)) == (1, 2)


def test_errors_of_the_environment_itself_are_not_tried_again() -> None:
    environment = Surrounded(run=[ValueError("a bug")])
    attempt, counts = play(environment, say)
    assert (attempt.outcome.kind, attempt.outcome.reason) == (FAILED, "environment_error")
    assert environment.calls == ["setup", "run 1", "run", "teardown"]
    assert counts["attempts_retried"] == 0


def test_a_teardown_that_fails_is_counted_and_changes_nothing() -> None:
    attempt, counts = play(Surrounded(teardown=[OSError("busy")]), say)
    assert attempt.outcome.kind == COMPLETED
    assert counts["teardown_failed"] == 1


def test_a_setup_may_reject_a_task() -> None:
    class Picky(Surrounded):
        async def setup(self, task: Task, ctx: Any) -> None:
            ctx.reject("no_image")

    attempt, counts = play(Picky(), say)
    assert (attempt.outcome.kind, attempt.outcome.reason) == (REJECTED, "rejected_no_image")
    assert counts["attempts_retried"] == 0


def test_an_attempt_without_time_is_given_back_too() -> None:
    class Slow(Surrounded):
        async def run(self, task: Task, ctx: Any) -> None:
            while True:
                await ctx.sample(ASKED)

    environment = Slow()
    attempt, _ = play(environment, say, timeout_s=0.5, max_turns=10**6, max_tokens=10**6, max_model_len=10**6)
    assert (attempt.outcome.kind, attempt.outcome.reason) == (TRUNCATED, "time")
    assert environment.calls == ["setup", "teardown"]


def test_an_attempt_that_waits_to_be_played_again_leaves_its_place_to_another() -> None:
    class Flaky(Surrounded):
        async def setup(self, task: Task, ctx: Any) -> None:
            self.calls.append(f"setup {task.id}")
            if self.calls == ["setup a"]:
                raise OSError("no container")

        async def run(self, task: Task, ctx: Any) -> None:
            await ctx.sample(ASKED)

    environment = Flaky()
    runner = make_runner(environment, ScriptedEngines(say), max_attempts=1)

    async def scenario() -> None:
        await asyncio.gather(*(runner.attempt(Task(name, 0, {}), Sampling(max_tokens=8)) for name in "ab"))

    asyncio.run(scenario())
    assert [call for call in environment.calls if call.startswith("setup")] == ["setup a", "setup b", "setup a"]
