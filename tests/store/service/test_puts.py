"""Puts are admitted whole or refused whole, each caller hears of its own groups, and a cancelled one is withdrawn."""

import asyncio

import numpy as np
import pytest

from penstock.store.client.store_client import StoreClient
from penstock.store.data.codec import InlineBatch
from penstock.store.data.schema import encode
from penstock.store.errors import StoreError, TooLarge
from penstock.store.service.store import Store
from tests.store.players import group, leased, run, train, values_of

HUGE = {"prompt_ids": np.zeros(1000, np.int32), "task": "{}"}


def test_a_put_with_one_group_too_large_admits_none() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        waiting = asyncio.ensure_future(client.lease("rollout", 1, "engine"))
        with pytest.raises(TooLarge, match=r"store\.max_bytes=500"):
            await client.put_groups([group(), HUGE])
        columns = {column.name: column for column in (await client.spec()).columns}
        batch, facts = encode(columns, {"prompt_ids": [[1], [2] * 1000], "task": ["", ""]}, [0, 1])
        with pytest.raises(TooLarge):  # whoever does not look before
            await store.put(batch.schema.names, InlineBatch(batch), facts)
        assert await client.put_groups([group(7)]) == [0]
        lease = await waiting
        assert lease is not None
        assert lease.rows.lists("prompt_ids")[0] == [1, 2, 17]

    run(body, max_bytes=500)


def test_callers_whose_groups_travel_together_hear_each_of_its_own() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        puts = [client.put_groups([one]) for one in (group(0), group(1), HUGE, group(2))]
        results = await asyncio.gather(*puts, return_exceptions=True)
        assert [result for result in results if not isinstance(result, BaseException)] == [[0], [1], [2]]
        assert isinstance(results[2], TooLarge)

    run(body, max_bytes=500)


def test_a_cancelled_put_withdraws_what_is_not_admitted_yet() -> None:
    """Credits are for four groups: of the six, the first four were admitted, and stay."""

    async def body(store: Store, client: StoreClient) -> None:
        first = asyncio.ensure_future(client.put_groups([group(number) for number in range(6)]))
        gathered = [asyncio.ensure_future(client.put_groups([group(number)])) for number in (10, 11, 12)]
        while len(store.puts) == 0:
            await asyncio.sleep(0)
        for gone in (first, gathered[1]):
            assert gone.cancel()
        await asyncio.wait({first, gathered[1]})
        for stage in ("rollout", "reward", "reference", "group_advantage"):
            for _ in range(2):
                lease = await leased(client, stage, 2 if stage in ("rollout", "group_advantage") else 4, "worker")
                await client.write(lease, lease.rows.row_ids, values_of(stage, lease))
        await train(client, 0)
        await client.served(1)
        assert await asyncio.gather(gathered[0], gathered[2]) == [[4], [5]]
        lease = await leased(client, "rollout", 9, "engine")
        assert [prompt[2] - 10 for prompt in lease.rows.lists("prompt_ids")[::2]] == [10, 12]
        assert not store.puts.under_way

    run(body)


def test_callers_behind_one_that_is_cancelled_keep_their_place() -> None:
    """Several callers' groups in one message that waits: one of them goes, the others are admitted in order."""

    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group(number) for number in range(4)])
        blocked = asyncio.ensure_future(client.put_groups([group(4)]))
        await asyncio.sleep(0.01)
        together = [asyncio.ensure_future(client.put_groups([group(number)])) for number in (5, 6, 7)]
        await asyncio.sleep(0.01)
        lease = await leased(client, "rollout", 4, "engine")
        await client.drop(lease, lease.rows.row_ids[:2], "test")
        assert await blocked == [4]
        await asyncio.sleep(0.01)  # the three are in the store now, and wait
        assert together[0].cancel()
        await asyncio.sleep(0.01)
        await client.drop(lease, lease.rows.row_ids[2:6], "test")
        assert await asyncio.gather(*together[1:]) == [[5], [6]]

    run(body)


