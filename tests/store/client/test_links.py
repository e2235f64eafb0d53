"""Every way to the store keeps the same promises: in this process, over its socket, over TCP."""

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.conf.errors import PartnerGone
from penstock.store.client.links import ConnectionLink, Link, TcpLink
from penstock.store.client.store_client import StoreClient
from penstock.store.data.codec import InlineBatch
from penstock.store.errors import LeaseExpired, NotFinite, StoreClosed, StoreError, UnknownStage
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint
from penstock.store.service.wire import LeaseRequest
from tests.store.players import group, leased, long_responses, values_of
from tests.store.visitors import WAYS, serve, visit, visit_by, visit_remotely

LONG = 3000
"""Tokens: more than travels inline."""
ways = pytest.mark.parametrize("way", list(WAYS))
apart = pytest.mark.parametrize("way", ["socket", "tcp"])

Body = Callable[[Store, StoreClient, Link], Awaitable[None]]


def by(way: str, tmp_path: Path, body: Body, **changes: Any) -> None:
    async def main(store: Store, endpoint: Endpoint) -> None:
        await body(store, *await visit_by(way, store, endpoint))

    serve(tmp_path, main, **changes)


def held(store: Store) -> list[int]:
    return list(store.ledger.residents.leases.held)


@ways
@pytest.mark.parametrize("long", [False, True])
def test_a_batch_goes_its_whole_way(tmp_path: Path, way: str, long: bool) -> None:
    async def body(store: Store, client: StoreClient, link: Link) -> None:
        tokens = LONG if long else 3
        groups = [{"prompt_ids": [number] * tokens, "task": "é" * tokens} for number in range(2)]
        assert await client.put_groups(groups) == [0, 1]
        for stage in ("rollout", "reward", "reference", "group_advantage"):
            lease = await leased(client, stage, 4, stage)
            values = values_of(stage, lease)
            if long and stage == "rollout":
                values = long_responses(lease, LONG)
            elif long and stage == "reference":
                values = {"reference_logprobs": [np.full(LONG, 0.5, dtype=np.float32)] * 4}
            await client.write(lease, lease.rows.row_ids, values)
        assert await client.batch_ready()
        share = await client.lease_shared("train", 0, 0, 1)
        assert share is not None
        assert [ids[0] for ids in share.rows.arrays("prompt_ids")] == [0, 0, 1, 1]
        expected = LONG if long else [2 + row % 5 for row in range(4)]
        assert (share.rows.lengths("response_ids") == expected).all()
        if long:
            assert [set(ids) for ids in share.rows.arrays("response_ids")] == [{row} for row in range(4)]
            assert [set(values) for values in share.rows.arrays("behavior_logprobs")] == [{-row} for row in range(4)]
        assert share.rows.values("advantage").tolist() == [0, 1, 2, 3]
        await client.complete_shared(share.share)
        assert (await client.last_batch(["task"])).strings("task") == ["é" * tokens] * 4
        assert set((await client.last_batch()).names) >= {"prompt_ids", "response_text", "reward"}
        await client.served(1)
        assert (await client.stats())["store/rows_trained"] == 4
        assert (await client.describe())["rows"]["train"] is not None

    by(way, tmp_path, body)


@ways
def test_errors_arrive_as_themselves(tmp_path: Path, way: str) -> None:
    async def body(store: Store, client: StoreClient, link: Link) -> None:
        with pytest.raises(UnknownStage, match="did you mean 'reward'") as caught:
            await client.lease("rewards", 1, "judge")
        assert type(caught.value) is UnknownStage
        await client.put_groups([group()])
        lease = await leased(client, "rollout", 1, "engine")
        values = values_of("rollout", lease) | {"behavior_logprobs": [[float("nan")] * 2, [0.0] * 3]}
        with pytest.raises(NotFinite):
            await client.write(lease, [0, 1], values)
        await client.release(lease)
        with pytest.raises(LeaseExpired):
            await client.renew(lease)
        with pytest.raises(StoreError, match="only 0 batches"):
            await client.served(3)
        await client.close("enough")
        with pytest.raises(StoreClosed, match="enough"):
            await client.put_groups([group()])
        assert await client.lease("rollout", 1, "engine") is None

    by(way, tmp_path, body)


