"""A client that leaves its store, as if its process had ended."""

import asyncio
from pathlib import Path

import pytest

from penstock.conf.errors import PartnerGone
from penstock.store.client.links import Link
from penstock.store.client.store_client import StoreClient
from penstock.store.client.sync import SyncStoreClient
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint
from tests.store.client.test_links import apart, by, held, ways
from tests.store.own_process import store_process
from tests.store.players import group
from tests.store.visitors import serve


async def until_nothing_is_held(store: Store) -> None:
    while held(store):
        await asyncio.sleep(0.005)


@ways
def test_what_it_held_goes_back_and_it_speaks_no_more(tmp_path: Path, way: str) -> None:
    async def body(store: Store, client: StoreClient, link: Link) -> None:
        await client.put_groups([group(), group()])
        assert await client.lease("rollout", 1, "engine")
        assert held(store)
        await client.leave()
        await client.leave()
        await until_nothing_is_held(store)
        with pytest.raises(PartnerGone, match="has left its store"):
            await client.stats()

    by(way, tmp_path, body)


@apart
def test_what_waits_hears_of_it(tmp_path: Path, way: str) -> None:
    async def body(store: Store, client: StoreClient, link: Link) -> None:
        waiting = [asyncio.ensure_future(call) for call in (client.lease("rollout", 1, "engine"), client.batch_ready())]
        await asyncio.sleep(0.05)
        await client.leave()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, PartnerGone)

    by(way, tmp_path, body)


def test_one_that_never_called_leaves_too(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client = StoreClient(endpoint)
        await client.leave()
        with pytest.raises(PartnerGone):
            await client.stats()

    serve(tmp_path, body)


def test_its_heart_stops(tmp_path: Path) -> None:
    async def body(store: Store, client: StoreClient, link: Link) -> None:
        await client.put_groups([group()])
        await client.lease("rollout", 1, "engine")
        assert client.heartbeat.beats
        await client.leave()
        while client.heartbeat.beats:
            await asyncio.sleep(0.01)

    by("socket", tmp_path, body, lease_timeout_s=0.3)


@pytest.mark.parametrize("in_process", [True, False])
def test_a_blocking_client_leaves_beside_a_call_that_waits(tmp_path: Path, in_process: bool) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        await store.spec()
        client = SyncStoreClient(store if in_process else endpoint)
        waiting = asyncio.create_task(asyncio.to_thread(client.lease_shared, "train", 0, 0, 1))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await asyncio.to_thread(client.leave)
        await asyncio.to_thread(client.leave)
        with pytest.raises(PartnerGone):
            await waiting
        with pytest.raises(PartnerGone, match="has left its store"):
            await asyncio.to_thread(client.settle, "train")
        while (await store.describe())["waiting"]["train"]:
            await asyncio.sleep(0.005)

    serve(tmp_path, body)


def test_a_blocking_client_is_left_by_several_threads_at_once(tmp_path: Path) -> None:
    """One whose work has ended, and one that has the next in its place."""

    async def body(store: Store, endpoint: Endpoint) -> None:
        await store.spec()
        for _ in range(20):
            client = SyncStoreClient(endpoint)
            await asyncio.to_thread(client.spec)
            await asyncio.gather(*(asyncio.to_thread(client.leave) for _ in range(4)))

    serve(tmp_path, body)


@pytest.mark.real
def test_one_whose_store_was_killed_leaves_without_a_word(tmp_path: Path) -> None:
    async def body() -> None:
        with store_process(tmp_path) as store:
            client = StoreClient(store.endpoint)
            waiting = asyncio.create_task(client.lease("rollout", 1, "engine"))
            await asyncio.sleep(0.1)
            store.kill()
            with pytest.raises(PartnerGone, match="process is gone"):
                await waiting
            await client.leave()

    asyncio.run(body())