def test_ranks_are_woken_when_a_round_is_there_and_not_before() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        tries = 0
        ask = store.ledger.lease_shared

        def counted(*arguments: object) -> object:
            nonlocal tries
            tries += 1
            return ask(*arguments)  # type: ignore[arg-type]

        store.ledger.lease_shared = counted  # type: ignore[method-assign, assignment]
        ranks = [asyncio.ensure_future(client.lease_shared("train", 0, rank, 2)) for rank in range(2)]
        await asyncio.sleep(0.01)
        asked = tries
        await client.put_groups([group(number) for number in range(2)])
        for stage in ("rollout", "reward", "reference"):
            lease = await leased(client, stage, 4, "worker")
            await client.write(lease, lease.rows.row_ids, values_of(stage, lease))
        await asyncio.sleep(0.01)
        assert tries == asked
        lease = await leased(client, "group_advantage", 4, "worker")
        await client.write(lease, lease.rows.row_ids, values_of("group_advantage", lease))
        assert sorted(row for one in await asyncio.gather(*ranks) if one for row in one.rows.row_ids) == [0, 1, 2, 3]
        assert tries <= asked + 4

    run(body)


def test_a_rank_that_comes_later_gets_its_round_while_another_awaits_the_next() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group(number) for number in range(2)])
        for stage in ("rollout", "reward", "reference", "group_advantage"):
            lease = await leased(client, stage, 4, "worker")
            await client.write(lease, lease.rows.row_ids, values_of(stage, lease))
        await client.lease_shared("train", 0, 0, 2)
        ahead = asyncio.ensure_future(client.lease_shared("train", 1, 0, 2))
        await asyncio.sleep(0.01)
        assert await asyncio.wait_for(client.lease_shared("train", 0, 1, 2), 5) is not None
        ahead.cancel()

    run(body)


def test_the_source_is_the_last_that_became_it() -> None:
    """What the one before has under way is withdrawn but for what is admitted; later it is refused."""

    async def body(store: Store, client: StoreClient) -> None:
        assert await client.become_source() == 0
        waiting = asyncio.ensure_future(client.put_groups([group(number) for number in range(6)]))
        await asyncio.sleep(0.01)
        following = StoreClient(store)
        assert await following.become_source() == 4  # credits are for four
        late = asyncio.ensure_future(following.put_groups([group(4), group(5)]))
        with pytest.raises(StoreError, match="2 groups were not admitted: another client is the source"):
            await waiting
        with pytest.raises(StoreError, match="1 groups were not admitted: another client is the source"):
            await client.put_groups([group(9)])
        await finish_everything(client)
        await train(client, 0)
        await client.served(1)
        assert await late == [4, 5]
        assert await client.become_source() == 6

    run(body)


def test_a_put_that_is_about_to_be_admitted_is_not_once_another_is_the_source() -> None:
    """The credits of the put come in the same turn of the loop, before."""

    async def body(store: Store, client: StoreClient) -> None:
        waiting = asyncio.ensure_future(client.put_groups([group(number) for number in range(6)]))
        await asyncio.sleep(0.01)
        await finish_everything(client)
        await train(client, 0)
        store.ledger.served(1)
        store.puts.wake_first()
        assert await store.become_source("another") == 4
        with pytest.raises(StoreError, match="another client is the source"):
            await waiting
        assert store.ledger.residents.next_group == 4

    run(body)


def test_what_a_client_that_leaves_has_under_way_is_not_admitted() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        producer = StoreClient(store)
        waiting = asyncio.ensure_future(producer.put_groups([group(number) for number in range(6)]))
        await asyncio.sleep(0.01)
        await producer.leave()
        with pytest.raises(StoreError, match="2 groups were not admitted: the client has left"):
            await waiting
        await finish_everything(client)
        await train(client, 0)
        await client.served(1)
        assert await client.put_groups([group()]) == [4]

    run(body)


async def finish_everything(client: StoreClient) -> None:
    """All stages of all that is admitted, up to training."""
    for stage in ("rollout", "reward", "reference", "group_advantage"):
        lease = await leased(client, stage, 100, "worker")
        await client.write(lease, lease.rows.row_ids, values_of(stage, lease))
