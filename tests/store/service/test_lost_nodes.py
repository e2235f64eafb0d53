"""A node is gone with the large batches that were written there: the store has them made again, and trains each row
once. The store is on node a, engines write on node b."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.store.client.lease import Lease
from penstock.store.client.store_client import StoreClient
from penstock.store.data.block_index import BlockIndex
from penstock.store.errors import LeaseExpired, RowsLost, StoreError
from penstock.store.service.store import Store
from penstock.store.service.store_server import Endpoint
from tests.store.driver import make_spec
from tests.store.players import group, leased, values_of
from tests.store.visitors import remote_nodes, serve, until

LONG = 1000
"""Tokens of a response: more than go inline."""

Body = Callable[[Store, StoreClient, StoreClient], Awaitable[None]]
LATER = ("reward", "reference", "group_advantage")


def with_an_engine(tmp_path: Path, body: Body, **changes: Any) -> None:
    """`body(store, local, engine)`: a client on the store's node, and one on node b."""
    remote, nodes = remote_nodes(tmp_path, "b")

    async def served(store: Store, endpoint: Endpoint) -> None:
        try:
            await body(store, StoreClient(endpoint), StoreClient(endpoint, node="b"))
        finally:
            for node in remote.values():
                await asyncio.to_thread(node.close)

    serve(tmp_path, served, node="a", nodes=nodes, **changes)


def values(stage: str, lease: Lease, serial: int) -> dict[str, Any]:
    """`serial` goes from the response into all that is computed from it."""
    if stage == "rollout":
        return values_of(stage, lease) | {
            "response_ids": [np.full(LONG, serial, dtype=np.int32)] * len(lease.rows),
            "response_text": [str(serial)] * len(lease.rows),
            "behavior_logprobs": [np.full(LONG, -serial, dtype=np.float32)] * len(lease.rows),
            "token_versions": [np.zeros(LONG, dtype=np.int32)] * len(lease.rows),
        }
    if stage == "reward":
        return {"reward": [float(text) for text in lease.rows.strings("response_text")]}
    if stage == "reference":
        return {"reference_logprobs": [ids.astype(np.float32) for ids in lease.rows.arrays("response_ids")]}
    return {"advantage": lease.rows.values("reward").tolist()}


async def done(client: StoreClient, stage: str, units: int = 100, serial: int = 1) -> list[int]:
    lease = await leased(client, stage, units)
    await client.write(lease, lease.rows.row_ids, values(stage, lease, serial))
    return [int(row) for row in lease.rows.row_ids]


async def ready(local: StoreClient, engine: StoreClient) -> None:
    """Group 0 was sampled on the store's node, group 1 on the engine's."""
    await local.put_groups([group(0), group(1)])
    assert await done(local, "rollout", 1) == [0, 1]
    assert await done(engine, "rollout", 1) == [2, 3]
    for stage in LATER:
        await done(local, stage)


def test_lost_responses_are_sampled_again_and_their_rows_trained_once(tmp_path: Path) -> None:
    async def body(store: Store, local: StoreClient, engine: StoreClient) -> None:
        await ready(local, engine)
        waiting = asyncio.ensure_future(leased(local, "rollout"))  # woken by the loss
        ranks = asyncio.ensure_future(local.batch_ready())
        assert await ranks
        await store.lost("b")
        lease = await waiting
        assert lease.rows.row_ids.tolist() == [2, 3]
        await local.write(lease, lease.rows.row_ids, values("rollout", lease, 2))
        for stage in LATER:
            assert await done(local, stage) == [2, 3]
        batch = await local.lease_shared("train", 0, 0, 1)
        assert batch is not None
        assert batch.rows.row_ids.tolist() == [0, 1, 2, 3]
        for name in ("reward", "advantage"):
            assert batch.rows.values(name).tolist() == [1, 1, 2, 2]
        for name in ("response_ids", "reference_logprobs"):
            assert [row[0] for row in batch.rows.arrays(name)] == [1, 1, 2, 2]
        await local.complete_shared(batch.share)
        stats = await local.stats()
        assert stats["store/rows_trained"] == 4
        assert {name: count for name, count in stats.items() if name.startswith("lost/")} == {
            "lost/rollout": 2, "lost/reward": 2, "lost/reference": 2, "lost/group_advantage": 2,
        }  # fmt: skip
        assert not any(store.blocks.lost_cells())

    with_an_engine(tmp_path, body)


