"""A store actor's client on another machine: Ray says where the store is, all else goes over TCP. One cluster and one
store for all tests."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray

from penstock.conf.errors import PartnerGone
from penstock.store.client.heartbeat import LeaseRenewer
from penstock.store.client.links import SocketLink, TcpLink
from penstock.store.client.store_client import StoreClient
from penstock.store.errors import LeaseExpired, UnknownStage
from penstock.store.service.wire import LeaseRequest
from tests.store.driver import make_spec
from tests.store.players import group, leased, long_responses, train, values_of
from tests.store.visitors import linked

pytestmark = pytest.mark.real

LONG = 30_000
"""Tokens of a response: more than travel inline."""
ANSWER_S = 300.0


@pytest.fixture(scope="module")
def handle(cluster: str) -> Iterator[Any]:
    from penstock.store.service.store_actor import create_store_actor, end_store_actor

    handle = create_store_actor(make_spec(lease_timeout_s=600.0, max_active_groups=8, max_staleness=3), "elsewhere")
    yield handle
    end_store_actor(handle)


def elsewhere(handle: Any, body: Callable[[StoreClient, StoreClient], Awaitable[None]]) -> None:
    """`body` gets a client on another machine and one on the store's. What they leave is dropped."""

    async def main() -> None:
        remote, local = StoreClient(handle, node="another machine"), StoreClient(handle)
        for client, link in ((remote, TcpLink), (local, SocketLink)):
            assert isinstance(await linked(client), link)
        await asyncio.wait_for(body(remote, local), ANSWER_S)
        stats = await local.stats()
        while stats["store/rows"]:
            lease = await leased(local, "rollout", 100, "cleaner")
            await local.drop(lease, lease.rows.row_ids, "test over")
            stats = await local.stats()
        assert stats["store/leases"] == 0

    asyncio.run(main())


def test_large_values_come_and_go_and_are_those_that_were_written(handle: Any) -> None:
    async def body(remote: StoreClient, local: StoreClient) -> None:
        await remote.put_groups([group(number) for number in range(2)])
        lease = await leased(remote, "rollout", 2, "engine")
        await remote.write(lease, lease.rows.row_ids, long_responses(lease, LONG))
        for client in (local, remote):  # from a segment in place, and pulled
            judged = await leased(client, "reference", 4, "reference")
            assert [set(ids) for ids in judged.rows.arrays("response_ids")] == [{row} for row in judged.rows.row_ids]
            assert [len(ids) for ids in judged.rows.arrays("response_ids")] == [LONG] * 4
            assert judged.rows.lists("prompt_ids") == [[1, 2, 10]] * 2 + [[1, 2, 11]] * 2
            await client.release(judged) if client is local else None
        await remote.drop(judged, judged.rows.row_ids, "test")

    elsewhere(handle, body)


def test_rows_that_end_after_they_were_granted_are_there_to_be_read(handle: Any) -> None:
    async def body(remote: StoreClient, local: StoreClient) -> None:
        await local.put_groups([{"prompt_ids": [7] * LONG, "task": "{}"}])
        (granted,) = await remote.link.call("lease", LeaseRequest("rollout", 1, "engine", client="remote"))
        await local.link.call("drop", granted.lease_id, "rollout", granted.payload.row_ids.tolist(), "test", "")
        ((_, rows),) = await remote.read([granted])
        assert rows.lists("prompt_ids") == [[7] * LONG] * 2
        while (await local.stats())["store/shared_bytes"]:  # until nobody reads it
            await asyncio.sleep(0.01)

    elsewhere(handle, body)


