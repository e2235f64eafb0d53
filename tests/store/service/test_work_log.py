"""What the store tells of who worked on what."""

from penstock.store.client.store_client import StoreClient
from penstock.store.service.store import Store
from penstock.store.service.work_log import AT_ONCE, MAX_ENTRIES, WorkLog
from tests.store.players import group, leased, response, run


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_group_is_told_from_its_leases_grant_to_the_last_write_of_its_rows() -> None:
    log = WorkLog(clock := Clock())
    log.granted(7, "rollout", "Rollout-0")
    clock.now = 101.0
    log.wrote(7, [3], 2)
    clock.now = 103.0
    log.wrote(7, [3, 4], 4)
    assert log.take({7})["leases"] == [
        ["rollout", "Rollout-0", 3, 100.0, 103.0, 4.0],
        ["rollout", "Rollout-0", 4, 100.0, 103.0, 2.0],
    ]
    assert log.take({7})["leases"] == []  # each once


def test_ranks_that_share_a_lease_begin_with_the_first() -> None:
    log = WorkLog(clock := Clock())
    log.granted(1, "train", "Trainer-policy-0")
    clock.now = 105.0
    log.granted(1, "train", "Trainer-policy-1")
    assert log.since(1) == 100.0


def test_a_lease_that_is_over_is_forgotten_when_the_log_is_taken() -> None:
    log = WorkLog(Clock())
    log.granted(1, "rollout", "Rollout-0")
    log.granted(2, "rollout", "Rollout-1")
    log.take({2})
    log.wrote(1, [0], 1)
    log.wrote(2, [1], 1)
    assert [entry[1] for entry in log.take(set())["leases"]] == ["Rollout-1"]


def test_what_nobody_takes_is_bounded_and_counted() -> None:
    log = WorkLog(Clock())
    log.granted(0, "rollout", "Rollout-0")
    for number in range(MAX_ENTRIES + 5):
        log.wrote(0, [number], 1)
        log.admitted(number)
    taken = log.take({0})
    assert (len(taken["leases"]), len(taken["admitted"]), taken["missed"]) == (AT_ONCE, AT_ONCE, 10)
    while taken["more"]:
        told = log.take({0})
        assert len(told["leases"]) <= AT_ONCE
        taken = told | {kind: taken[kind] + told[kind] for kind in ("leases", "admitted", "missed")}
    assert (len(taken["leases"]), len(taken["admitted"]), taken["missed"]) == (MAX_ENTRIES, MAX_ENTRIES, 10)
    assert taken["leases"][0][2] == 5  # the oldest are gone


def test_a_store_tells_of_admission_and_of_each_stage() -> None:
    async def body(store: Store, client: StoreClient) -> None:
        (first,) = await client.put_groups([group(0)])
        lease = await leased(client, "rollout", 1, "Rollout-0")
        described = await client.describe()
        assert [entry["owner"] for entry in described["leases"]] == ["Rollout-0"]
        assert described["leases"][0]["held_s"] >= 0
        await client.write(lease, lease.rows.row_ids, response(len(lease.rows)))
        told = await client.work()
        assert [number for number, _ in told["admitted"]] == [first]
        [[stage, owner, number, start, end, rows]] = told["leases"]
        assert (stage, owner, number, rows) == ("rollout", "Rollout-0", first, len(lease.rows))
        assert start <= end <= told["now"]

    run(body)
