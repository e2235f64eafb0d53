"""An actor that is given another store serves that one; what it did for the one before is over."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.conf.errors import PartnerGone
from penstock.conf.rollout import RolloutConfig, SamplingConfig
from penstock.store.client.store_client import StoreClient
from penstock.store.service.store import Store
from penstock.workers.protocols import Completion, EngineSpec, Sampling
from penstock.workers.rollout.engine_scripted import ScriptedEngine, TimeModel
from penstock.workers.rollout.rollout_actor import Rollout, RolloutSpec
from penstock.workers.rollout.rollout_worker import GroupIntake, RolloutWorker
from penstock.workers.runtime.serving import Serving
from tests.store.driver import make_spec
from tests.store.own_process import store_process
from tests.store.players import Served as Version
from tests.store.players import group, run, work


class Loop:
    """Serves one stage, and counts how many it serves at a time."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def serve(self, store: StoreClient) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await work(store, "rollout", "engine", Version())
        finally:
            await asyncio.sleep(0.05)  # its tasks take a moment to end
            self.now -= 1


def test_another_run_ends_the_one_before_and_waits_for_it() -> None:
    async def body(first: Store, _: StoreClient) -> None:
        others = [Store(make_spec()) for _ in range(3)]
        loop = Loop()
        serving = Serving(loop.serve)
        runs = []
        for store in (first, *others):
            runs.append(asyncio.create_task(serving.run(store)))
            await asyncio.sleep(0.01)
        await asyncio.wait_for(asyncio.gather(*runs[:-1]), 5)  # they have returned, without an error
        assert loop.most == 1
        await StoreClient(others[-1]).put_groups([group()])
        while not (await others[-1].stats()).get("completed/rollout"):
            await asyncio.sleep(0.005)
        assert not runs[-1].done()
        await others[-1].close("done")
        await asyncio.wait_for(runs[-1], 5)

    run(body)


def test_a_second_run_with_the_same_store_is_the_first() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        loop = Loop()
        serving = Serving(loop.serve)
        first, second = (asyncio.create_task(serving.run(store)) for _ in range(2))
        await client.put_groups([group()])
        while not (await store.stats()).get("completed/rollout"):
            await asyncio.sleep(0.005)
        assert loop.now == 1
        await store.close("done")
        await asyncio.wait_for(asyncio.gather(first, second), 5)
        assert loop.most == 1

    run(body)


def test_a_run_retired_before_it_serves_returns_and_another_serves_anew() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        loop = Loop()
        serving = Serving(loop.serve)
        running = asyncio.create_task(serving.run(store))
        await asyncio.sleep(0)  # it has begun, and its task has not
        await serving.retire()
        await serving.drain(1.0)
        await asyncio.wait_for(running, 5)
        assert loop.most == 0
        again = asyncio.create_task(serving.run(store))
        await client.put_groups([group()])
        while not (await store.stats()).get("completed/rollout"):
            await asyncio.sleep(0.005)
        await store.close("done")
        await asyncio.wait_for(again, 5)

    run(body)


def test_a_run_after_one_that_has_failed_serves_anew() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        failures = iter([RuntimeError("broken")])

        async def serve(store: StoreClient) -> None:
            for failure in failures:
                raise failure

        serving = Serving(serve)
        with pytest.raises(RuntimeError, match="broken"):
            await serving.run(store)
        await serving.run(store)

    run(body)


def test_the_store_before_gets_its_rows_back() -> None:
    async def body(first: Store, client: StoreClient) -> None:
        async def hold(store: StoreClient) -> None:
            await store.lease("rollout", 2, "engine")
            await asyncio.Event().wait()

        await client.put_groups([group(), group()])
        serving = Serving(hold)
        running = asyncio.create_task(serving.run(first))
        await asyncio.sleep(0.01)
        assert first.ledger.residents.leases.held
        other = Store(make_spec())
        next_one = asyncio.create_task(serving.run(other))
        await running
        assert not first.ledger.residents.leases.held
        next_one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await next_one

    run(body)


def test_what_serving_raises_is_raised() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        async def fail(store: StoreClient) -> None:
            raise RuntimeError("broken")

        with pytest.raises(RuntimeError, match="broken"):
            await Serving(fail).run(store)

    run(body)