def test_ranks_on_two_machines_train_a_step_and_its_batch_is_read_afterwards(handle: Any) -> None:
    async def body(remote: StoreClient, local: StoreClient) -> None:
        numbers = await remote.put_groups([group(number) for number in range(2)])
        for stage in ("rollout", "reward", "reference", "group_advantage"):
            lease = await leased(remote, stage, 4, stage)
            values = long_responses(lease, LONG) if stage == "rollout" else values_of(stage, lease)
            if stage == "reference":
                values = {"reference_logprobs": [np.zeros(LONG, dtype=np.float32)] * 4}
            await remote.write(lease, lease.rows.row_ids, values)
        shares = await asyncio.gather(
            *(client.lease_shared("train", 0, rank, 2) for rank, client in enumerate((remote, local)))
        )
        for client, share in zip((remote, local), shares, strict=True):
            assert share is not None
            assert [set(ids) for ids in share.rows.arrays("response_ids")] == [{row} for row in share.rows.row_ids]
            await client.complete_shared(share.share)
        batch = await remote.last_batch(["response_ids", "task"])
        assert sorted(set(batch.group_ids.tolist())) == numbers
        assert [ids[0] for ids in batch.arrays("response_ids")] == batch.row_ids.tolist()
        await remote.served(1)
        # A batch stays until the next one is trained.
        await local.put_groups([group(number) for number in range(2)])
        for stage in ("rollout", "reward", "reference", "group_advantage"):
            lease = await leased(local, stage, 4, stage)
            await local.write(lease, lease.rows.row_ids, values_of(stage, lease))
        await train(local, 1)
        await local.served(2)

    elsewhere(handle, body)


def test_a_remote_clients_heartbeat_renews_what_it_holds_and_hears_what_is_over(handle: Any) -> None:
    async def body(remote: StoreClient, local: StoreClient) -> None:
        await local.put_groups([group()])
        lease = await leased(remote, "rollout", 1, "engine")
        renewer = remote.link.lease_renewer()
        assert await asyncio.to_thread(renewer.renew, [lease.id], [], ANSWER_S) == []
        await remote.release(lease)
        assert await asyncio.to_thread(renewer.renew, [lease.id], [0, 1], ANSWER_S) == [lease.id]

    elsewhere(handle, body)


def test_a_remote_client_that_is_cancelled_leaves_no_lease(handle: Any) -> None:
    async def body(remote: StoreClient, local: StoreClient) -> None:
        asking = asyncio.ensure_future(remote.lease("rollout", 1, "gone"))
        while not any((await local.describe())["waiters"]["rollout"]):
            pass
        asking.cancel()
        await local.put_groups([group()])
        lease = await leased(local, "rollout", 1, "engine")
        assert asking.cancelled()
        assert (await local.stats())["store/leases"] == 1
        await local.release(lease)

    elsewhere(handle, body)


def test_typed_errors_arrive_as_themselves(handle: Any) -> None:
    async def body(remote: StoreClient, local: StoreClient) -> None:
        with pytest.raises(UnknownStage, match="did you mean 'reward'") as caught:
            await remote.lease("rewards", 1, "judge")
        assert type(caught.value) is UnknownStage
        await remote.put_groups([group()])
        late = await leased(remote, "rollout", 1, "late")
        await remote.release(late)
        with pytest.raises(LeaseExpired):
            await remote.renew(late)

    elsewhere(handle, body)


def beat(renewer: LeaseRenewer) -> None:
    """Renew ten times, as a heartbeat does: a process that is ending still takes a connection, and resets it."""
    for _ in range(10):
        with contextlib.suppress(ConnectionError, TimeoutError):
            renewer.renew([0], [], ANSWER_S)
        time.sleep(0.5)


def test_a_remote_client_hears_of_the_stores_death(handle: Any) -> None:
    """The last one: it ends the store."""

    async def main() -> None:
        remote = StoreClient(handle, node="another machine")
        waiting = asyncio.ensure_future(remote.lease("reward", 1, "judge"))
        await remote.stats()
        ray.kill(handle)
        with pytest.raises(PartnerGone, match="the store's process is gone"):
            await asyncio.wait_for(waiting, ANSWER_S)
        renewer = remote.link.lease_renewer()
        with pytest.raises(PartnerGone, match="the store's process is gone"):
            await asyncio.to_thread(beat, renewer)

    asyncio.run(main())
