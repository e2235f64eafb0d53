"""Ranks take rounds together: what becomes of one rank's request decides for all, before anybody computes."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.conf.errors import PartnerGone, StoreError
from penstock.store.client.lease import SharedLease
from penstock.store.client.store_client import StoreClient
from penstock.store.client.sync import SyncStoreClient
from penstock.store.errors import RowsUnreachable
from penstock.store.service.store import Store
from penstock.workers.trainer import trainer_worker
from penstock.workers.trainer.trainer_worker import SharedRounds
from tests.store.driver import make_spec
from tests.store.invariants import check_invariants
from tests.store.players import STAGES, group, values_of


class Thread:
    """A rank that is a thread."""

    reports_rows = True

    def __init__(self, rank: int, told: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self._told, self._barrier = rank, told, barrier
        self.data_rank, self.num_data_ranks = rank, len(told)

    def gather_ranks(self, value: Any) -> list[Any]:
        self._told[self.rank] = value
        self._barrier.wait(10)
        values = list(self._told)
        self._barrier.wait(10)
        return values


def gang(stage: str, num_ranks: int = 2, **options: Any) -> list[SharedRounds]:
    barrier, told = threading.Barrier(num_ranks), [None] * num_ranks
    return [SharedRounds(stage, Thread(rank, told, barrier), **options) for rank in range(num_ranks)]


class Failing:
    """A rank's client of a store. `failures`: of the next requests for a round, None for one that is well."""

    def __init__(self, store: Store, failures: Sequence[Exception | None] = ()) -> None:
        self._client, self._failures = SyncStoreClient(store), list(failures)
        self.settled = 0

    def lease_shared(self, *arguments: Any) -> SharedLease | None:
        lease = self._client.lease_shared(*arguments)
        if self._failures and (failure := self._failures.pop(0)):
            raise failure
        return lease

    def settle(self, stage: str) -> int:
        self.settled += 1
        return self._client.settle(stage)

    def spec(self) -> Any:
        return self._client.spec()


def run(body: Callable[[Store, StoreClient], Awaitable[None]], **changes: Any) -> None:
    async def main() -> None:
        store = Store(make_spec(**changes))
        await store.spec()
        await asyncio.wait_for(body(store, StoreClient(store)), 30)
        check_invariants(store.ledger)

    asyncio.run(main())


async def prepare(client: StoreClient, stages: Sequence[str] = STAGES) -> None:
    """Four groups, as far as these stages go."""
    await client.put_groups([group(number) for number in range(4)])
    for stage in stages:
        while (await client.stats()).get(f"store/ready/{stage}"):
            lease = await client.lease(stage, 100, "worker")
            assert lease is not None
            await client.write(lease, lease.rows.row_ids, values_of(stage, lease))


