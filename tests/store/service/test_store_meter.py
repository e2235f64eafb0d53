"""What the store measures is what its ledger counts."""

import asyncio

from penstock.metering.meters import Meters
from penstock.store.client.store_client import StoreClient
from penstock.store.ledger.ledger import Ledger
from penstock.store.service.store import Store
from penstock.store.service.store_stats import StoreMeter
from tests.metering.measured import measured
from tests.store.driver import make_spec
from tests.store.players import group


def test_rows_are_counted_by_stage_and_state() -> None:
    ledger, meters = Ledger(make_spec(max_bytes=1000)), Meters()
    meter = StoreMeter(ledger, meters)
    for _ in range(3):
        ledger.admit(0.0, nbytes=100)
    ledger.lease("rollout", 1, "engine-0", now=1.0)
    meter.look()
    found = measured(meters)
    rows = {words: value for words, value in found.items() if words.startswith("store_rows rollout")}
    assert rows == {"store_rows rollout free": 4, "store_rows rollout leased": 2}
    assert (found["store_bytes"], found["store_capacity_bytes"]) == (300, 1000)
    assert found["store_leases"] == 1
    assert found["store_admitted_rows_total"] == 6


def test_drops_and_staleness_are_those_of_the_ledger_once() -> None:
    ledger, meters = Ledger(make_spec()), Meters()
    ledger.counters.update({"dropped/stale": 5, "staleness/1": 7})
    meter = StoreMeter(ledger, meters)  # of a store that goes on from a snapshot
    ledger.counters.update({"dropped/stale": 2, "dropped/no_signal": 4, "staleness/0": 3, "staleness/2": 1})
    meter.look()
    meter.look()
    totals = {words: value for words, value in measured(meters).items() if "_total" in words or "staleness" in words}
    assert totals == {
        "store_admitted_rows_total": 0, "store_dropped_rows_total stale": 2, "store_dropped_rows_total no_signal": 4,
        "store_staleness_versions_sum": 2, "store_staleness_versions_count": 4,
    }  # fmt: skip


def test_waits_for_leases_are_measured() -> None:
    async def scenario() -> None:
        meters, now = Meters(), 0.0
        store = Store(make_spec(), clock=lambda: now, meters=meters)
        client = StoreClient(store)
        asking = asyncio.ensure_future(client.lease("rollout", 1, "engine-0"))
        while not (await client.stats())["store/waiting_consumers"]:
            await asyncio.sleep(0)
        now = 2.0
        await client.put_groups([group(0)])
        assert await asking is not None
        assert measured(meters) == {"store_lease_wait_seconds_total rollout": 2.0}
        await client.leave()
        await store.close("over")

    asyncio.run(scenario())