class Watched(ScriptedEngine):
    """Counts the groups that were given up."""

    given_up = 0

    async def generate(self, prompt_ids: Sequence[int], num_samples: int, sampling: Sampling) -> list[Completion]:
        try:
            return await super().generate(prompt_ids, num_samples, sampling)
        except asyncio.CancelledError:
            self.given_up += 1
            raise


def test_an_engine_goes_on_with_another_store_and_gives_up_what_was_in_flight() -> None:
    async def body(first: Store, client: StoreClient) -> None:
        engine = Watched(TimeModel(latency_s=0.2))
        worker = RolloutWorker(engine, GroupIntake("Rollout-1", Sampling(max_tokens=3), 0, 2, 4))
        serving = Serving(worker.run)
        before = asyncio.create_task(serving.run(first))
        await client.put_groups([group(), group()])
        await asyncio.sleep(0.05)
        second = Store(make_spec())
        after = asyncio.create_task(serving.run(second))
        await before
        assert engine.given_up == 2
        await StoreClient(second).put_groups([group(), group()])
        while (await second.stats()).get("completed/rollout", 0) < 4:
            await asyncio.sleep(0.01)
        assert "completed/rollout" not in await first.stats()
        while worker.stats()["groups"] < 2:  # counted on, from one store to the next; once the store has answered
            await asyncio.sleep(0.01)
        await second.close("done")
        await after

    run(body)


@pytest.mark.parametrize(("drain_s", "finished"), [(10.0, 4), (0.0, 0)])
def test_who_drains_finishes_what_it_can_in_time_and_gives_back_the_rest(drain_s: float, finished: int) -> None:
    """A worker that drains takes nothing more."""

    async def body(store: Store, client: StoreClient) -> None:
        engine = Watched(TimeModel(latency_s=0.2))
        worker = RolloutWorker(engine, GroupIntake("Rollout-1", Sampling(max_tokens=3), 0, 2, 8))
        serving = Serving(worker.run)
        running = asyncio.create_task(serving.run(store))
        await client.put_groups([group(), group()])
        await asyncio.sleep(0.05)
        draining = asyncio.create_task(serving.drain(drain_s))
        await asyncio.sleep(0.01)
        await client.put_groups([group(), group()])
        other = StoreClient(store)  # it needs not wait for one that takes nothing more
        lease = await asyncio.wait_for(other.lease("rollout", 4, "Rollout-2", max_held=4), 1)
        assert lease is not None
        await asyncio.wait_for(draining, 5)
        await running  # without an error
        assert (await store.stats()).get("completed/rollout", 0) == finished
        assert engine.given_up == (0 if finished else 2)
        assert [held.owner for held in store.ledger.residents.leases.held.values()] == ["Rollout-2"]
        await serving.drain(1.0)  # nothing to do

    run(body)


@pytest.mark.real
def test_an_actor_whose_store_was_killed_serves_the_next(tmp_path: Path) -> None:
    config = RolloutConfig(engine="scripted", sampling=SamplingConfig(max_tokens=3))
    spec = RolloutSpec("Rollout-1", EngineSpec(config), 0, group_size=2)

    async def body() -> dict[str, Any]:
        rollout = Rollout(spec)
        await rollout.start()
        with store_process(tmp_path) as first, store_process(tmp_path) as second:
            running = asyncio.create_task(rollout.run(first.endpoint))
            await StoreClient(first.endpoint).put_groups([group()])
            while not (await rollout.stats())["groups"]:
                await asyncio.sleep(0.01)
            first.kill()
            with pytest.raises(PartnerGone):
                await asyncio.wait_for(running, 20)
            running = asyncio.create_task(rollout.run(second.endpoint))
            client = StoreClient(second.endpoint)
            await client.put_groups([group(), group()])
            while (await rollout.stats())["groups"] < 3:
                await asyncio.sleep(0.01)
            await client.close("done")
            await asyncio.wait_for(running, 20)
            return await rollout.stats()

    assert asyncio.run(asyncio.wait_for(body(), 60))["samples"] == 6
