"""A store in parts is one store: the same rows, the same bounds, whoever asks where."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.store.client import StoreClient
from penstock.store.errors import LeaseExpired, StoreError
from penstock.store.partitions import missing_numbers, snapshot_places, split_spec
from penstock.store.store import Store
from tests.store.driver import make_spec
from tests.store.players import Served, group, start_workers, train, values_of

WHOLE = make_spec(groups_per_step=4, max_active_groups=8, max_staleness=1)


def run(body: Callable[[list[Store]], Awaitable[None]], num_parts: int, **changes: Any) -> None:
    async def main() -> None:
        spec = split_spec(make_spec(groups_per_step=4, max_active_groups=8, max_staleness=1, **changes), num_parts)
        stores = [Store(spec) for _ in range(num_parts)]
        await asyncio.wait_for(body(stores), 30)
        for store in stores:
            store.ledger.check_invariants()
            await store.close("test over")

    asyncio.run(main())


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_a_run_trains_the_same_rows_in_the_same_order_in_any_number_of_parts(num_parts: int, num_ranks: int) -> None:
    async def body(stores: list[Store]) -> None:
        client, serves = StoreClient(stores), Served()
        workers = start_workers(stores, serves)
        assert await client.put_groups([group(number) for number in range(8)]) == list(range(8))
        for round in range(3):
            leases = await train(client, round, num_ranks)
            rows = sorted(row for lease in leases for row in lease.rows.row_ids.tolist())
            assert rows == list(range(8 * round, 8 * round + 8))
            for lease in leases:
                assert lease.version == round
                assert lease.rows.row_ids.tolist() == sorted(lease.rows.row_ids.tolist())
            last = await client.last_batch(["response_text"])
            assert last.row_ids.tolist() == rows
            serves.version = round + 1
            await client.published(round + 1)
            await client.put_groups([group(number) for number in range(4)])
        stats = await client.stats()
        assert stats["store/rows_trained"] == 24
        assert stats["staleness/worst"] <= 1
        await client.close()
        await asyncio.gather(*workers)

    run(body, num_parts)


def test_the_bounds_of_the_parts_keep_the_bound_of_the_whole() -> None:
    for groups_per_step in (2, 4, 8, 12):
        for window in (1, 2, 3, 5, 9, 17):
            for num_parts in (1, 2, 4):
                if groups_per_step % num_parts:
                    continue
                behind = -(-(window - 1) // groups_per_step)
                whole = make_spec(groups_per_step=groups_per_step, window=window, max_active_groups=3 * groups_per_step)
                part = split_spec(whole, num_parts)
                assert -(-(part.window - 1) // part.groups_per_step) <= behind
                assert part.max_active_groups * num_parts == whole.max_active_groups


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(StoreError, match=r"store\.num_partitions=3 must divide trainer\.groups_per_step=4"):
        split_spec(WHOLE, 3)


def test_a_worker_finds_work_in_any_part_and_leaves_nothing_waiting() -> None:
    async def body(stores: list[Store]) -> None:
        client = StoreClient(stores)
        waiting = [asyncio.ensure_future(client.lease("rollout", 1, "engine")) for _ in range(3)]
        await asyncio.sleep(0.01)
        await client.put_groups([group(number) for number in range(3)])
        leases = await asyncio.wait_for(asyncio.gather(*waiting), 5)
        assert sorted(lease.rows.row_ids[0] // 2 for lease in leases if lease) == [0, 1, 2]
        await asyncio.sleep(0.02)
        assert not any(len(turns) for store in stores for turns in store._consumers.values())
        assert sum(len(store.ledger.residents.leases.held) for store in stores) == 3
        for lease in leases:
            assert lease is not None
            assert lease.rows.lists("prompt_ids")[0][2] == 10 + lease.rows.row_ids[0] // 2
            await client.write(lease, lease.rows.row_ids, values_of("rollout", lease))
        assert (await client.stats())["completed/rollout"] == 6
        with pytest.raises(LeaseExpired):
            await client.renew(leases[0])  # type: ignore[arg-type]

    run(body, 4)


def test_drops_renewals_and_errors_reach_the_part_that_they_are_about() -> None:
    async def body(stores: list[Store]) -> None:
        client = StoreClient(stores)
        await client.put_groups([group(number) for number in range(4)])
        leases = [await client.lease("rollout", 1, "engine") for _ in range(4)]
        for lease in leases:
            assert lease is not None
            await client.renew(lease)
        assert leases[0] is not None
        await client.drop(leases[0], leases[0].rows.row_ids, "engine_failed", "why")
        assert any("why" in error for error in await client.errors())
        assert (await client.stats())["dropped/engine_failed"] == 2
        with pytest.raises(StoreError, match="did you mean 'rollout'"):
            await client.lease("rollouts", 1, "engine")
        described = await client.describe()
        assert described["rows"]["rollout"]["leased"] == 6
        assert len(described["parts"]) == 2
        assert await client.abandon("engine") == 3

    run(body, 2)


def test_a_shared_lease_of_a_stage_is_written_across_the_parts() -> None:
    async def body(stores: list[Store]) -> None:
        client = StoreClient(stores)
        await client.put_groups([group(number) for number in range(4)])
        for _ in range(4):
            lease = await client.lease("rollout", 1, "engine")
            assert lease is not None
            await client.write(lease, lease.rows.row_ids, values_of("rollout", lease))
        ranks = [await client.lease_shared("reference", 0, rank, 2, 100) for rank in range(2)]
        assert sorted(row for lease in ranks if lease for row in lease.rows.row_ids.tolist()) == list(range(8))
        for lease in ranks:
            assert lease is not None
            await client.write(lease, lease.rows.row_ids, values_of("reference", lease))
        assert (await client.stats())["completed/reference"] == 8

    run(body, 2)


def test_each_part_has_its_snapshot(tmp_path: Path) -> None:
    async def body(stores: list[Store]) -> None:
        client = StoreClient(stores)
        await client.put_groups([group(number) for number in range(6)])
        await client.snapshot(str(tmp_path), 1)
        spec = split_spec(WHOLE, 2)
        restored = [Store(spec, restore=tmp_path / f"part-{index}") for index in range(2)]
        assert sum(store.ledger.residents.num_rows for store in restored) == 12
        lease = await StoreClient(restored).lease("rollout", 1, "engine")
        assert lease is not None

    run(body, 2)


def test_groups_put_after_a_restart_get_the_numbers_that_are_missing(tmp_path: Path) -> None:
    """One part is further than the other: it had credits when the other had none."""

    async def body(stores: list[Store]) -> None:
        await StoreClient(stores).put_groups([group(number) for number in range(4)])
        await StoreClient([stores[0]]).put_groups([group(4), group(5)])
        client = StoreClient(stores)
        assert await client.cut() == [4, 2]
        await client.snapshot(str(tmp_path), 1)
        spec = split_spec(WHOLE, 2)
        restored = [Store(spec, restore=place) for place in snapshot_places(str(tmp_path), 2)]
        numbers = await StoreClient(restored).put_groups([group(number) for number in range(2)])
        assert numbers == [5, 7]

    run(body, 2)


def test_numbers_that_are_missing_come_in_order() -> None:
    assert list(itertools.islice(missing_numbers([4, 2]), 4)) == [5, 7, 8, 9]
    assert list(itertools.islice(missing_numbers([0]), 3)) == [0, 1, 2]
