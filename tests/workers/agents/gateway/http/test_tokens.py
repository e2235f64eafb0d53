"""Whatever agents do over HTTP, each token that was sampled is trained, once, in what the policy had read before it."""

import asyncio
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.workers.agents.trajectory import Trajectory, row_columns, segments_of
from tests.amounts import amount
from tests.workers.agents.gateway.chat_models import call_text
from tests.workers.agents.gateway.http.agents import KINDS
from tests.workers.agents.gateway.http.serving import Gateway, gateway, play

WORDS = ("one", "two", "a < b", '"quoted"', "line\nbreak", " spaces ", "{}", "")
CALLS = ('{"a": 1, "b": 2}', '{ "b":2,"a" : 1 }', "{}", '{"text": "\\u00e9 \\"x\\""}', '{"a": [1, {"b": null}]}')
RETRY = {"extra_headers": {"x-stainless-retry-count": "1"}}


def random_answer(rng: random.Random) -> str:
    """Thinking, words, calls that can be read and calls that cannot, or nothing of all that."""
    text = f"<think>\n{rng.choice(WORDS)}\n</think>\n\n" if rng.random() < 0.5 else ""
    text += rng.choice(WORDS)
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        text += "\n" + call_text(rng.choice(["add", "add", "add", "unknown"]), rng.choice(CALLS))
    if rng.random() < 0.1:
        text += "\n<tool_call>\n{broken\n</tool_call>"
    return text


async def converse(open_gateway: Gateway, rng: random.Random, num_steps: int) -> list[bool]:
    """Whether each turn goes on with an earlier one, in the order in which they were asked for."""
    agents: list[Any] = []
    goes_on: list[bool] = []
    for step in range(num_steps):
        kind = rng.random()
        goes_on.append(bool(agents) and kind >= 0.35)
        if not agents or kind < 0.2:  # a subagent
            agents.append(rng.choice(KINDS)(open_gateway, rng, f"You are number {len(agents)}."))
            agent = agents[-1]
            agent.ask(f"{step}")
        else:
            agent = rng.choice(agents)
            (agent.compact if kind < 0.35 else agent.ask)(f"{step} {rng.choice(WORDS)}")
        await agent.go_on()
    others = [rng.choice(KINDS)(open_gateway, rng, "You are one of many.") for _ in range(2)]
    for agent in others:
        agent.ask("at once")
    await asyncio.gather(*(agent.go_on() for agent in others))
    return [*goes_on, False, False]


def check(open_gateway: Gateway) -> None:
    turns, engines = open_gateway.sampler.turns, open_gateway.engines
    segments = segments_of(turns)
    trained = [
        pair
        for one in segments
        for run in one.runs
        for pair in zip(run.turn.output_ids, run.turn.logprobs, strict=True)
    ]
    sampled = [
        (token, -(number + 1 + place / 10_000))
        for number, tokens in enumerate(engines.sampled)
        for place, token in enumerate(tokens)
    ]
    assert sorted(trained) == sorted(sampled)
    assert len(set(trained)) == len(trained)
    for segment in segments:  # and each was sampled after just the tokens that stand before it
        tokens: list[int] = []
        for run in segment.runs:
            tokens += run.context
            assert tokens == list(run.turn.prompt_ids)
            assert tokens in engines.prompts
            tokens += run.turn.output_ids
    columns = row_columns([Trajectory(turns)])
    assert sorted(columns["response_ids"][0].tolist()) == sorted(token for token, _ in sampled)
    assert columns["spans"][0].reshape(-1, 3)[:, 2].sum() == len(sampled)


@pytest.mark.parametrize("template", ["plain", "hermes", "opens", "strips", "qwen3"])
@settings(max_examples=amount(8))
@given(seed=st.integers(0, 10**6))
def test_each_sampled_token_is_trained_once_whatever_agents_do(template: str, seed: int) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        answers = random.Random(seed + 1)
        async with gateway(lambda prompt: random_answer(answers), template, max_turns=100) as open_gateway:
            goes_on = await converse(open_gateway, rng, num_steps=8)
            turns = open_gateway.sampler.turns
            assert len(turns) == len(goes_on)
            if template not in ("strips", "qwen3"):
                assert [turn.parent is not None for turn in turns] == goes_on
            for turn in turns:
                if turn.parent is not None:
                    parent = turns[turn.parent]
                    before = [*parent.prompt_ids, *parent.output_ids]
                    assert turn.prompt_ids[: len(before)] == before
            check(open_gateway)

    play(scenario())


@settings(max_examples=amount(8))
@given(seed=st.integers(0, 10**6))
def test_retries_and_hang_ups_leave_no_token_behind(seed: int) -> None:
    async def scenario() -> None:
        rng = random.Random(seed)
        answers = random.Random(seed + 1)
        async with gateway(lambda prompt: random_answer(answers), max_turns=100) as open_gateway:
            engines = open_gateway.engines
            agents = [kind(open_gateway, rng, f"You are number {index}.") for index, kind in enumerate(KINDS)]
            for step in range(5):
                agent: Any = rng.choice(agents)
                agent.ask(f"{step}")
                if rng.random() < 0.4:  # it gives up, and asks again
                    engines.open.clear()
                    count = len(engines.prompts)
                    asking = asyncio.ensure_future(agent.go_on())
                    while len(engines.prompts) == count:
                        await asyncio.sleep(0.002)
                    asking.cancel()
                    await asyncio.wait([asking])
                    cancelled = engines.num_cancelled
                    while engines.num_cancelled == cancelled and open_gateway.sampler.num_under_way:
                        await asyncio.sleep(0.002)
                    engines.open.set()
                await agent.go_on(**(RETRY if rng.random() < 0.5 else {}))
            assert len(open_gateway.sampler.turns) == len(engines.sampled) == 5
            check(open_gateway)

    play(scenario())
