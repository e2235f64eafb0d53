"""What is free is shared among those who ask or are about to, and nobody is waited for for long."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.store.client.store_client import StoreClient
from penstock.store.service.sharing import PATIENCE_S
from penstock.store.service.store import Store
from tests.store.driver import make_spec
from tests.store.invariants import check_invariants
from tests.store.players import group, leased, values_of
from tests.virtual_time import run_virtually


def run(body: Callable[[Store, StoreClient], Awaitable[None]], **changes: Any) -> None:
    async def main() -> None:
        store = Store(make_spec(**({"groups_per_step": 8, "max_active_groups": 8} | changes)), now)
        await asyncio.wait_for(body(store, StoreClient(store)), 1000)
        check_invariants(store.ledger)
        await store.close("test over")

    run_virtually(main())


def now() -> float:
    return asyncio.get_running_loop().time()


async def put(client: StoreClient, count: int) -> None:
    await client.put_groups([group(number) for number in range(count)])


def groups_of(lease: Any) -> list[int]:
    return [row // 2 for row in lease.rows.row_ids[::2]]


def test_those_that_wait_share_and_groups_keep_their_order() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        asks = [asyncio.ensure_future(StoreClient(store).lease("rollout", 6, f"engine-{index}")) for index in range(3)]
        await asyncio.sleep(1)
        await put(client, 8)
        assert [groups_of(lease) for lease in await asyncio.gather(*asks)] == [[0, 1, 2], [3, 4, 5], [6, 7]]

    run(body)


def test_each_gets_what_it_can_take_and_others_the_rest() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        small = asyncio.ensure_future(StoreClient(store).lease("rollout", 1, "small"))
        large = asyncio.ensure_future(StoreClient(store).lease("rollout", 100, "large"))
        await asyncio.sleep(1)
        await put(client, 8)
        assert [len(groups_of(lease)) for lease in await asyncio.gather(small, large)] == [1, 7]

    run(body)


def test_whoever_holds_fewer_is_served_first() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        busy, idle = StoreClient(store), StoreClient(store)
        await put(client, 2)
        assert len(groups_of(await busy.lease("rollout", 2, "busy"))) == 2
        asks = [asyncio.ensure_future(one.lease("rollout", 8, "engine")) for one in (busy, idle)]
        await asyncio.sleep(1)
        await put(client, 2)
        done, _ = await asyncio.wait(asks, timeout=1)
        assert done == {asks[1]}
        assert groups_of(asks[1].result()) == [2, 3]
        asks[0].cancel()

    run(body)


def test_units_are_kept_a_moment_for_an_engine_that_has_not_come_yet() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await put(client, 8)
        first, late = StoreClient(store), StoreClient(store)
        assert len(groups_of(await first.lease("rollout", 8, "first", max_held=8, num_peers=2))) == 4
        more = asyncio.ensure_future(first.lease("rollout", 8, "first", max_held=8, num_peers=2))
        await asyncio.sleep(PATIENCE_S / 2)
        assert not more.done()
        assert len(groups_of(await late.lease("rollout", 8, "late", max_held=8, num_peers=2))) == 4
        more.cancel()

    run(body)


def test_an_engine_that_does_not_come_holds_nobody_up_for_long_and_only_once() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        alive = StoreClient(store)
        await put(client, 8)
        began = now()
        leases = [await alive.lease("rollout", 16, "alive", max_held=16, num_peers=3) for _ in range(2)]
        assert [len(groups_of(lease)) for lease in leases] == [3, 5]
        assert now() - began == PATIENCE_S
        for lease in leases:
            assert lease is not None
            await alive.drop(lease, lease.rows.row_ids, "test")
        began = now()
        await put(client, 8)
        assert len(groups_of(await alive.lease("rollout", 16, "alive", max_held=16, num_peers=3))) == 8
        assert now() == began

    run(body)


def test_a_dead_engine_is_not_waited_for() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        alive, dead = StoreClient(store), StoreClient(store)
        asks = [asyncio.ensure_future(one.lease("rollout", 8, name, max_held=8, num_peers=2))
                for one, name in ((alive, "alive"), (dead, "dead"))]  # fmt: skip
        await asyncio.sleep(PATIENCE_S + 1)
        await put(client, 4)
        assert [len(groups_of(lease)) for lease in await asyncio.gather(*asks)] == [2, 2]
        more = asyncio.ensure_future(alive.lease("rollout", 8, "alive", max_held=8, num_peers=2))
        began = now()
        await asyncio.sleep(0)
        await store.left(dead.name)
        assert len(groups_of(await more)) == 2  # what the dead one held
        assert now() == began

    run(body)


def test_a_stream_that_fetches_ahead_leaves_some_for_others() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        got: list[list[int]] = []

        async def work() -> None:
            own = StoreClient(store)
            async with own.leases("rollout", 2, "worker", ahead=1) as leases:
                async for lease in leases:
                    got.append(groups_of(lease))
                    await asyncio.sleep(1)
                    await own.write(lease, lease.rows.row_ids, values_of("rollout", lease))

        workers = [asyncio.ensure_future(work()) for _ in range(2)]
        await asyncio.sleep(1)
        await put(client, 4)
        await asyncio.sleep(0.5)
        assert sorted(got) == [[0, 1], [2, 3]]
        await client.close()
        await asyncio.gather(*workers)

    run(body)


def test_samples_of_a_group_are_shared_too() -> None:
    """The processes of a reward, for example, ask through one client."""

    async def body(store: Store, client: StoreClient) -> None:
        await put(client, 1)
        lease = await leased(client, "rollout", 1, "engine")
        rewards = StoreClient(store)
        lanes = [asyncio.ensure_future(rewards.lease("reward", 64, "reward-0")) for _ in range(2)]
        await asyncio.sleep(1)
        await client.write(lease, lease.rows.row_ids, values_of("rollout", lease))
        assert [len(one.rows) for one in await asyncio.gather(*lanes) if one] == [4, 4]

    run(body, group_size=8)
