"""A vLLM engine on a shared GPU keeps no weights asleep: what it is told until it samples again, by a stand-in that
forgets them as vLLM does."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.conf.errors import WeightError
from penstock.conf.rollout import RolloutConfig
from penstock.conf.trainer import LoraConfig
from penstock.workers.protocols import EngineSpec, Publication, Sampling
from penstock.workers.rollout.engine_vllm import VllmEngine, discards_weights
from tests.publications import write_publication
from tests.workers.rollout.fake_llm import FakeLLM, fail

pytest.importorskip("vllm", reason="vLLM is not installed: its engine is not tested")
SHARED = RolloutConfig(engine="vllm", num_gpus_per_worker=0.5)


class SleepingLLM(FakeLLM):
    """Has memory by vLLM's tags, and forgets its weights at level 2. It cannot sample or load without."""

    def __init__(self, **troubles: Callable[[], Any]) -> None:
        super().__init__(**troubles)
        self.awake = {"weights", "kv_cache"}
        self.has_weights = True

    async def sleep(self, level: int, mode: str) -> None:
        assert mode == "keep"
        self.awake.clear()
        self.has_weights = level == 1
        await self._do(f"sleep {level}")

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.awake |= set(tags or ("weights", "kv_cache"))
        await self._do(f"wake {'+'.join(tags or ['all'])}")

    async def collective_rpc(self, method: str) -> None:
        assert self.awake == {"weights"}
        self.has_weights = True
        await self._do(method)

    async def update_weights(self, request: Any) -> None:
        assert "weights" in self.awake
        await super().update_weights(request)
        self.has_weights = True

    async def generate(self, *arguments: Any, **named: Any) -> Any:
        assert self.has_weights
        assert self.awake == {"weights", "kv_cache"}
        async for output in super().generate(*arguments, **named):
            yield output


def engine_over(llm: FakeLLM, **settings: Any) -> VllmEngine:
    engine = VllmEngine(EngineSpec(SHARED, "a-model", **settings))
    engine.llm = llm
    return engine


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60.0))  # type: ignore[arg-type]


def ask(engine: VllmEngine) -> "asyncio.Task[Any]":
    return asyncio.create_task(engine.generate([1], 1, Sampling(stop=("a word",))))


LOAD = ["prepare", "wake weights", "reset", "start", "load", "finish", "version", "wake kv_cache"]


@pytest.fixture
def publication(tmp_path: Path) -> Publication:
    return write_publication(tmp_path, 1, [("w", torch.ones(3))])


def test_it_samples_once_the_newest_publication_is_loaded_after_waking(publication: Publication) -> None:
    async def scenario() -> None:
        llm = SleepingLLM()
        engine = engine_over(llm)
        await engine.load(publication)
        for _ in range(2):  # also when it is the same version again
            await engine.sleep()
            waiting = ask(engine)
            llm.calls.clear()
            await engine.wake()
            await asyncio.sleep(0.01)
            assert llm.calls == []
            await engine.load(publication)
            await waiting
            assert llm.calls == [*LOAD, "generate"]

    run(scenario)


def test_what_is_loaded_asleep_is_there_when_it_wakes(publication: Publication) -> None:
    async def scenario() -> None:
        llm = SleepingLLM()
        engine = engine_over(llm)
        await engine.load(publication)
        await engine.sleep()
        llm.calls.clear()
        await engine.load(publication)
        waiting = ask(engine)
        await asyncio.sleep(0.01)
        assert llm.calls == LOAD[:-1]
        await engine.wake()
        await waiting
        assert llm.calls == [*LOAD, "generate"]

    run(scenario)


def test_before_the_first_publication_the_models_files_are_read_again() -> None:
    async def scenario() -> None:
        llm = SleepingLLM()
        engine = engine_over(llm)
        await engine.sleep()
        await engine.wake()
        await ask(engine)
        assert llm.calls == ["sleep 2", "wake weights", "reload_weights", "wake kv_cache", "generate"]

    run(scenario)


def test_a_load_that_fails_leaves_it_waiting_for_the_next(publication: Publication) -> None:
    async def scenario() -> None:
        llm = SleepingLLM()
        engine = engine_over(llm)
        await engine.load(publication)
        llm.troubles = {"start": fail}
        await engine.sleep()
        await engine.wake()
        with pytest.raises(WeightError, match="phase start"):
            await engine.load(publication)
        waiting = ask(engine)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        llm.troubles.clear()
        await engine.load(publication)
        await waiting

    run(scenario)


def test_it_keeps_weights_that_nobody_would_bring_again(publication: Publication) -> None:
    async def scenario() -> None:
        llm = SleepingLLM()
        engine = engine_over(llm, transport="ipc")
        await engine.sleep()
        await engine.wake()
        await ask(engine)
        assert llm.calls == ["sleep 1", "wake all", "generate"]

    run(scenario)
    assert not discards_weights(EngineSpec(SHARED, adapter=LoraConfig(rank=8)))
    assert discards_weights(EngineSpec(SHARED))
