"""A judge behind a real HTTP server, asked through the reward pool's own scorer."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from penstock.conf.reward import RewardConfig
from penstock.conf.run import RunConfig
from penstock.workers.reward import judge as judges
from penstock.workers.reward.judge import KEY, MAX_REQUESTS, judge
from penstock.workers.reward.reward_registry import RewardSpec


class Server:
    """Gives a response as many points as it has letters, unless it is told what to say."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.now = self.most = 0
        self.says = ""

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers["Authorization"].removeprefix("Bearer "))
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        response = body["messages"][1]["content"].partition("<response>\n")[2].partition("\n</response>")[0]
        content = self.says or json.dumps({"score": len(response)})
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "j", "choices": [choice]}
        )


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, str]]:
    server, app = Server(), web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    judges.VERDICTS.clear()
    monkeypatch.setenv("JUDGE_KEY", "secret")


TASK = {"prompt": "2 + 2?", "answer": "4"}


def test_points_become_a_reward_and_nothing_is_asked_twice() -> None:
    async def scenario() -> None:
        async with serving() as (server, url):
            options: dict[str, Any] = {"url": url, "model": "j", "rubric": "Is it {answer}?", "key": "JUDGE_KEY"}
            assert [await judge("four!", TASK, **options) for _ in range(3)] == [0.5] * 3
            (asked,) = server.asked
            assert "Is it 4?" in asked["messages"][0]["content"]
            assert "2 + 2?" in asked["messages"][1]["content"]
            assert asked["response_format"]["json_schema"]["schema"]["required"] == ["score"]
            assert await judge("four!", TASK, **options, high=5.0) == 1.0
            assert len(server.asked) == 2

    asyncio.run(scenario())


def test_each_judge_has_its_own_key_by_its_variable_or_as_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST_JUDGE", "first")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    async def scenario() -> list[str]:
        async with serving() as (server, url):
            for number, key in enumerate((KEY, "JUDGE_KEY", "env:FIRST_JUDGE", "own"), 1):
                config = RunConfig(reward=RewardConfig("judge", {"url": url, "model": "j", "key": key}))
                score: Any = RewardSpec.of("judge", config.reward.options).resolve().one
                await score("x" * number, TASK)
            return server.keys

    assert asyncio.run(scenario()) == ["none", "secret", "first", "own"]


def test_responses_are_asked_about_side_by_side_but_not_all_at_once() -> None:
    async def scenario() -> int:
        async with serving() as (server, url):
            texts = ["x" * (index % 11) + " " * index for index in range(3 * MAX_REQUESTS)]
            await asyncio.gather(*(judge(text, TASK, url=url, model="j", high=100.0) for text in texts))
            return server.most

    assert 1 < asyncio.run(scenario()) <= MAX_REQUESTS


def test_an_answer_that_is_no_verdict_is_an_error_and_no_zero() -> None:
    async def scenario() -> None:
        async with serving() as (server, url):
            for says, problem in (("great!", "said no number"), ("11", "not from 0 to 10")):
                server.says = says
                with pytest.raises(ValueError, match=problem):
                    await judge("four", TASK, url=url, model="j")

    asyncio.run(scenario())


def test_a_recipe_names_it() -> None:
    RewardSpec.of("judge", {"url": "http://127.0.0.1:1/v1", "model": "j"}).check()
    with pytest.raises(ValueError, match="url and model"):
        asyncio.run(judge("four", TASK))
