"""The shell around an engine says what the engine is at, while it does it."""

import asyncio
from unittest.mock import patch

import pytest

from penstock.conf.errors import WorkerDied
from penstock.conf.rollout import RolloutConfig
from penstock.store.service.store import Store
from penstock.workers.protocols import EngineSpec, Publication, Sampling
from penstock.workers.rollout import rollout_actor as rollout_actor
from penstock.workers.rollout.engine_scripted import ScriptedEngine, TimeModel
from penstock.workers.rollout.rollout_actor import Rollout, RolloutSpec
from penstock.workers.runtime.serving import ASLEEP, LOADING, SERVING, STARTING, Progress
from tests.store.driver import make_spec
from tests.virtual_time import run_virtually


def rollout(engine: ScriptedEngine, pulls: bool = True) -> Rollout:
    with patch.object(rollout_actor, "make_engine", lambda *_, **__: engine):
        return Rollout(RolloutSpec("Rollout-0", EngineSpec(RolloutConfig(engine="scripted")), 0, 2, pulls=pulls))


async def seen(actor: Rollout) -> tuple[str, int, int]:
    progress: Progress = await actor.progress()
    return progress.phase, progress.num_done, progress.num_in_flight


def test_its_phases_are_those_of_its_engine() -> None:
    async def scenario() -> list[tuple[str, int, int]]:
        actor = rollout(ScriptedEngine(TimeModel(tokens_per_s=10, load_s=2.0)))
        found = [await seen(actor)]
        await actor.start()
        group = asyncio.create_task(actor.generate([[1, 2]], 3, [Sampling(max_tokens=50)]))
        await asyncio.sleep(1.0)
        found.append(await seen(actor))
        loading = asyncio.create_task(actor.load(Publication("", 1)))
        await asyncio.sleep(1.0)
        found.append(await seen(actor))
        await asyncio.gather(group, loading)
        await actor.sleep()
        found.append(await seen(actor))
        await actor.load(Publication("", 2))
        found.append(await seen(actor))
        await actor.wake()
        return [*found, await seen(actor)]

    assert run_virtually(scenario()) == [
        (STARTING, 0, 0), (SERVING, 30, 3), (LOADING, 60, 3), (ASLEEP, 150, 0), (ASLEEP, 150, 0), (SERVING, 150, 0),
    ]  # fmt: skip


def test_an_engine_that_dies_while_environments_ask_it_ends_its_actors_service() -> None:
    """They go on with another engine, and tell nobody."""

    async def scenario() -> None:
        engine = ScriptedEngine(TimeModel(tokens_per_s=10))
        actor, store = rollout(engine, pulls=False), Store(make_spec())
        await actor.start()
        serving = asyncio.create_task(actor.run(store))
        await asyncio.sleep(1.0)
        await engine.close()
        assert not serving.done()
        with pytest.raises(WorkerDied):
            await actor.generate([[1, 2]], 1, [Sampling(max_tokens=5)])
        with pytest.raises(WorkerDied, match="scripted engine is closed"):
            await serving

    run_virtually(scenario())


def test_an_engine_that_environments_ask_serves_until_the_store_closes() -> None:
    async def scenario() -> None:
        actor, store = rollout(ScriptedEngine(TimeModel(tokens_per_s=10)), pulls=False), Store(make_spec())
        await actor.start()
        serving = asyncio.create_task(actor.run(store))
        await asyncio.sleep(1.0)
        await store.close("over")
        await serving

    run_virtually(scenario())