async def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results or errors of each rank."""
    with ThreadPoolExecutor(len(calls)) as threads:
        loop = asyncio.get_running_loop()
        futures = [loop.run_in_executor(threads, call) for call in calls]
        return await asyncio.gather(*futures, return_exceptions=True)


def takes(ranks: list[SharedRounds], clients: list[Any], number: int) -> list[Callable[[], Any]]:
    return [lambda r=rank, c=client: r.take(c, number) for rank, client in zip(ranks, clients, strict=True)]


def begins(ranks: list[SharedRounds], clients: list[Any]) -> list[Callable[[], Any]]:
    return [lambda r=rank, c=client: r.begin(c) for rank, client in zip(ranks, clients, strict=True)]


def rows_of(leases: list[SharedLease]) -> list[int]:
    return sorted(int(row) for lease in leases for row in lease.rows.row_ids)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_worker, "PAUSE_S", 0.01)


def test_each_rank_has_its_share_of_the_same_round() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await prepare(client)
        leases = await together(takes(gang("train"), [Failing(store), Failing(store)], 0))
        assert rows_of(leases) == [0, 1, 2, 3]
        assert len({lease.id for lease in leases}) == 1

    run(body)


@pytest.mark.parametrize("failure", [PartnerGone("the store's process is gone"), StoreError("unheard of")])
def test_a_rank_that_cannot_go_on_keeps_the_others_from_it(failure: Exception) -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await prepare(client)
        outcomes = await together(takes(gang("train"), [Failing(store), Failing(store, [failure])], 0))
        assert isinstance(outcomes[0], PartnerGone)
        assert str(outcomes[0]) == f"rank 1 has no rows of stage 'train': {failure}"
        assert outcomes[1] is failure

    run(body)


def test_a_batch_that_one_rank_cannot_read_is_formed_again_of_the_same_groups() -> None:
    """Another group, the first, has become complete meanwhile, and does not take the place of one of them."""

    async def body(store: Store, client: StoreClient) -> None:
        await prepare(client, ())
        straggler = await client.lease("rollout", 1, "slow")
        assert straggler is not None
        for stage in STAGES:
            lease = await client.lease(stage, 6 if stage in ("reward", "reference") else 3, "worker")
            assert lease is not None
            await client.write(lease, lease.rows.row_ids, values_of(stage, lease))
        seen: list[int] = []

        class Watching(Failing):
            def settle(self, stage: str) -> int:
                finishing = asyncio.run_coroutine_threadsafe(finish(), loop)
                finishing.result(10)
                return super().settle(stage)

            def lease_shared(self, *arguments: Any) -> SharedLease | None:
                lease = self._client.lease_shared(*arguments)
                assert lease is not None
                seen.extend(lease.rows.row_ids.tolist())
                if self._failures and (failure := self._failures.pop(0)):
                    raise failure
                return lease

        async def finish() -> None:
            await client.write(straggler, straggler.rows.row_ids, values_of("rollout", straggler))
            for stage in STAGES[1:]:
                lease = await client.lease(stage, 2 if stage != "group_advantage" else 1, "worker")
                assert lease is not None
                await client.write(lease, lease.rows.row_ids, values_of(stage, lease))

        loop = asyncio.get_running_loop()
        clients = [Watching(store), Watching(store, [RowsUnreachable("node b")])]
        leases = await together(takes(gang("train"), clients, 0))
        assert [client.settled for client in clients] == [1, 0]
        assert rows_of(leases) == [2, 3, 4, 5]
        assert sorted(seen) == sorted([2, 3, 4, 5] * 2)
        assert await client.batch_ready() is True

    run(body, window=3)


def test_rows_a_scorer_cannot_read_go_back_and_come_in_the_next_round() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await prepare(client, STAGES[:1])
        ranks = gang("reference", max_units=4, moves_on=True)
        clients = [Failing(store, [None, RowsUnreachable("node b")]), Failing(store, [RowsUnreachable("node b")])]
        leases = await together(takes(ranks, clients, 0))
        assert [lease.round for lease in leases] == [2, 2]
        assert rows_of(leases) == [0, 1, 2, 3]

    run(body)


def test_rows_unreadable_for_too_long_end_it_with_the_error_of_who_cannot_read() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await prepare(client)
        failing = Failing(store, [RowsUnreachable("node b")] * 1000)
        outcomes = await together(takes(gang("train"), [Failing(store), failing], 0))
        assert isinstance(outcomes[0], PartnerGone)
        assert isinstance(outcomes[1], RowsUnreachable)

    run(body, lease_timeout_s=0.2)


def test_a_round_that_is_over_gives_way_to_the_next_one_on_all_ranks() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await prepare(client, STAGES[:1])
        early = await client.lease_shared("reference", 0, 0, 2, 2)
        assert early is not None
        await client.release(early)
        leases = await together(takes(gang("reference", max_units=4, moves_on=True), [Failing(store)] * 2, 0))
        assert [lease.round for lease in leases] == [1, 1]

    run(body)


def test_all_ranks_hear_that_the_store_has_closed() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        asking = asyncio.create_task(together(takes(gang("reference", max_units=4), [Failing(store)] * 2, 0)))
        await asyncio.sleep(0.05)
        await client.close("done")
        assert await asking == [None, None]

    run(body)


def test_ranks_that_take_the_place_of_others_begin_alike_and_lose_nothing() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await prepare(client, STAGES[:1])
        before = [await client.lease_shared("reference", 0, rank, 2, 4) for rank in range(2)]
        first = before[0]
        assert first is not None
        written = first.rows.row_ids[:1]
        values = values_of("reference", first)["reference_logprobs"]
        await client.write(first, written, {"reference_logprobs": values[:1]})
        ranks, clients = gang("reference", max_units=100, moves_on=True), [Failing(store), Failing(store)]
        assert await together(begins(ranks, clients)) == [1, 1]
        leases = await together(takes(ranks, clients, 1))
        assert rows_of(leases) == sorted(set(range(8)) - set(written.tolist()))

    run(body)


def test_a_gang_whose_first_rank_cannot_begin_does_not_begin() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        clients = [SyncStoreClient(store), SyncStoreClient(store)]
        await asyncio.to_thread(clients[0].leave)
        outcomes = await together(begins(gang("reference"), clients))
        assert [type(outcome) for outcome in outcomes] == [PartnerGone, PartnerGone]
        assert "rank 0" in str(outcomes[1])

    run(body)
