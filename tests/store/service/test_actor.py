"""The store as a Ray actor: the same promises across processes, large values through shared memory."""

import asyncio
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.conf.errors import WorkerDied
from penstock.store.client.store_client import StoreClient
from penstock.store.client.sync import SyncStoreClient
from penstock.store.errors import LeaseExpired, StoreError, UnknownStage
from tests.store.driver import make_spec

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.real

LONG = 80_000
"""Tokens of a response: more than travel inline."""

LEASE_TIMEOUT_S = 600.0
"""Timeout so long that no lease expires here: what comes back does so because a connection has ended."""


@pytest.fixture
def handle(cluster: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    from penstock.store.service.store_actor import create_store_actor, end_store_actor

    handle = create_store_actor(make_spec(lease_timeout_s=LEASE_TIMEOUT_S), "store-test", name=request.node.name)
    yield handle
    end_store_actor(handle)


class Engine:
    """A worker in a process of its own. It cannot import the tests, so it brings what it needs."""

    def __init__(self, handle: Any) -> None:
        from penstock.store.client.store_client import StoreClient

        self.client = StoreClient(handle)
        self.leases: list[Any] = []

    async def process(self) -> int:
        import os

        return os.getpid()

    async def lease(self, stage: str) -> list[int]:
        self.leases.append(await self.client.lease(stage, 1, "engine"))
        return list(self.leases[-1].rows.row_ids.tolist())

    async def respond(self, tokens: int) -> None:
        import numpy as np

        lease = self.leases.pop()
        count = len(lease.rows)
        columns = {
            "response_ids": [np.full(tokens, row, dtype=np.int32) for row in lease.rows.row_ids],
            "behavior_logprobs": [np.zeros(tokens, dtype=np.float32)] * count,
            "token_versions": [np.zeros(tokens, dtype=np.int32)] * count,
            "response_text": ["text"] * count,
            "finish_reason": ["stop"] * count,
        }
        await self.client.write(lease, lease.rows.row_ids, columns)


def groups(count: int) -> list[dict[str, Any]]:
    return [{"prompt_ids": [1, 2, 3], "task": "{}"} for _ in range(count)]


def test_the_actor_is_named_for_what_it_is_and_stays_light(handle: Any) -> None:
    assert asyncio.run(StoreClient(handle).spec()).group_size == 2
    assert "Actor(Store," in repr(handle)


def test_large_results_of_a_worker_killed_afterwards_are_read_in_place(handle: Any) -> None:
    async def body() -> None:
        client = StoreClient(handle)
        await client.put_groups(groups(1))
        engine = ray.remote(num_cpus=0)(Engine).remote(handle)
        assert await engine.lease.remote("rollout") == [0, 1]
        await engine.respond.remote(LONG)
        os.kill(await engine.process.remote(), signal.SIGKILL)
        await asyncio.sleep(0.5)
        lease = await client.lease("reference", 2, "reference")
        ids = lease.rows.arrays("response_ids")
        assert [(array[0], array[-1], len(array)) for array in ids] == [(0, 0, LONG), (1, 1, LONG)]
        assert not ids[0].flags.writeable  # the object store's own memory
        assert (await client.stats())["store/bytes"] > 2 * LONG * 12
        values = [np.zeros(LONG, dtype=np.float32)] * 2
        await client.write(lease, lease.rows.row_ids, {"reference_logprobs": values})
        assert lease.rows.lists("prompt_ids") == [[1, 2, 3]] * 2

    asyncio.run(body())


def test_the_rows_of_a_killed_consumer_come_back_and_another_finishes_them(handle: Any) -> None:
    async def body() -> None:
        client = StoreClient(handle)
        await client.put_groups(groups(2))
        victim, survivor = (ray.remote(num_cpus=0)(Engine).remote(handle) for _ in range(2))
        pid, _ = await asyncio.gather(victim.process.remote(), survivor.process.remote())  # both are up
        assert await victim.lease.remote("rollout") == [0, 1]
        assert await survivor.lease.remote("rollout") == [2, 3]
        os.kill(pid, signal.SIGKILL)
        await survivor.respond.remote(4)
        assert await asyncio.wait_for(survivor.lease.remote("rollout"), 60) == [0, 1]  # long before it would expire
        await survivor.respond.remote(4)
        assert (await client.stats())["completed/rollout"] == 4

    asyncio.run(body())


def test_typed_errors_cross_the_process_boundary_as_themselves(handle: Any) -> None:
    async def body() -> None:
        client = StoreClient(handle)
        with pytest.raises(UnknownStage, match="did you mean 'reward'") as caught:
            await client.lease("rewards", 1, "judge")
        assert type(caught.value) is UnknownStage
        await client.put_groups(groups(1))
        late = await client.lease("rollout", 1, "late")
        await client.release(late)
        with pytest.raises(LeaseExpired):
            await client.renew(late)
        with pytest.raises(StoreError, match="only 0 batches"):
            await client.served(3)

    asyncio.run(body())


def test_every_writer_hears_of_the_stores_death(handle: Any) -> None:
    async def body() -> None:
        client = StoreClient(handle)
        await client.put_groups(groups(1))
        lease = await client.lease("rollout", 1, "engine")
        waiting = asyncio.ensure_future(client.lease("reward", 1, "judge"))
        await asyncio.sleep(0.1)
        ray.kill(handle)
        with pytest.raises(WorkerDied, match="the store's process is gone"):
            await asyncio.wait_for(waiting, 20)
        writes = [client.write(lease, [row], {"response_text": ["text"]}) for row in (0, 1)]
        results = await asyncio.wait_for(asyncio.gather(*writes, return_exceptions=True), 20)
        assert all(isinstance(result, WorkerDied) for result in results)

    asyncio.run(body())


def test_synchronous_clients_speak_to_the_actor(handle: Any) -> None:
    asyncio.run(StoreClient(handle).put_groups(groups(1)))
    client = SyncStoreClient(handle)
    lease = client.lease_shared("rollout", 0, 0, 1)
    assert lease is not None
    assert lease.rows.row_ids.tolist() == [0, 1]
    assert client.settle("rollout") == 1
    asyncio.run(StoreClient(handle).close("done"))
    assert client.lease_shared("reward", 0, 0, 1) is None


@pytest.mark.parametrize("killed", [False, True])
def test_a_stores_directories_are_its_own_and_go_with_it(cluster: None, tmp_path: Path, killed: bool) -> None:
    """Two on the same disk, as of two runs or users; one of them is killed by what ends processes out of memory."""
    from penstock.store.service.store_actor import create_store_actor, end_store_actor

    spec = make_spec(spill_dir=str(tmp_path / "disk"), shared_bytes=1000, inline_bytes=1000)
    names = [f"/dev/shm/penstock-{uuid.uuid4().hex}" for _ in range(2)]
    stores = [create_store_actor(spec, "two-stores", f"Store-of-{name[-8:]}", directory=name) for name in names]

    async def body() -> None:
        for store in stores:
            client = StoreClient(store)
            await client.put_groups([{"prompt_ids": [1] * 5000, "task": "{}"}])
            assert (await client.stats())["store/spilled_bytes"] > 0

    asyncio.run(body())
    spilled = list((tmp_path / "disk").iterdir())
    assert len(spilled) == 2
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in [*map(Path, names), *spilled])
    if killed:
        os.kill(asyncio.run(StoreClient(stores[0]).describe())["process"]["pid"], signal.SIGKILL)
    for store in stores:
        end_store_actor(store, spec.spill_dir)
    assert not list((tmp_path / "disk").iterdir())
    assert not any(map(os.path.exists, names))
