"""Attempts whose agents know of nothing but an address and a key."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from penstock.conf.environment import EnvironmentConfig
from penstock.workers.agents.attempts import AttemptRunner
from penstock.workers.agents.environment import Task
from penstock.workers.agents.gateway.http_server import AttemptKeys, HttpServer
from penstock.workers.agents.gateway.turn_sampler import TurnSampler
from penstock.workers.agents.trajectory import Trajectory
from penstock.workers.protocols import Sampling
from tests.workers.agents.gateway.chat_models import Saying, make_sampler
from tests.workers.agents.gateway.http.serving import USER, play


async def nothing() -> None:
    pass


async def attempts(
    run: Any, texts: Any, count: int = 1, after: Callable[[], Awaitable[None]] = nothing, **limits: int
) -> list[Trajectory]:
    """Attempts of a function that plays a task, as an environment. `after`: called while the server still listens."""

    class Agent:
        async def run(self, task: Task, ctx: Any) -> None:
            async with AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key, max_retries=0) as client:
                await run(client, ctx)

    def sampler(sampling: Sampling) -> TurnSampler:
        return make_sampler(engines, sampling=sampling, **limits)

    keys, engines = AttemptKeys(), Saying(texts)
    server = HttpServer(keys)
    keys.base_url = await server.start("127.0.0.1", 0)
    try:
        runner = AttemptRunner(Agent(), EnvironmentConfig(timeout_s=600.0), sampler, keys)
        found = await runner.group(Task("1", 1), [Sampling(max_tokens=100)] * count)
        await after()
        return found
    finally:
        await server.stop()


async def ask(client: AsyncOpenAI, *messages: Any) -> str:
    answer = await client.chat.completions.create(model="policy", messages=list(messages) or [USER])
    return str(answer.choices[0].message.content)


def test_what_an_agent_samples_is_its_own_attempts() -> None:
    async def scenario() -> None:
        async def run(client: AsyncOpenAI, ctx: Any) -> None:
            said = await ask(client)
            await ask(client, USER, {"role": "assistant", "content": said}, USER)
            ctx.reward(float(said))

        numbers = iter(range(100))
        found = await attempts(run, lambda prompt: str(next(numbers)), 3)
        assert [attempt.outcome.kind for attempt in found] == ["completed"] * 3
        assert [[turn.parent for turn in attempt.turns] for attempt in found] == [[None, 0]] * 3
        for attempt in found:
            assert attempt.turns[0].text == str(int(attempt.reward))

    play(scenario())


def test_an_agent_that_takes_a_limit_for_the_end_is_truncated() -> None:
    async def scenario() -> None:
        async def run(client: AsyncOpenAI, ctx: Any) -> None:
            with suppress(openai.BadRequestError):
                while True:
                    await ask(client)

        found = await attempts(run, lambda prompt: "x", max_turns=2)
        assert (found[0].outcome.kind, found[0].outcome.reason, len(found[0].turns)) == ("truncated", "turns", 2)

    play(scenario())


def test_an_agent_that_goes_on_after_its_attempt_has_no_key() -> None:
    async def scenario() -> None:
        known: list[Any] = []

        async def run(client: AsyncOpenAI, ctx: Any) -> None:
            await ask(client)
            known.append(ctx)

        async def after() -> None:
            async with AsyncOpenAI(base_url=known[0].base_url, api_key=known[0].api_key) as client:
                with pytest.raises(openai.AuthenticationError, match="No attempt that is under way has this key"):
                    await ask(client)

        found = await attempts(run, ["one"], after=after)
        assert len(found[0].turns) == 1

    play(scenario())


def test_ctx_sample_and_the_endpoint_are_one_conversation() -> None:
    async def scenario() -> None:
        async def run(client: AsyncOpenAI, ctx: Any) -> None:
            said = await ask(client)
            turn = await ctx.sample([USER, {"role": "assistant", "content": said}, USER])
            ctx.reward(1.0, turn)
            assert len(ctx.turns) == 2

        found = await attempts(run, ["one", "two"])
        assert [turn.parent for turn in found[0].turns] == [None, 0]
        assert found[0].turn_rewards == {1: 1.0}

    play(scenario())
