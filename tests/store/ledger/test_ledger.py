"""The ledger's promises, each on a history small enough to follow by hand."""

import pytest

from penstock.store.errors import (
    DuplicateRow,
    LeaseExpired,
    RowNotLeased,
    StoreError,
    TooLarge,
    UnknownColumn,
    UnknownRow,
    UnknownStage,
    WrongLength,
)
from penstock.store.ledger.group import Facts
from tests.store.driver import Driver, facts_for, facts_of, make_spec
from tests.store.invariants import check_invariants


def test_admission_stops_at_the_active_groups_and_goes_on_after_publication(driver: Driver) -> None:
    assert driver.admit(5) == [0, 1, 2, 3, None]
    driver.compute_all()
    assert driver.train(0, publish=False) == [0, 1, 2, 3]
    assert driver.admit() == [None]  # trained, but the engines still serve version 0
    driver.ledger.served(1)
    assert driver.admit(3) == [4, 5, None]


def test_a_group_that_ends_by_drops_returns_its_credit(driver: Driver) -> None:
    driver.admit(4)
    lease = driver.lease("rollout")
    driver.ledger.drop(lease.id, "rollout", [0, 1], "engine_failed")
    check_invariants(driver.ledger)
    assert driver.ledger.counters["dropped/engine_failed"] == 2
    assert driver.admit(2) == [4, None]


def test_a_group_larger_than_the_store_is_refused() -> None:
    driver = Driver(make_spec(max_bytes=40))
    with pytest.raises(TooLarge, match=r"41 bytes.*max_bytes=40"):
        driver.ledger.admit(0.0, nbytes=41)
    assert driver.admit() == [0]


def test_a_stage_starts_on_a_row_as_soon_as_its_columns_are_there(driver: Driver) -> None:
    driver.admit(2)
    assert driver.lease("reward") is None
    driver.compute("rollout", max_units=1)
    lease = driver.lease("reward", max_units=10)
    assert driver.ledger.rows_of(lease) == [0, 1]
    driver.write(lease, "reward", [0])
    assert driver.lease("group_advantage") is None  # it needs the whole group
    driver.write(lease, "reward", [1])
    assert driver.ledger.rows_of(driver.lease("group_advantage")) == [0, 1]


def test_leases_take_the_oldest_groups_and_returned_rows_go_back_to_their_place(driver: Driver) -> None:
    driver.admit(3)
    first = driver.lease("rollout", now=0.0)
    assert driver.ledger.rows_of(first) == [0, 1]
    assert driver.ledger.rows_of(driver.lease("rollout", now=1.0)) == [2, 3]
    assert driver.ledger.expire(10.0) == [first.id]
    check_invariants(driver.ledger)
    assert driver.ledger.rows_of(driver.lease("rollout", max_units=2, now=11.0)) == [0, 1, 4, 5]


def test_only_unfinished_rows_of_an_expired_lease_go_back(driver: Driver) -> None:
    driver.admit()
    driver.compute("rollout")
    lease = driver.lease("reward", max_units=2, now=0.0)
    driver.write(lease, "reward", [1], now=5.0)
    assert driver.ledger.expire(14.9) == []  # the write has renewed it
    assert driver.ledger.expire(15.0) == [lease.id]
    assert driver.ledger.rows_of(driver.lease("reward", max_units=2, now=15.0)) == [0]


def test_a_stage_that_sees_the_whole_group_gets_the_whole_group_again(driver: Driver) -> None:
    driver.admit()
    for stage in ("rollout", "reward"):
        driver.compute(stage)
    lease = driver.lease("group_advantage")
    driver.write(lease, "group_advantage", [0])
    driver.ledger.release(lease.id)
    again = driver.lease("group_advantage")
    assert driver.ledger.rows_of(again) == [0, 1]
    assert driver.write(again, "group_advantage", [0, 1]) == [1]  # row 0 keeps its first value


def test_a_late_write_is_told_unless_its_rows_are_done(driver: Driver) -> None:
    driver.admit()
    late = driver.lease("rollout", now=0.0)
    driver.ledger.expire(10.0)
    with pytest.raises(LeaseExpired, match=r"row 0: lease 0 is over"):
        driver.write(late, "rollout", [0, 1])
    with pytest.raises(LeaseExpired, match="over"):
        driver.ledger.renew(late.id, 10.0)
    with pytest.raises(LeaseExpired, match="over"):
        driver.ledger.drop(late.id, "rollout", [0], "late")
    assert driver.compute("rollout", now=11.0) == [0, 1]
    assert driver.write(late, "rollout", [0, 1]) == []  # somebody else has done it: nothing to tell
    assert driver.ledger.counters["ignored/late"] == 2


def test_a_row_written_twice_keeps_its_first_value(driver: Driver) -> None:
    driver.admit()
    driver.compute("rollout")
    lease = driver.lease("reward", max_units=2)
    assert driver.write(lease, "reward", [1]) == [0]
    before = driver.ledger.residents.credits.bytes
    assert driver.write(lease, "reward", [0, 1]) == [0]
    assert driver.ledger.residents.credits.bytes == before + 8
    assert driver.ledger.counters["ignored/not_awaited"] == 1


