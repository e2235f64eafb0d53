"""How a worker leases: ahead of its work, and without leaving a ghost behind."""

import asyncio

import pytest

from penstock.store.client.lease import Lease, LeaseStream
from penstock.store.client.store_client import StoreClient
from penstock.store.data.rows import Rows
from penstock.store.errors import StoreError
from penstock.store.service.store import Store
from tests.store.driver import Driver, make_spec
from tests.store.players import group, run

# Waiting time, by Little's law.


def test_the_mean_wait_is_that_of_the_units_leased() -> None:
    driver = Driver(make_spec())
    for now in (0.0, 1.0):
        driver.ledger.admit(now)
    assert driver.lease("rollout", now=4.0) is not None  # waited 4 s
    assert driver.lease("rollout", now=6.0) is not None  # waited 5 s
    assert driver.ledger.residents.stage("rollout").mean_wait_s == pytest.approx(4.5)


# Fetching ahead.


def test_a_stream_fetches_the_next_lease_while_this_one_is_worked_on() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        await client.put_groups([group(number) for number in range(4)])
        async with client.leases("rollout", 1, "engine", ahead=1) as leases:
            first = await anext(leases)
            assert first.rows.row_ids.tolist() == [0, 1]
            await asyncio.sleep(0.01)
            assert len(store.ledger.residents.leases.held) == 2
            assert (await anext(leases)).rows.row_ids.tolist() == [2, 3]
        # What was fetched and not handed out has gone back; what was handed out is still held.
        await asyncio.sleep(0.01)
        held = store.ledger.residents.leases.held.values()
        assert sorted(group for lease in held for group in lease.open) == [0, 1]

    run(body)


def test_a_stream_ends_with_the_store() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        seen = []

        async def work() -> None:
            async with client.leases("rollout", 1, "engine", ahead=2) as leases:
                async for lease in leases:
                    seen.append(lease.rows.row_ids.tolist())

        working = asyncio.ensure_future(work())
        await client.put_groups([group(), group(), group()])
        await asyncio.sleep(0.02)
        await client.close("done")
        await asyncio.wait_for(working, 5)
        assert seen == [[0, 1], [2, 3], [4, 5]]

    run(body)


def test_a_stream_passes_on_what_the_store_refuses() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        with pytest.raises(StoreError, match="did you mean 'rollout'"):
            async with client.leases("rollouts", 1, "engine") as leases:
                await anext(leases)

    run(body)


class Fetching:
    """The store behind a stream: three leases for the first call, then an error. Notes what is given back."""

    def __init__(self, refused: int | None = None) -> None:
        self.refused = refused
        self.released: list[int] = []

    async def ask(self, count: int) -> list[Lease] | None:
        if count == 1:
            raise StoreError("fetched in vain")
        return [Lease(number, "rollout", Rows.from_lists({})) for number in range(3)]

    async def release(self, lease: Lease) -> None:
        self.released.append(lease.id)
        if lease.id == self.refused:
            raise StoreError(f"lease {lease.id} is refused")

    async def play(self, then: Exception | None = None) -> None:
        """Work on the first lease while the fourth is asked for, and leave."""
        async with LeaseStream(self.ask, self.release, ahead=3) as leases:
            await anext(leases)
            await asyncio.sleep(0)
            if then is not None:
                raise then


@pytest.mark.parametrize("refused", [None, 1])
def test_an_error_while_fetching_ahead_keeps_nothing_from_being_given_back(refused: int | None) -> None:
    store = Fetching(refused)
    with pytest.raises(StoreError, match="in vain"):
        asyncio.run(store.play())
    assert store.released == [1, 2]


def test_the_error_of_a_streams_block_is_the_one_that_is_told() -> None:
    store = Fetching(refused=1)
    with pytest.raises(ValueError, match="the cause"):
        asyncio.run(store.play(then=ValueError("the cause")))
    assert store.released == [1, 2]


def test_whoever_is_cancelled_while_a_stream_ends_is_cancelled() -> None:
    async def main() -> None:
        released: list[int] = []
        ending, withdrawn = asyncio.Event(), asyncio.Event()
        first = [Lease(number, "rollout", Rows.from_lists({})) for number in (1, 0)]

        async def ask(count: int) -> list[Lease] | None:
            if first:
                return [first.pop(0), first.pop(0)]
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await withdrawn.wait()
            return None

        async def release(lease: Lease) -> None:
            released.append(lease.id)

        async def work() -> None:
            async with LeaseStream(ask, release, ahead=2) as leases:
                assert (await anext(leases)).id == 1
                await asyncio.sleep(0)

        working = asyncio.ensure_future(work())
        await ending.wait()
        working.cancel()
        withdrawn.set()
        with pytest.raises(asyncio.CancelledError):
            await working
        assert released == [0]

    asyncio.run(main())


# Ghosts.


def test_a_cancelled_call_takes_nothing_and_holds_up_nobody() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        gone = asyncio.ensure_future(client.lease("rollout", 1, "gone"))
        stays = asyncio.ensure_future(client.lease("rollout", 1, "stays"))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await client.put_groups([group()])
        lease = await asyncio.wait_for(stays, 5)
        assert lease is not None
        await asyncio.sleep(0.01)
        assert [held.owner for held in store.ledger.residents.leases.held.values()] == ["stays"]
        assert not any(map(len, store.consumers.values()))

    run(body)


def test_who_is_abandoned_waits_for_nothing_and_is_given_nothing() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        dead = StoreClient(store)
        waiting = asyncio.ensure_future(dead.lease("rollout", 1, "engine"))
        await asyncio.sleep(0.01)
        await client.abandon("engine")
        assert await asyncio.wait_for(waiting, 5) is None
        await client.put_groups([group()])
        assert await dead.lease("rollout", 1, "engine") is None  # a call that was still on its way
        successor = await StoreClient(store).lease("rollout", 1, "engine")
        assert successor is not None

    run(body)
