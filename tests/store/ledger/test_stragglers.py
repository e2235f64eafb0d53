"""Groups that one engine has had for too long are sampled by a second one: each rule on a history to follow by hand.

Rows 0 and 1 are of group 0. Groups take a second, so with the factor 3 they are slow after three.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.errors import LeaseSuperseded
from penstock.store.ledger.leases import LeaseBook
from penstock.store.ledger.residents import ENOUGH, RECENT, Stragglers
from tests.store.driver import Driver, facts_for, make_spec
from tests.store.invariants import check_invariants


def slow_group(**changes: float) -> tuple[Driver, int, int]:
    """An engine has had group 0 for three seconds, and now another has it too: both leases."""
    driver = Driver(make_spec(straggler_factor=3.0, **changes))
    for _ in range(ENOUGH):
        driver.ledger.residents.stragglers.record_time(1.0)
    driver.admit(1, 0.0)
    first = driver.ledger.lease("rollout", 1, "slow", 0.0)
    assert first is not None
    assert driver.ledger.offer("fast", 2.9) is None
    assert driver.ledger.residents.stragglers.next_overdue() == 3.0
    assert driver.ledger.offer("slow", 3.0) is None
    second = driver.ledger.offer("fast", 3.0)
    assert second is not None
    assert driver.ledger.rows_of(second) == [0, 1]
    check_invariants(driver.ledger)
    return driver, first.id, second.id


def write(driver: Driver, lease: int, rows: list[int], version: int = 0, now: float = 4.0) -> list[int]:
    facts = facts_for("rollout", len(rows), version)
    kept: list[int] = driver.ledger.write(lease, "rollout", rows, driver.writes["rollout"], facts, now)
    check_invariants(driver.ledger)
    return kept


def test_the_first_answer_counts_and_the_other_is_refused_by_name() -> None:
    driver, first, second = slow_group()
    assert write(driver, second, [0, 1]) == [0, 1]
    assert driver.ledger.residents.leases.held == {}
    with pytest.raises(LeaseSuperseded, match=f"lease {first} came second"):
        write(driver, first, [0, 1])
    counters = driver.ledger.counters
    assert (counters["stragglers/offered"], counters["stragglers/won"]) == (1, 1)
    assert (counters["stragglers/late_rows"], counters["stragglers/late_tokens"]) == (2, 6)
    assert counters["response_tokens_generated"] == 6
    assert counters["completed/rollout"] == 2
    assert write(driver, second, [0, 1]) == []  # told again: nothing changes, and it is no error
    assert write(driver, first, []) == []
    driver.ledger.drop(first, "rollout", [0, 1], "empty_response")
    assert driver.ledger.residents.num_rows == 2


def test_an_engine_that_was_slow_may_still_be_first() -> None:
    driver, first, second = slow_group()
    write(driver, first, [0, 1])
    with pytest.raises(LeaseSuperseded):
        write(driver, second, [0, 1])
    assert driver.ledger.counters["stragglers/won"] == 0


def test_each_row_is_of_whoever_wrote_it_first() -> None:
    driver, first, second = slow_group()
    write(driver, first, [0])
    assert write(driver, second, [0, 1]) == [1]
    with pytest.raises(LeaseSuperseded):
        write(driver, first, [1])
    assert write(driver, first, [0]) == []


@pytest.mark.parametrize("who_stays", [0, 1])
def test_a_group_stays_with_the_engine_that_is_left_and_may_be_offered_again(who_stays: int) -> None:
    driver, *leases = slow_group()
    driver.ledger.release(leases[1 - who_stays])
    check_invariants(driver.ledger)
    assert driver.ledger.lease("rollout", 1, "third", 3.0) is None
    again = driver.ledger.offer("third", 7.0)
    assert again is not None
    check_invariants(driver.ledger)
    write(driver, leases[who_stays], [0, 1])


def test_a_group_is_free_once_both_have_given_it_back() -> None:
    driver, _, _ = slow_group()
    driver.ledger.expire(10.0)
    assert driver.ledger.lease("rollout", 1, "third", 10.0) is None
    driver.ledger.expire(13.0)
    check_invariants(driver.ledger)
    lease = driver.ledger.lease("rollout", 1, "third", 13.0)
    assert lease is not None
    assert driver.ledger.rows_of(lease) == [0, 1]


def test_a_row_that_one_drops_has_ended_for_both() -> None:
    driver, first, second = slow_group()
    driver.ledger.drop(second, "rollout", [0], "empty_response")
    check_invariants(driver.ledger)
    assert write(driver, first, [0, 1]) == [1]


def test_a_third_engine_gets_nothing_nor_a_second_without_a_factor() -> None:
    driver, _, _ = slow_group()
    assert driver.ledger.offer("third", 100.0) is None
    driver = Driver(make_spec())
    driver.admit(1, 0.0)
    driver.ledger.lease("rollout", 1, "slow", 0.0)
    assert driver.ledger.offer("fast", 100.0) is None
    assert driver.ledger.residents.stragglers.next_overdue() is None


def test_half_written_rows_are_not_offered() -> None:
    driver = Driver(make_spec(straggler_factor=3.0))
    for _ in range(ENOUGH):
        driver.ledger.residents.stragglers.record_time(1.0)
    driver.admit(1, 0.0)
    first = driver.ledger.lease("rollout", 1, "slow", 0.0)
    assert first is not None
    driver.ledger.write(first.id, "rollout", [0], ("response_text",), facts_for("reward", 1), 1.0)
    second = driver.ledger.offer("fast", 3.0)
    assert second is not None
    assert driver.ledger.rows_of(second) == [1]


def test_nothing_is_slow_before_enough_groups_were_completed() -> None:
    driver = Driver(make_spec(straggler_factor=3.0, max_active_groups=20))
    driver.admit(ENOUGH + 1, 0.0)
    driver.ledger.lease("rollout", 1, "slow", 0.0)
    for count in range(ENOUGH):
        assert driver.ledger.offer("fast", float(count)) is None
        lease = driver.ledger.lease("rollout", 1, "fast", float(count))
        assert lease is not None
        write(driver, lease.id, driver.ledger.rows_of(lease), now=count + 1.0)
    assert driver.ledger.offer("fast", float(ENOUGH)) is not None


@given(st.lists(st.floats(0.0, 1e6), min_size=ENOUGH, max_size=3 * RECENT))
def test_the_limit_is_that_of_the_recent_ones(seconds: list[float]) -> None:
    stragglers = Stragglers(2.0, None, LeaseBook())
    for one in seconds:
        stragglers.record_time(one)
    recent = sorted(seconds[-RECENT:])
    assert stragglers.limit_s == 2.0 * recent[len(recent) // 2]
