"""A simulated run against the real store, clients and rollout workers on a virtual clock, with the same durations."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from penstock.algorithms.catalogue import dataflow_of
from penstock.conf.run import RunConfig
from penstock.planner.durations import ConstantDurations, SyncSeconds
from penstock.planner.lengths import Lengths
from penstock.planner.simulation.simulated_members import SimulatedSamples
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store import Store
from penstock.store.spec import StoreSpec
from penstock.workers.protocols import Publication, Sampling
from penstock.workers.rollout.engine_scripted import ScriptedEngine, TimeModel
from penstock.workers.rollout.rollout_worker import GroupIntake, RolloutWorker
from tests.planner.simulation.played import config_of, play
from tests.virtual_time import run_virtually

TOKEN_S, REWARD_S, ROW_S = 0.01, 0.001, 0.05
"""Seconds of a token, of a reward, and of a row's update."""
LENGTHS = Lengths.lognormal(120, 600, 0.8)
SIZE, ENGINES, STEPS = 2, 3, 12


class RealStore:
    """A run of real workers over scripted engines. Lifecycle: `ended`, once."""

    def __init__(self, config: RunConfig, sync: SyncSeconds) -> None:
        self._config, self._sync = config, sync
        spec = replace(StoreSpec.of(dataflow_of(config), config, strict=True), lease_timeout_s=1e9)
        self._store = Store(spec, lambda: asyncio.get_running_loop().time())
        model = TimeModel(tokens_per_s=1 / TOKEN_S)
        self._engines = [
            ScriptedEngine(model, length=lambda ids, sample: LENGTHS.of(ids[0], sample)) for _ in range(ENGINES)
        ]

    async def ended(self) -> list[float]:
        """Times at which each step's version is served."""
        intake = GroupIntake(
            "", Sampling(max_tokens=600), 0, SIZE, self._config.rollout.max_concurrent_samples, ENGINES
        )
        members = [
            RolloutWorker(engine, replace(intake, name=f"Rollout-{index}")).run(StoreClient(self._store))
            for index, engine in enumerate(self._engines)
        ]
        members += [self._prompts(), self._stage("reward", REWARD_S, "reward"),
                    self._stage("group_advantage", 0.0, "advantage")]  # fmt: skip
        tasks = [asyncio.ensure_future(member) for member in members]
        found = await self._steps()
        await self._store.close("test over")
        await asyncio.gather(*tasks, return_exceptions=True)
        return found

    async def _prompts(self) -> None:
        client, number = StoreClient(self._store), 0
        while True:
            await client.put_groups([{"prompt_ids": [number], "task": "{}"}])
            number += 1

    async def _stage(self, stage: str, row_s: float, column: str) -> None:
        client = StoreClient(self._store)
        async with client.leases(stage, 64, stage, ahead=0) as leases:
            async for lease in leases:
                await asyncio.sleep(row_s * len(lease.rows))
                await client.write(lease, lease.rows.row_ids, {column: np.zeros(len(lease.rows), np.float32)})

    async def _steps(self) -> list[float]:
        """The loop of the controller: a step counts once the version before it is sealed, which goes on beside it."""
        client, found, sealed = StoreClient(self._store), list[float](), asyncio.Event()
        finishing: asyncio.Task[None] | None = None
        for step in range(1, self._config.trainer.max_steps + 1):
            lease = await client.lease_shared("train", step - 1, 0, 1)
            assert lease is not None
            await asyncio.sleep(ROW_S * len(lease.rows))
            if finishing is not None:
                await sealed.wait()
            await client.complete_shared(lease.share)
            if finishing is not None:
                await finishing
            sealed.clear()
            await asyncio.sleep(self._sync.critical_s)
            finishing = asyncio.ensure_future(self._finish(client, step, found, sealed))
            if not self._config.max_staleness:
                await finishing
        assert finishing is not None
        await finishing
        return found

    async def _finish(self, client: StoreClient, step: int, found: list[float], sealed: asyncio.Event) -> None:
        await asyncio.sleep(self._sync.published_s - self._sync.critical_s)
        sealed.set()
        await asyncio.gather(*(engine.load(Publication("", step)) for engine in self._engines))
        await client.served(step)
        found.append(asyncio.get_running_loop().time())


class PerRow(ConstantDurations):
    """An update that takes as long as it has rows."""

    def update_s(self, lengths: object) -> float:
        return ROW_S * sum(map(len, lengths))  # type: ignore[call-overload]


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize(("room", "sealed_s"), [(1, 0.4), (3, 0.4), (3, 2.0)])
def test_a_simulated_run_takes_as_long_as_real_workers_do(bound: int, room: int, sealed_s: float) -> None:
    """What comes to a simulated engine waits for the end of a token: that is all by which they may differ."""
    config = config_of(
        max_staleness=bound,
        **{"trainer.num_ranks": 1, "trainer.max_steps": STEPS, "rollout.num_workers": ENGINES,
           "trainer.groups_per_step": 8, "rollout.max_concurrent_samples": room * SIZE},
    )  # fmt: skip
    sync = SyncSeconds(sealed_s, 0.0, 0.1)
    durations = PerRow(prefill_tokens_per_s=1e12, decode={1: TOKEN_S}, synced=sync, stages={"reward": REWARD_S})
    simulated = play(config, durations, SimulatedSamples(LENGTHS.of, prompt_tokens=1))
    real = run_virtually(RealStore(config, sync).ended())
    assert np.cumsum(simulated.steps_s) == pytest.approx(real, rel=0, abs=STEPS * TOKEN_S if bound else 1e-6)
