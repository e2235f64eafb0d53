"""The store in-process: who waits for whom."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.conf.errors import TakenOver
from penstock.store.client.lease import Lease, SharedLease
from penstock.store.client.store_client import StoreClient
from penstock.store.client.sync import SyncStoreClient
from penstock.store.errors import LeaseExpired, StoreClosed, StoreError, UnknownStage
from penstock.store.service.store import Store
from penstock.store.spec import StageSpec
from tests.store.driver import make_spec
from tests.store.players import group, response, run


def stop_heart(client: StoreClient, lease: Lease) -> None:
    """End the heartbeat, as if the process that holds the lease had died."""
    client.heartbeat.unhold(lease.id)


async def work(client: StoreClient, stage: str, values: Callable[[Lease], dict[str, Any]]) -> None:
    while (lease := await client.lease(stage, 4, stage)) is not None:
        await client.write(lease, lease.rows.row_ids, values(lease))


def start_workers(store: Store, client: StoreClient) -> list["asyncio.Task[None]"]:
    def rewards(lease: Lease) -> dict[str, Any]:
        return {"reward": [float(len(text)) for text in lease.rows.strings("response_text")]}

    def responses(lease: Lease) -> dict[str, Any]:
        return response(len(lease.rows), version=store.ledger.residents.credits.served_version)

    return [
        asyncio.ensure_future(work(client, "rollout", responses)),
        asyncio.ensure_future(work(client, "reward", rewards)),
        asyncio.ensure_future(
            work(
                client,
                "reference",
                lambda lease: {"reference_logprobs": [-0.1 * ids for ids in lease.rows.arrays("response_ids")]},
            )
        ),
        asyncio.ensure_future(
            work(client, "group_advantage", lambda lease: {"advantage": lease.rows.values("reward") - 2})
        ),
    ]


def test_rows_stream_through_all_stages_with_the_values_that_were_written() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        workers = start_workers(store, client)
        producer = asyncio.ensure_future(client.put_groups([group(number) for number in range(8)]))
        for number in range(4):
            first, second = await asyncio.gather(*(client.lease_shared("train", number, rank, 2) for rank in range(2)))
            assert first.version == number
            rows = sorted([*first.rows.row_ids.tolist(), *second.rows.row_ids.tolist()])
            assert rows == list(range(4 * number, 4 * number + 4))
            for lease in (first, second):
                assert lease.rows.row_ids.tolist() == sorted(lease.rows.row_ids.tolist())
                assert [ids[-1] - 10 for ids in lease.rows.lists("prompt_ids")] == lease.rows.group_ids.tolist()
                assert (lease.rows.values("advantage") == lease.rows.lengths("response_ids") - 2).all()
                assert lease.rows.values("reward").dtype == np.float32
                await client.complete_shared(lease.share)
            assert len(await client.last_batch(["task", "advantage"])) == 4
            await client.served(number + 1)
        assert await producer == list(range(8))
        stats = await client.stats()
        assert (stats["store/rows"], stats["store/rows_trained"], stats["store/waiting_producers"]) == (0, 16, 0)
        assert stats["store/length_bias"] == 1.0
        await client.close()
        await asyncio.gather(*workers)
        assert (await client.last_batch()).strings("task")[0] == '{"number": 6}'

    run(body)


def test_the_data_of_ended_rows_is_let_go() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        workers = start_workers(store, client)
        for number in range(4):
            await client.put_groups([group(), group()])
            lease = await client.lease_shared("train", number, 0, 1)
            await client.complete_shared(lease.share)
            await client.served(number + 1)
            blocks = (await client.describe())["blocks"]
            assert blocks["count"] <= 12  # of the last batch: no growth with the number of steps
        await client.close()
        await asyncio.gather(*workers)

    run(body)


def test_a_producer_waits_for_credits_and_goes_on_when_they_return() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        producer = asyncio.ensure_future(client.put_groups([group(number) for number in range(5)]))
        await asyncio.sleep(0.01)
        assert not producer.done()
        assert (await client.stats())["store/waiting_producers"] == 1
        lease = await client.lease("rollout", 1, "engine")
        await client.drop(lease, lease.rows.row_ids, "engine_failed", "out of memory")
        assert await producer == [0, 1, 2, 3, 4]
        assert "out of memory" in (await client.describe())["last_drops"][-1]
        assert (await client.stats())["dropped/engine_failed"] == 2

    run(body)


def test_waiting_consumers_are_served_in_the_order_in_which_they_came() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        waiting = [asyncio.ensure_future(client.lease("rollout", 1, f"engine-{number}")) for number in range(3)]
        await asyncio.sleep(0)
        await client.put_groups([group(number) for number in range(3)])
        leases = await asyncio.gather(*waiting)
        assert [lease.rows.group_ids[0] for lease in leases] == [0, 1, 2]

    run(body)


MOMENTS: dict[str, Callable[[Store], bool]] = {
    "before there is anything": lambda store: True,
    "before it is woken": lambda store: store.ledger.residents.next_group == 1,
    "between the wake-up and its turn": lambda store: store.consumers["rollout"]._woken is not None,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cancelled_consumer_leaves_no_lease_and_passes_its_turn_on(moment: str) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        gone = asyncio.ensure_future(client.lease("rollout", 1, "gone"))
        next_one = asyncio.ensure_future(client.lease("rollout", 1, "next"))
        while len(store.consumers["rollout"]) < 2:
            await asyncio.sleep(0)
        putting = asyncio.ensure_future(client.put_groups([group()]))
        while not MOMENTS[moment](store):
            await asyncio.sleep(0)
        assert gone.cancel()
        lease = await next_one
        assert lease.rows.group_ids.tolist() == [0, 0]
        assert [held["owner"] for held in (await client.describe())["leases"]] == ["next"]
        assert await putting == [0]
        assert gone.cancelled()

    run(body)


def test_a_store_that_waits_does_nothing() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        waiting = [asyncio.ensure_future(client.lease(stage, 1, "w")) for stage in ("rollout", "reward")]
        waiting.append(asyncio.ensure_future(client.lease_shared("train", 0, 0, 1)))
        waiting.append(asyncio.ensure_future(client.put_groups([group(number) for number in range(6)])))
        queues = (store.consumers["reward"], store._ranks["train"], store.puts)
        while not (waiting[0].done() and all(map(len, queues))) or store._waiters._is_scheduled:
            await asyncio.sleep(0)
        pumps = 0
        wake = store._waiters._wake

        def counted() -> None:
            nonlocal pumps
            pumps += 1
            wake()

        store._waiters._wake = counted  # type: ignore[method-assign]
        await asyncio.sleep(0.1)
        assert pumps == 0
        await client.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert results[1:3] == [None, None]
        assert isinstance(results[3], StoreClosed)

    run(body)


def test_expired_rows_go_to_whoever_waits_without_any_other_event() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group()])
        late = await client.lease("rollout", 1, "late")
        stop_heart(client, late)
        lease = await client.lease("rollout", 1, "quick")  # nothing else happens: the timer alone wakes it
        assert lease.rows.row_ids.tolist() == late.rows.row_ids.tolist()
        with pytest.raises(LeaseExpired):
            await client.write(late, [0, 1], response(2))
        await client.write(lease, [0, 1], response(2))
        await client.write(late, [0, 1], response(2))  # done by now: ignored

    run(body, lease_timeout_s=0.4)


def test_concurrent_writes_travel_together() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group(number) for number in range(4)])
        lease = await client.lease("rollout", 4, "engine")
        await client.write(lease, lease.rows.row_ids, response(8))
        lease = await client.lease("reward", 8, "judge")
        sizes = []
        many = store.many

        async def counted(calls: list[Any]) -> Any:
            sizes.append(len(calls))
            return await many(calls)

        store.many = counted  # type: ignore[method-assign]
        await asyncio.gather(*(client.write(lease, [row], {"reward": [1.0]}) for row in range(8)))
        assert sum(sizes) == 8
        assert len(sizes) <= 3

    run(body)


def test_a_closed_store_takes_no_groups_and_wakes_everybody() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        waiting = asyncio.ensure_future(client.lease("rollout", 1, "engine"))
        await asyncio.sleep(0)
        await client.close("the run has ended")
        assert await waiting is None
        assert await client.lease("reward", 1, "judge") is None
        assert await client.lease_shared("train", 0, 0, 1) is None
        with pytest.raises(StoreClosed, match="the run has ended"):
            await client.put_groups([group()])

    run(body)


@pytest.mark.parametrize("waits", [False, True])
def test_a_round_that_one_rank_has_begun_is_given_to_the_others_after_the_end(waits: bool) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        workers = start_workers(store, client)
        await client.put_groups([group(), group()])
        first = await store.lease_shared("train", 0, 0, 2, 0, "trainer-0")
        assert first is not None
        second = asyncio.ensure_future(store.lease_shared("train", 0, 1, 2, 0, "trainer-1")) if waits else None
        await client.close("the run has ended")
        second = await (second or store.lease_shared("train", 0, 1, 2, 0, "trainer-1"))
        assert second is not None
        assert second.lease_id == first.lease_id
        assert await store.lease_shared("train", 1, 0, 2, 0, "trainer-0") is None
        await asyncio.gather(*workers)

    run(body)


def test_ranks_that_take_the_place_of_others_get_the_batch_that_was_not_trained() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        workers = start_workers(store, client)
        await client.put_groups([group(), group()])
        first = [await client.lease_shared("train", 0, rank, 2) for rank in range(2)]
        await client.complete_shared(first[0].share)
        assert await client.settle("train") == 0
        with pytest.raises(LeaseExpired):
            await client.complete_shared(first[1].share)
        again = [await client.lease_shared("train", 0, rank, 2) for rank in range(2)]
        assert [one.rows.row_ids.tolist() for one in again] == [one.rows.row_ids.tolist() for one in first]
        for lease in again:
            await client.complete_shared(lease.share)
        assert await client.settle("train", 2) == 1
        with pytest.raises(UnknownStage):
            await client.settle("trian", 2)
        for late in (client.settle("train", 1), client.served(1, 1), client.catch_up([], 1, 1)):
            with pytest.raises(TakenOver):
                await late
        assert await client.settle("train") == 1  # a worker's
        await client.close()
        await asyncio.gather(*workers)

    run(body)


def test_synchronous_ranks_use_the_same_store_from_their_threads() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        workers = start_workers(store, client)
        await client.put_groups([group(), group()])

        def rank(number: int) -> SharedLease:
            lease = SyncStoreClient(store).lease_shared("train", 0, number, 2)
            assert lease is not None
            return lease

        leases = await asyncio.gather(*(asyncio.to_thread(rank, number) for number in range(2)))
        assert sum(len(lease.rows) for lease in leases) == 4
        await asyncio.gather(*(client.complete_shared(lease.share) for lease in leases))
        await client.close()
        await asyncio.gather(*workers)

    run(body)


def test_demonstrations_bring_their_response_once_for_the_group() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups(
            [
                {"prompt_ids": [1], "task": "{}", "response_ids": [5, 6, 7]},
                {"prompt_ids": [1, 2], "task": "{}", "response_ids": [8]},
            ]
        )
        lease = await client.lease_shared("train", 0, 0, 1)
        assert lease.rows.lists("response_ids") == [[5, 6, 7], [8]]

    run(
        body,
        group_size=1,
        source_columns=("prompt_ids", "task", "response_ids"),
        stages=(StageSpec("train", "batch", ("prompt_ids", "response_ids"), ()),),
    )


def test_empty_responses_are_rows_like_others() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group()])
        lease = await client.lease("rollout", 1, "engine")
        values = response(2) | {"response_ids": [[], []], "behavior_logprobs": [[], []], "token_versions": [[], []]}
        await client.write(lease, [0, 1], values)
        lease = await client.lease("reference", 2, "reference")
        assert lease.rows.lists("response_ids") == [[], []]

    run(body)


def test_a_stage_without_columns_is_completed_by_an_empty_write() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group()])
        lease = await client.lease("log", 2, "logger")
        await client.write(lease, lease.rows.row_ids, {})
        assert (await client.describe())["rows"]["log"]["done"] == 2

    run(body, stages=(*make_spec().stages, StageSpec("log", "sample", ("task",), ())))


def test_groups_admitted_after_the_rest_of_their_put_ended_have_their_data() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        producer = asyncio.ensure_future(client.put_groups([group(number) for number in range(5)]))
        lease = await client.lease("rollout", 4, "engine")
        await client.drop(lease, lease.rows.row_ids, "engine_failed")
        await producer
        lease = await client.lease("rollout", 1, "engine")
        assert lease.rows.lists("prompt_ids")[0] == [1, 2, 14]

    run(body)


def test_a_call_that_fails_by_a_fault_of_the_stores_fails_alone() -> None:
    """Those that travelled with it were carried out, and hear so."""

    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group(), group(1)])
        leases = [await client.lease("rollout", 1, "engine") for _ in range(2)]
        broken = ("drop", (leases[0].id, "rollout", ["no row"], "test", ""))
        results = await store.many([("release", (leases[0].id,)), broken, ("release", (leases[1].id,))])
        assert [error is None for _, error in results] == [True, False, True]
        assert isinstance(results[1][1], StoreError)
        assert "TypeError" in str(results[1][1])
        assert not store.ledger.residents.leases.held

    run(body)