@ways
def test_a_cancelled_call_leaves_nobody_waiting_and_nothing_leased(tmp_path: Path, way: str) -> None:
    async def body(store: Store, client: StoreClient, link: Link) -> None:
        waiting = asyncio.ensure_future(client.lease("reward", 1, "gone"))
        asking = asyncio.ensure_future(client.lease("rollout", 1, "gone"))
        while not all(len(store.consumers[stage]) for stage in ("reward", "rollout")):
            await asyncio.sleep(0)
        await StoreClient(store).put_groups([{"prompt_ids": [7] * LONG, "task": "{}"}])
        while not held(store):  # granted, and perhaps on its way
            await asyncio.sleep(0)
        for call in (waiting, asking):
            call.cancel()
        await asyncio.wait((waiting, asking))
        if not asking.cancelled():  # it was there before
            come = asking.result()
            assert come is not None
            await client.release(come)
        while held(store) or any(map(len, store.consumers.values())):
            await asyncio.sleep(0)
        again = await leased(client, "rollout", 1, "engine")
        assert again.rows.lists("prompt_ids") == [[7] * LONG] * 2
        assert held(store) == [again.id]
        assert client.heartbeat.held.keys() == {again.id}

    by(way, tmp_path, body)


@ways
def test_a_cancelled_put_withdraws_what_is_not_admitted(tmp_path: Path, way: str) -> None:
    async def body(store: Store, client: StoreClient, link: Link) -> None:
        await client.put_groups([group(number) for number in range(4)])
        waiting = asyncio.ensure_future(client.put_groups([group(4)]))
        while not len(store.puts):
            await asyncio.sleep(0)
        waiting.cancel()
        while len(store.puts):
            lease = await leased(client, "rollout", 1, "engine")
            await client.drop(lease, lease.rows.row_ids, "test")
        assert (await client.stats())["store/groups_admitted"] == 4

    by(way, tmp_path, body)


@ways
def test_a_heart_renews_what_its_client_holds_and_hears_what_is_over(tmp_path: Path, way: str) -> None:
    async def body(store: Store, client: StoreClient, link: Link) -> None:
        await client.put_groups([group()])
        lease = await leased(client, "rollout", 1, "engine")
        renewer = link.lease_renewer()
        try:
            assert await asyncio.to_thread(renewer.renew, [lease.id], [], 10.0) == []
            await client.release(lease)
            assert await asyncio.to_thread(renewer.renew, [lease.id], [0, 1], 10.0) == [lease.id]
        finally:
            renewer.close()

    by(way, tmp_path, body)


@ways
def test_rows_that_end_after_they_were_granted_are_there_to_be_read(tmp_path: Path, way: str) -> None:
    async def body(store: Store, client: StoreClient, link: Link) -> None:
        await client.put_groups([{"prompt_ids": [7] * LONG, "task": "{}"}])
        (granted,) = await link.call("lease", LeaseRequest("rollout", 1, "engine", client=client.name))
        await store.drop(granted.lease_id, "rollout", [0, 1], "test", "")
        assert (await client.stats())["store/rows"] == 0
        ((_, rows),) = await client.read([granted])
        assert rows.lists("prompt_ids") == [[7] * LONG] * 2
        del rows, granted
        gc.collect()
        while (await client.stats())["store/shared_bytes"]:
            await asyncio.sleep(0.01)

    by(way, tmp_path, body)


