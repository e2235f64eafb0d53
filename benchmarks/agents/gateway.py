"""Tokens a second through the gateway, asked by the `openai` client over HTTP, against the engine driven directly."""

import asyncio
import time
from typing import Any

from openai import AsyncOpenAI

from benchmarks.agents.engine import Engine
from benchmarks.harness import Target
from penstock.workers.agents.gateway.http_server import AttemptKeys, HttpServer
from penstock.workers.protocols import Sampling

TOKENS = 128
"""Tokens of each response."""
TARGET = 0.9


async def rounds(engine: Engine, num_rounds: int, num_requests: int) -> list[dict[str, Any]]:
    """Measure both sides in turn, with the same prompts, seeds and lengths."""
    keys = AttemptKeys()
    server = HttpServer(keys)
    keys.base_url = await server.start("127.0.0.1", 0)
    found: list[dict[str, Any]] = []
    try:
        for number in range(-1, num_rounds):  # the first is not counted
            texts = [f"request {number} {index}: say something" for index in range(num_requests)]
            samplings = [Sampling(max_tokens=TOKENS, ignore_eos=True, seed=index) for index in range(num_requests)]
            for side in ("direct", "gateway"):
                began = time.perf_counter()
                if side == "direct":
                    tokens = await engine.direct(texts, samplings)
                else:
                    tokens = await through_gateway(engine, keys, texts, samplings)
                seconds = time.perf_counter() - began
                if number >= 0:
                    found.append({"part": "gateway", "side": side, "tokens": tokens, "per_s": tokens / seconds})
    finally:
        await server.stop()
    return found


async def through_gateway(engine: Engine, keys: AttemptKeys, texts: list[str], samplings: list[Sampling]) -> int:
    """Make an attempt for each text, with its own key; connections are shared, as those of a process are."""
    samplers = [engine.sampler(sampling) for sampling in samplings]
    own_keys = [keys.admit(sampler)[1] for sampler in samplers]

    async def one(text: str, key: str) -> int:
        messages: Any = [{"role": "user", "content": text}]
        agent = client.with_options(api_key=key)
        answer = await agent.chat.completions.create(model="policy", messages=messages, max_tokens=TOKENS)
        return answer.usage.completion_tokens if answer.usage is not None else 0

    try:
        async with AsyncOpenAI(base_url=keys.base_url, api_key="none", timeout=600.0) as client:
            return sum(await asyncio.gather(*(one(text, key) for text, key in zip(texts, own_keys, strict=True))))
    finally:
        for key in own_keys:
            keys.dismiss(key)


def targets(rows: list[dict[str, Any]], median: Any) -> list[Target]:
    ratio = median(rows, "gateway") / median(rows, "direct")
    return [Target("tokens/s through the gateway, of the engine driven directly", ratio, "x", ">=", TARGET)]
