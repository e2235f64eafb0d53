"""The shell around an engine samples from adapters, and ends calls that nobody waits for any more."""

import asyncio
from pathlib import Path
from typing import cast
from unittest.mock import patch

import pytest
import ray

from penstock.conf.errors import ConfigError, UnknownAdapter, WorkerDied
from penstock.conf.rollout import RolloutConfig
from penstock.metering.meters import Meters
from penstock.workers.protocols import (
    AdapterSpec,
    AdapterState,
    EngineSpec,
    RolloutEngine,
    SampleCall,
    SampleOutput,
    Sampling,
)
from penstock.workers.rollout import rollout_actor as rollout_actor
from penstock.workers.rollout.engine_scripted import ScriptedEngine
from penstock.workers.rollout.rollout_actor import Rollout, RolloutSpec
from penstock.workers.rollout.rollout_engines import EngineMeter
from tests.metering.measured import measured
from tests.workers.rollout.adapter_states import adapter_state

STATE = AdapterState(AdapterSpec(4), {})
CALL = SampleCall([1, 2], 1, Sampling(seed=1))


class Endless:
    """An engine whose samples never end, until it is closed."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.num_under_way = 0
        self.died = asyncio.Event()

    async def add_adapter(self, name: str, state: AdapterState) -> None:
        self.names.append(name)

    async def drop_adapter(self, name: str) -> None:
        self.names.remove(name)

    def adapters(self) -> list[str]:
        return self.names

    async def sample(self, adapter: str | None, call: SampleCall) -> SampleOutput:
        self.num_under_way += 1
        try:
            await self.died.wait()
        finally:
            self.num_under_way -= 1
        raise WorkerDied("the engine is gone")


def rollout(engine: object, name: str = "hf") -> Rollout:
    with patch.object(rollout_actor, "make_engine", lambda *_, **__: engine):
        return Rollout(RolloutSpec("Rollout-0", EngineSpec(RolloutConfig(engine=name)), 0, 2, pulls=False))


def test_an_aborted_call_ends_and_no_other_does() -> None:
    async def scenario() -> None:
        engine = Endless()
        actor = rollout(engine)
        calls = [asyncio.create_task(actor.sample(None, CALL, name)) for name in ("x", "y")]
        while engine.num_under_way < 2:
            await asyncio.sleep(0)
        await actor.abort("x")
        await actor.abort("unheard of")
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        assert (engine.num_under_way, calls[1].done()) == (1, False)
        calls[1].cancel()  # as ray.cancel does
        with pytest.raises(asyncio.CancelledError):
            await calls[1]
        assert engine.num_under_way == 0

    asyncio.run(scenario())


def test_the_death_of_an_engine_is_what_its_calls_raise_and_what_run_hears_of() -> None:
    async def scenario() -> None:
        engine = Endless()
        actor = rollout(engine)
        call = asyncio.create_task(actor.sample(None, CALL, "x"))
        engine.died.set()
        with pytest.raises(WorkerDied, match="the engine is gone"):
            await call
        assert actor.has_died.is_set()

    asyncio.run(scenario())


def test_samples_of_adapters_are_counted() -> None:
    class Ready(Endless):
        async def sample(self, adapter: str | None, call: SampleCall) -> SampleOutput:
            return SampleOutput([])

    meters, actor = Meters(), rollout(Ready())
    actor._meter = EngineMeter(cast(RolloutEngine, Ready()), meters)
    asyncio.run(actor.sample("a", SampleCall([1], 3, Sampling(seed=1)), "x"))
    assert measured(meters)["rollout_samples_total"] == 3


def test_adapters_come_and_go_by_name() -> None:
    async def scenario() -> None:
        actor = rollout(Endless())
        await actor.add_adapter("a", STATE)
        await actor.add_adapter("b", STATE)
        await actor.drop_adapter("a")
        assert await actor.adapters() == ["b"]

    asyncio.run(scenario())


def test_an_engine_without_adapters_says_so() -> None:
    with pytest.raises(ConfigError, match=r"serves no adapters by name\. Set rollout\.engine=vllm or hf"):
        asyncio.run(rollout(ScriptedEngine(), "scripted").add_adapter("a", STATE))


@pytest.mark.real
def test_a_call_is_ended_by_ray_cancel_and_by_abort_across_processes(cluster: str, tiny_model: Path) -> None:
    spec = EngineSpec(RolloutConfig(engine="hf", max_model_len=32_000), str(tiny_model))
    actor = ray.remote(Rollout).options(max_concurrency=100).remote(RolloutSpec("R", spec, 0, 1, pulls=False))
    ray.get(actor.start.remote(), timeout=900)
    ray.get(actor.add_adapter.remote("a", adapter_state(tiny_model, 1)), timeout=900)
    long = SampleCall([5, 6], 1, Sampling(max_tokens=30_000, seed=1, ignore_eos=True))
    short = SampleCall([5, 6], 1, Sampling(max_tokens=2, seed=1))
    for end in (ray.cancel, lambda _: ray.get(actor.abort.remote("x"), timeout=900)):
        ref = actor.sample.remote("a", long, "x")
        while not ray.get(actor.progress.remote(), timeout=900).num_in_flight:
            pass
        end(ref)
        with pytest.raises((ray.exceptions.TaskCancelledError, ray.exceptions.RayTaskError)):
            ray.get(ref, timeout=900)
        assert len(ray.get(actor.sample.remote("a", short, "y"), timeout=900).samples) == 1
        assert ray.get(actor.progress.remote(), timeout=900).num_in_flight == 0
    with pytest.raises(UnknownAdapter):
        ray.get(actor.sample.remote("b", short, "z"), timeout=900)
    ray.kill(actor)