@apart
def test_what_a_client_held_or_waited_for_is_free_as_soon_as_it_is_gone(tmp_path: Path, way: str) -> None:
    async def body(store: Store, dead: StoreClient, link: Link) -> None:
        await dead.put_groups([group(number) for number in range(4)])
        held = await leased(dead, "rollout", 1, "engine")
        waiting = asyncio.ensure_future(dead.lease("reward", 1, "engine"))
        putting = asyncio.ensure_future(dead.put_groups([group(4)]))
        while not len(store.consumers["reward"]) or not len(store.puts):
            await asyncio.sleep(0)
        assert isinstance(link, ConnectionLink)
        link.wire.close()
        for call in (waiting, putting, dead.stats()):
            with pytest.raises(PartnerGone, match="the store's process is gone"):
                await call
        survivor = StoreClient(store)
        lease = await asyncio.wait_for(survivor.lease("rollout", 1, "other"), 5)
        assert lease is not None
        assert lease.rows.row_ids.tolist() == held.rows.row_ids.tolist()
        assert not any(map(len, store.consumers.values()))
        await survivor.drop(lease, lease.rows.row_ids, "test")
        await asyncio.sleep(0.05)
        assert (await survivor.stats())["store/groups_admitted"] == 4

    by(way, tmp_path, body)


@apart
def test_a_store_that_has_closed_lets_nobody_in_any_more(tmp_path: Path, way: str) -> None:
    async def body(store: Store, client: StoreClient, link: Link) -> None:
        await store.close("over")
        with pytest.raises(PartnerGone, match="the store is closed"):
            await asyncio.to_thread(link.lease_renewer().renew, [0], [], 10.0)
        assert (await client.describe())["closed"] == "over"  # who was there stays

    by(way, tmp_path, body)


def test_a_container_that_does_not_see_the_socket_comes_over_tcp_or_is_told(tmp_path: Path) -> None:
    """One that sees neither is told."""

    async def body(store: Store, endpoint: Endpoint) -> None:
        await visit_remotely(endpoint)
        with pytest.raises(PartnerGone, match="no store listens at /not/here"):
            await StoreClient(Endpoint("", "/not/here", ("", ""))).stats()

    serve(tmp_path, body)


def test_remote_and_local_clients_work_on_the_same_rows(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        (local, _), (remote, _) = await visit(endpoint), await visit_remotely(endpoint)
        for producer, consumer in ((local, remote), (remote, local)):
            await producer.put_groups([{"prompt_ids": [7] * LONG, "task": "{}"}])
            lease = await leased(producer, "rollout", 1, "engine")
            await producer.write(lease, lease.rows.row_ids, long_responses(lease, LONG))
            judged = await leased(consumer, "reference", 2, "reference")
            assert [set(ids) for ids in judged.rows.arrays("response_ids")] == [{row} for row in judged.rows.row_ids]
            assert judged.rows.lists("prompt_ids") == [[7] * LONG] * 2
            await consumer.drop(judged, judged.rows.row_ids, "test")

    serve(tmp_path, body)


def test_a_remote_client_is_sent_no_more_than_the_rows_and_columns_it_wants(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        client, link = await visit_remotely(endpoint)
        await client.put_groups([{"prompt_ids": [number] * LONG, "task": "t" * LONG} for number in range(4)])
        (granted,) = await link.call("lease", LeaseRequest("rollout", 1, "engine", client="c"))
        assert [source.batch for source in granted.payload.sources if isinstance(source, InlineBatch)] == []
        fetched = await link.fetch(granted.payload)
        batches = [source.batch for source in fetched.sources]
        assert fetched.refs == []
        assert [batch.schema.names for batch in batches] == [["prompt_ids"]]
        assert sum(batch.nbytes for batch in batches) < 2 * LONG * 4 + 100

    serve(tmp_path, body)


def test_many_clients_at_once_are_all_let_in(tmp_path: Path) -> None:
    async def body(store: Store, endpoint: Endpoint) -> None:
        links = await asyncio.gather(*(TcpLink.connect(endpoint, f"c{number}") for number in range(200)))
        assert {spec.group_size for spec in await asyncio.gather(*(link.call("spec") for link in links))} == {2}

    serve(tmp_path, body)
