"""Two workers, of which one is slow: what it has for too long the other samples too, and the first answer counts."""

import asyncio
from typing import Any

import pytest

from penstock.store.client.store_client import StoreClient
from penstock.store.ledger.residents import ENOUGH
from penstock.store.service.store import Store
from penstock.workers.protocols import Sampling
from penstock.workers.rollout.engine_scripted import ScriptedEngine, TimeModel
from penstock.workers.rollout.rollout_worker import GroupIntake, RolloutWorker
from tests.store.invariants import check_invariants
from tests.store.visitors import serve
from tests.workers.rollout.test_worker import GROUP_SIZE, make_store, prompts

GROUPS = 4
FAST, SLOW = TimeModel(latency_s=0.02), TimeModel(latency_s=60.0)


def make_worker(name: str, engine: ScriptedEngine) -> RolloutWorker:
    intake = GroupIntake(name, Sampling(max_tokens=5), 17, GROUP_SIZE, 2 * GROUP_SIZE, num_workers=2)
    return RolloutWorker(engine, intake)


def prepare(store: Store) -> None:
    """Note that so many groups have taken 0.1 s each."""
    for _ in range(ENOUGH):
        store.ledger.residents.stragglers.record_time(0.1)


async def first_batch(store: Store, handle: Any, slow: ScriptedEngine) -> tuple[Any, dict[str, float], list[dict]]:
    workers = [make_worker("slow", slow), make_worker("fast", ScriptedEngine(FAST))]
    client = StoreClient(handle)
    running = [asyncio.create_task(worker.run(StoreClient(handle))) for worker in workers]
    await client.put_groups(prompts(GROUPS))
    batch = await asyncio.wait_for(client.lease_shared("train", 0, 0, 1), 10)
    await asyncio.sleep(0.1)
    assert slow.sampled().num_in_flight == 0, "what another has answered is sampled on"
    stats = await client.stats()
    await client.close("the test is over")
    await asyncio.wait_for(asyncio.gather(*running), 10)
    assert batch is not None
    return batch.rows, stats, [worker.stats() for worker in workers]


def test_a_step_does_not_wait_for_an_engine_that_hangs() -> None:
    """The engine is told to stop."""

    async def scenario() -> None:
        store = make_store(straggler_factor=3.0)
        prepare(store)
        rows, stats, workers = await first_batch(store, store, ScriptedEngine(SLOW))
        assert len(rows) == GROUPS * GROUP_SIZE
        assert (stats["stragglers/offered"], stats["stragglers/won"]) == (2, 2)
        assert [worker["twice_groups"] for worker in workers] == [2, 0]
        assert [worker["groups"] for worker in workers] == [0, 4]
        check_invariants(store.ledger)

    asyncio.run(scenario())


def test_a_step_does_not_wait_for_an_engine_in_another_process(tmp_path: Any) -> None:
    async def body(store: Store, endpoint: Any) -> None:
        prepare(store)
        _, stats, workers = await first_batch(store, endpoint, ScriptedEngine(SLOW))
        assert stats["stragglers/won"] == stats["stragglers/offered"] > 0
        assert workers[0]["twice_groups"] == stats["stragglers/won"]

    serve(tmp_path, body, straggler_factor=3.0, groups_per_step=4, stages=make_store().ledger.spec.stages)


def test_an_answer_that_comes_second_is_counted_and_ends_nothing() -> None:
    """The engine did not hear in time that another had answered."""

    class Deaf(StoreClient):
        async def superseded(self) -> Any:
            return None

    async def scenario() -> None:
        store = make_store(straggler_factor=3.0)
        prepare(store)
        client = StoreClient(store)
        engines = {"slow": ScriptedEngine(TimeModel(latency_s=0.6)), "fast": ScriptedEngine(FAST)}
        workers = [make_worker(name, engine) for name, engine in engines.items()]
        running = [asyncio.create_task(worker.run(Deaf(store))) for worker in workers]
        await client.put_groups(prompts(GROUPS))
        while workers[0].stats()["twice_groups"] < 2:
            await asyncio.sleep(0.01)
        stats = await client.stats()
        assert stats["stragglers/late_tokens"] == 2 * GROUP_SIZE * 5
        assert stats["completed/rollout"] == GROUPS * GROUP_SIZE
        await client.close("the test is over")
        await asyncio.gather(*running)

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize("slow_s", [0.0, 0.01])
def test_engines_that_are_alike_have_no_stragglers(slow_s: float) -> None:
    async def scenario() -> None:
        store = make_store(straggler_factor=5.0)
        prepare(store)
        _, stats, _ = await first_batch(store, store, ScriptedEngine(TimeModel(latency_s=slow_s)))
        assert "stragglers/offered" not in stats

    asyncio.run(scenario())
