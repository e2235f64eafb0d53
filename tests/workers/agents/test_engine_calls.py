"""What an engine behind a Ray actor is asked, and what becomes of turns that nobody awaits or that it cannot take."""

import asyncio
import math
import os
from typing import Any

import pytest
import ray

from penstock.conf.errors import DataError, DeadlineExceeded, WorkerDied
from penstock.workers.agents.attempts_actor import ask
from penstock.workers.agents.gateway.engine_pool import EnginePool
from penstock.workers.protocols import Completion, Sampling

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("cluster")]


HANGS = 1
"""First token of a prompt that hangs."""
NAN = 5
"""First token of a prompt whose response has no log-probability."""


class Conversation:
    """Whatever asks."""


@ray.remote(num_cpus=0, max_restarts=0)
class Engine:
    """Does what the first token of a prompt says."""

    def __init__(self) -> None:
        self._num_under_way = 0
        self._begun = asyncio.Event()

    async def generate(self, prompts: Any, num_samples: int, samplings: Any) -> list[list[Completion]]:
        kind = prompts[0][0]
        self._num_under_way += 1
        self._begun.set()
        try:
            if kind == HANGS:
                await asyncio.sleep(3600)
            if kind == 2:
                raise OverflowError("what nobody has thought of")
            if kind == 3:
                os._exit(1)
            if kind == 4:
                raise DataError("no such schema")
            return [[Completion([7], [math.nan if kind == NAN else -1.0], [0], "seven", "stop")]]
        finally:
            self._num_under_way -= 1

    async def fault_of(self, prompt_ids: list[int], completion: Completion) -> str:
        return f"{completion.logprobs} after {prompt_ids}"

    async def begun(self) -> None:
        await self._begun.wait()

    async def num_under_way(self) -> int:
        return self._num_under_way


async def until_idle(engine: Any) -> None:
    async with asyncio.timeout(60):
        while await engine.num_under_way.remote():
            await asyncio.sleep(0.01)


def test_a_turn_that_nobody_waits_for_any_more_ends_in_its_engine() -> None:
    async def scenario() -> None:
        engine = Engine.remote()
        turn = asyncio.ensure_future(ask(engine, [1], Sampling()))
        await engine.begun.remote()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        await until_idle(engine)

    asyncio.run(scenario())


def test_so_does_one_that_took_too_long() -> None:
    async def scenario() -> None:
        engine = Engine.remote()
        pool = EnginePool(ask, 0.5)
        pool.update({"Rollout-0": engine})
        with pytest.raises(DeadlineExceeded):
            await pool.sample([1], Sampling(), Conversation())
        await until_idle(engine)
        assert pool.num_again == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("kind", "said"), [(2, "what nobody has thought of"), (4, "no such schema"), (NAN, r"\[nan\] after \[5\]")]
)
def test_a_request_that_fails_in_an_engine_is_no_death_of_it(kind: int, said: str) -> None:
    async def scenario() -> None:
        engines = [Engine.remote() for _ in range(2)]
        pool = EnginePool(ask, 60.0)
        pool.update(dict(zip("ab", engines, strict=True)))
        with pytest.raises(DataError, match=said):
            await pool.sample([kind], Sampling(), Conversation())
        assert (pool.num_again, pool.available()) == (0, ["a", "b"])
        assert (await pool.sample([0], Sampling(), Conversation())).text == "seven"

    asyncio.run(scenario())


def test_the_death_of_an_engine_is_one() -> None:
    async def scenario() -> None:
        with pytest.raises(WorkerDied, match="an engine died in a turn"):
            await ask(Engine.remote(), [3], Sampling())

    asyncio.run(scenario())
