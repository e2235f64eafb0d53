"""What each client holds is counted as it changes, and is what its leases say."""

from collections import Counter
from random import Random

import pytest

from penstock.store.ledger.leases import HeldLease
from penstock.store.service.sharing import Clients
from penstock.store.service.wire import LeaseRequest
from tests.amounts import amount
from tests.store.driver import Driver, make_spec

STAGES = ("rollout", "reward")


def recounted(leases: dict[int, tuple[str, HeldLease]], driver: Driver, stage: str) -> Counter[str]:
    held = driver.ledger.residents.leases.held
    index = driver.ledger.residents.stage(stage).index
    found: Counter[str] = Counter()
    for client, lease in leases.values():
        if lease.id in held and lease.stage == index:
            masks = lease.open.values()
            found[client] += sum(mask.bit_count() for mask in masks) if stage == "reward" else len(masks)
    return found


@pytest.mark.histories
@pytest.mark.parametrize("seed", range(amount(8)))
def test_counts_are_those_of_the_leases_whatever_becomes_of_them(seed: int) -> None:
    random, driver = Random(seed), Driver(make_spec(max_active_groups=1000, group_size=3))
    clients, leases = Clients(driver.ledger), dict[int, tuple[str, HeldLease]]()
    driver.admit(20)
    for now in range(80):
        stage, client = random.choice(STAGES), random.choice("abc")
        lease = driver.lease(stage, random.randint(1, 4), float(now), owner=client)
        if lease is not None:
            clients.note_lease(LeaseRequest(stage, 4, client, client=client), lease)
            leases[lease.id] = client, lease
        elif held := [one for _, one in leases.values() if one.id in driver.ledger.residents.leases.held]:
            _end_some(random, driver, random.choice(held), float(now))
        for name in STAGES:
            assert Counter(clients.holdings[name].units) == recounted(leases, driver, name)
    assert leases


def _end_some(random: Random, driver: Driver, lease: HeldLease, now: float) -> None:
    """Some of its rows are written or dropped, or it is released, or leases run out."""
    stage, rows = driver.ledger.spec.stages[lease.stage].name, driver.ledger.rows_of(lease)
    some = random.sample(rows, random.randint(1, len(rows)))
    match random.choice(("write", "write", "drop", "release", "expire")):
        case "write":
            driver.write(lease, stage, sorted(some), now=now)
        case "drop":
            driver.ledger.drop(lease.id, stage, sorted(some), "engine_failed")
        case "release":
            driver.ledger.release(lease.id)
        case "expire":
            driver.ledger.expire(now)
