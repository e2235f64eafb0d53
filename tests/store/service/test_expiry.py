"""The one timer of a store's leases."""

import asyncio

from penstock.store.ledger.effects import Effects
from penstock.store.ledger.ledger import Ledger
from penstock.store.service.waiting.timers import Expiry
from tests.store.driver import make_spec


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