def test_a_length_that_comes_after_the_versions_is_noted(driver: Driver) -> None:
    """A worker wrote the versions alone, and then everything: the versions are known, the length is not."""
    driver.admit(1)
    lease = driver.lease("rollout")
    assert lease is not None
    ledger, write = driver.ledger, driver.writes["rollout"]
    ledger.write(lease.id, "rollout", [0], ["token_versions"], facts_of(["token_versions"], 1, version=0), 0.0)
    ledger.write(lease.id, "rollout", [0, 1], write, facts_of(write, 2, version=0), 0.0)
    group = ledger.residents.groups[0]
    assert group.response_tokens == [3, 3]
    assert ledger.counters["response_tokens_generated"] == 6
    ledger.write(lease.id, "rollout", [0], ["behavior_logprobs"], facts_of(["behavior_logprobs"], 1), 0.0)


def test_a_row_is_complete_once_all_columns_of_the_stage_are_there(driver: Driver) -> None:
    driver.admit()
    lease = driver.lease("rollout")
    facts = Facts([4, 4])
    driver.ledger.write(lease.id, "rollout", [0, 1], ["response_text", "finish_reason"], facts, 0.0)
    check_invariants(driver.ledger)
    assert driver.ledger.counters["completed/rollout"] == 0
    assert driver.lease("reward", max_units=2) is not None  # response_text is all that it reads
    rest = ["response_ids", "behavior_logprobs", "token_versions"]
    driver.ledger.write(lease.id, "rollout", [0, 1], rest, facts_for("rollout", 2), 0.0)
    check_invariants(driver.ledger)
    assert driver.ledger.counters["completed/rollout"] == 2


def test_a_dropped_row_is_no_longer_waited_for(driver: Driver) -> None:
    driver.admit(2)
    driver.compute("rollout")
    lease = driver.lease("reward", max_units=4)
    driver.write(lease, "reward", [0, 2, 3])
    reference = driver.lease("reference", max_units=4)
    driver.ledger.drop(lease.id, "reward", [1], "reward_timeout")
    check_invariants(driver.ledger)
    assert driver.ledger.rows_of(driver.lease("group_advantage")) == [0]
    assert driver.write(reference, "reference", [0, 1, 2, 3]) == [0, 2, 3]


def test_everything_that_a_dead_owner_holds_goes_back_at_once(driver: Driver) -> None:
    driver.admit(3)
    driver.lease("rollout", owner="dead")
    driver.lease("rollout", owner="alive")
    assert driver.ledger.abandon("dead") == 1
    check_invariants(driver.ledger)
    assert driver.ledger.rows_of(driver.lease("rollout")) == [0, 1]
    assert driver.ledger.counters["abandoned/rollout"] == 2


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"stage": "rewad"}, UnknownStage, "did you mean 'reward'"),
        ({"stage": "reference", "columns": ["reference_logprobs"]}, UnknownStage, "is of stage 'reward'"),
        ({"columns": ["reword"]}, UnknownColumn, "did you mean 'reward'"),
        ({"columns": ["advantage"]}, UnknownColumn, "may not write column 'advantage'; it writes reward"),
        ({"rows": [99]}, UnknownRow, "row 99: no such row.*0 to 3"),
        ({"rows": [-1]}, UnknownRow, "row -1"),
        ({"rows": [2]}, RowNotLeased, "does not hold row 2"),
        ({"rows": [0, 0]}, DuplicateRow, "a row comes twice"),
        ({"facts": Facts([2**40])}, TooLarge, "row 0 has 1099511627776 bytes"),
    ],
)
def test_bad_writes_are_refused_by_name_and_change_nothing(
    driver: Driver, change: dict, error: type[StoreError], message: str
) -> None:
    driver.admit(2)
    driver.compute("rollout")
    lease = driver.lease("reward", max_units=2)
    before = (repr_state(driver), dict(driver.ledger.counters))
    call = {"stage": "reward", "rows": [0], "columns": ["reward"]} | change
    facts = call.get("facts", Facts([4] * len(call["rows"])))
    with pytest.raises(error, match=message):
        driver.ledger.write(lease.id, call["stage"], call["rows"], call["columns"], facts, 0.0)
    check_invariants(driver.ledger)
    assert (repr_state(driver), dict(driver.ledger.counters)) == before


def test_a_token_column_must_fit_the_response_written_before(driver: Driver) -> None:
    driver.admit()
    driver.compute("rollout")  # 3 tokens each
    lease = driver.lease("reference", max_units=2)
    facts = Facts([4, 4], token_column="reference_logprobs", token_lengths=[3, 4])
    with pytest.raises(WrongLength, match=r"'reference_logprobs', row 1: 4 entries, but the response has 3 tokens"):
        driver.ledger.write(lease.id, "reference", [0, 1], ["reference_logprobs"], facts, 0.0)
    check_invariants(driver.ledger)


def repr_state(driver: Driver) -> str:
    groups = [[getattr(group, slot) for slot in group.__slots__] for group in driver.ledger.residents.groups.values()]
    return repr((groups, driver.ledger.residents.leases.held, vars(driver.ledger.residents.credits)))
