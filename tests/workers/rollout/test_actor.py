"""The shell around an engine says what the engine is at, while it does it."""

import asyncio
from unittest.mock import patch

from penstock.conf.rollout import RolloutConfig
from penstock.workers.progress import ASLEEP, LOADING, SERVING, STARTING, Progress
from penstock.workers.protocols import EngineSpec, Publication, Sampling
from penstock.workers.rollout import actor as rollout_actor
from penstock.workers.rollout.actor import Rollout, RolloutSpec
from penstock.workers.rollout.engine_scripted import ScriptedEngine, TimeModel
from tests.virtual_time import run_virtually


def rollout(engine: ScriptedEngine) -> Rollout:
    with patch.object(rollout_actor, "make_engine", lambda *_, **__: engine):
        return Rollout(RolloutSpec("Rollout-0", EngineSpec(RolloutConfig(engine="scripted")), 0, 2))


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
