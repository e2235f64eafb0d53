"""The timers of a store: a lease ends at its own deadline; engines that wait for groups which another has had for too
long are woken for these, and for nothing else.
"""

import asyncio

from penstock.store.client.store_client import StoreClient
from penstock.store.ledger.ledger import Ledger
from penstock.store.ledger.residents import ENOUGH, Effects
from penstock.store.service.store import Store
from penstock.store.service.waiters import Expiry
from tests.store.driver import make_spec
from tests.store.players import group

LIMIT_S = 3.0
"""A group is slow after three times the median of a second."""
TURNS = 200
"""Turns of the event loop."""


def test_a_timer_that_is_too_early_stays_and_the_lease_ends_at_its_own_deadline() -> None:
    asyncio.run(renewed_once())


async def renewed_once() -> None:
    loop, timeout_s = asyncio.get_running_loop(), 0.05
    ledger = Ledger(make_spec(lease_timeout_s=timeout_s))
    ledger.admit(loop.time())
    lease = ledger.lease("rollout", 1, "a", loop.time())
    assert lease is not None
    ended = asyncio.Event()

    def carry_out(effects: Effects) -> None:
        expiry.arm()  # as the store does after every event
        if not ledger.residents.leases.held:
            ended.set()

    expiry = Expiry(ledger, loop.time, carry_out)
    expiry.arm()
    ledger.renew(lease.id, loop.time() + timeout_s)
    expiry.arm()
    deadline = ledger.next_deadline()
    await asyncio.wait_for(ended.wait(), 10)
    assert deadline is not None
    assert loop.time() >= deadline
    expiry.cancel()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def store_with_a_median(clock: Clock) -> Store:
    store = Store(make_spec(straggler_factor=LIMIT_S), clock)
    for _ in range(ENOUGH):
        store.ledger.residents.stragglers.record_time(1.0)
    return store


def count_wakes(store: Store) -> list[float]:
    """One entry for each time that the store looks who may go on."""
    wakes: list[float] = []
    arm_timers = store._waiters._arm_timers

    def counted() -> None:
        wakes.append(store._clock())
        arm_timers()

    store._waiters._arm_timers = counted
    return wakes


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def test_a_store_whose_engines_are_full_does_not_spin_while_a_group_is_slow() -> None:
    """Other groups are free meanwhile."""

    async def main() -> None:
        store = store_with_a_median(clock := Clock())
        client, full = StoreClient(store), StoreClient(store)
        await client.put_groups([group(number) for number in range(2)])
        assert await full.lease("rollout", 1, "full", max_held=1) is not None
        asking = asyncio.ensure_future(full.lease("rollout", 1, "full", max_held=1))
        await turns()
        clock.now = 2 * LIMIT_S
        wakes = count_wakes(store)
        store._waiters.schedule()
        await turns()
        assert len(wakes) <= 5
        assert not asking.done()
        other = await client.lease("rollout", 1, "other")  # takes what is free, and is full itself
        assert other is not None
        assert store.ledger.counters["stragglers/offered"] == 0
        helped = await StoreClient(store).lease("rollout", 1, "third")  # nothing is free now: the slow group
        assert helped is not None
        assert helped.rows.group_ids[0] == 0
        asking.cancel()
        await store.close("test over")

    asyncio.run(asyncio.wait_for(main(), 20))
