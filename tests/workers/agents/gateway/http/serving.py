"""A gateway on loopback with one attempt, and the real clients of both protocols."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from penstock.workers.agents.gateway.http_server import AttemptKeys, HttpServer
from penstock.workers.agents.gateway.turn_sampler import TurnSampler
from penstock.workers.protocols import Sampling
from tests.workers.agents.gateway.chat_models import Saying, make_sampler

DEADLINE_S = 600
USER = {"role": "user", "content": "2 + 2?"}


@dataclass
class Gateway:
    keys: AttemptKeys
    sampler: TurnSampler
    engines: Saying
    url: str
    """Ends in /v1."""
    key: str
    max_retries: int = 0

    @cached_property
    def openai(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self.url, api_key=self.key, max_retries=self.max_retries)

    @cached_property
    def anthropic(self) -> AsyncAnthropic:
        url = self.url.removesuffix("/v1")
        return AsyncAnthropic(base_url=url, api_key=self.key, max_retries=self.max_retries)

    async def close(self) -> None:
        for name in ("openai", "anthropic"):
            if name in vars(self):
                await getattr(self, name).close()

    async def chat(self, *messages: Any, **more: Any) -> Any:
        return await self.openai.chat.completions.create(model="policy", messages=list(messages) or [USER], **more)

    async def respond(self, items: Any = "2 + 2?", **more: Any) -> Any:
        return await self.openai.responses.create(model="policy", input=items, **more)

    async def message(self, *messages: Any, **more: Any) -> Any:
        asked = {"max_tokens": 1000, **more}
        return await self.anthropic.messages.create(model="policy", messages=list(messages) or [USER], **asked)


@asynccontextmanager
async def gateway(
    texts: Iterable[str] | Callable[[str], str] = (),
    template: str = "hermes",
    *,
    sampling: Sampling | None = None,
    waiting_s: float = 10.0,
    max_body_bytes: int = 2**20,
    max_retries: int = 0,
    clients_sample: bool = False,
    policies: Sequence[str] = (),
    **limits: int,
) -> AsyncIterator[Gateway]:
    engines, keys = Saying(texts), AttemptKeys()
    sampler = make_sampler(engines, template, sampling, clients_sample=clients_sample, policies=policies, **limits)
    server = HttpServer(keys, waiting_s=waiting_s, max_body_bytes=max_body_bytes)
    keys.base_url = await server.start("127.0.0.1", 0)
    url, key = keys.admit(sampler)
    made = Gateway(keys, sampler, engines, url, key, max_retries)
    try:
        yield made
    finally:
        await made.close()
        await server.stop()


def play(scenario: Any) -> None:
    """Runs a coroutine; one that hangs fails."""

    async def within() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario

    asyncio.run(within())


async def until(claim: Callable[[], bool]) -> None:
    """Waits for what comes without being announced."""
    while not claim():
        await asyncio.sleep(0.005)