def test_what_was_computed_from_a_lost_response_comes_too_late(tmp_path: Path) -> None:
    async def body(store: Store, local: StoreClient, engine: StoreClient) -> None:
        await local.put_groups([group()])
        await done(engine, "rollout")
        lease = await leased(local, "reward")
        await store.lost("b")
        with pytest.raises(LeaseExpired):
            await local.write(lease, lease.rows.row_ids, values("reward", lease, 1))
        await done(local, "rollout", serial=2)
        assert (await leased(local, "reward")).rows.strings("response_text") == ["2", "2"]

    with_an_engine(tmp_path, body)


def test_nothing_is_taken_from_a_node_that_counts_as_lost(tmp_path: Path) -> None:
    async def body(store: Store, local: StoreClient, engine: StoreClient) -> None:
        await local.put_groups([group()])
        lease = await leased(engine, "rollout")
        await store.lost("b")
        with pytest.raises(StoreError, match="lies on node b, which counts as lost"):
            await engine.write(lease, lease.rows.row_ids, values("rollout", lease, 1))
        assert await local.stats() | {"store/rows": 2, "store/leases": 1} == await local.stats()

    with_an_engine(tmp_path, body)


def test_groups_that_wait_or_were_admitted_are_gone_with_their_prompts(tmp_path: Path) -> None:
    async def body(store: Store, local: StoreClient, engine: StoreClient) -> None:
        long = [{"prompt_ids": list(range(LONG)), "task": "{}"}] * 6
        putting = asyncio.ensure_future(engine.put_groups(long))
        while store.ledger.residents.next_group < 4:
            await asyncio.sleep(0.01)
        await store.lost("b")  # four credits come back
        with pytest.raises(StoreError, match="2 groups waited to be admitted and are gone"):
            await putting
        stats = await local.stats()
        assert (stats["dropped/node_lost"], stats["store/rows"], stats["store/blocks"]) == (8, 0, 0)
        assert await local.put_groups([group()]) == [4]

    with_an_engine(tmp_path, body)


def test_a_rank_that_comes_after_the_loss_is_told_and_the_step_formed_again(tmp_path: Path) -> None:
    async def body(store: Store, local: StoreClient, engine: StoreClient) -> None:
        await ready(local, engine)
        first = await local.lease_shared("train", 0, 0, 2)
        assert first is not None
        await store.lost("b")
        with pytest.raises(RowsLost, match="Release the round"):
            await local.lease_shared("train", 0, 1, 2)
        await local.cut()
        await local.snapshot(str(tmp_path / "snapshots"), 1)  # of the batch under way, as if it had been released
        restored = StoreClient(Store(make_spec(), restore=tmp_path / "snapshots"))
        await local.release(first)
        for client in (local, restored):
            assert await done(client, "rollout") == [2, 3]
            for stage in LATER:
                assert await done(client, stage) == [2, 3]
            batch = await client.lease_shared("train", 0, 0, 1)
            assert batch is not None
            assert batch.rows.row_ids.tolist() == [0, 1, 2, 3]
            await client.complete_shared(batch.share)

    with_an_engine(tmp_path, body)


def test_the_batch_trained_last_is_shown_without_the_rows_that_it_has_lost(tmp_path: Path) -> None:
    async def body(store: Store, local: StoreClient, engine: StoreClient) -> None:
        await ready(local, engine)
        batch = await local.lease_shared("train", 0, 0, 1)
        assert batch is not None
        await local.complete_shared(batch.share)
        await store.lost("b")
        assert (await local.last_batch(["response_ids", "reward"])).row_ids.tolist() == [0, 1]
        assert {"response_ids", "reward"} <= set((await local.last_batch()).names)

    with_an_engine(tmp_path, body)


def test_a_lost_node_is_heard_of_whole_though_who_told_of_it_goes(tmp_path: Path) -> None:
    """The command is killed between two slices, and the next one tells of the node again."""

    async def body(store: Store, local: StoreClient, engine: StoreClient) -> None:
        long = {"prompt_ids": [7] * LONG, "task": "{}"}
        await engine.put_groups([long] * 10)
        store.blocks.lost = lambda: BlockIndex.lost(store.blocks, 4)  # type: ignore[method-assign]
        telling = asyncio.ensure_future(store.lost("b"))
        await until(lambda: store.ledger.counters["dropped/node_lost"] > 0, pause_s=0)
        assert not telling.done()
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        await local.lost("b")
        assert store.ledger.counters["dropped/node_lost"] == 10 * store.ledger.spec.group_size
        assert not store.ledger.residents.groups

    with_an_engine(tmp_path, body, max_active_groups=10)
