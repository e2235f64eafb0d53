"""Batches and the other rounds of ranks, each promise on a history small enough to follow by hand."""

from dataclasses import replace
from itertools import chain

import pytest

from penstock.store.errors import LeaseExpired, StalenessViolation, StoreError, UnknownStage
from tests.store.driver import Driver, make_spec
from tests.store.invariants import check_invariants


def test_bytes_hold_producers_back_but_never_the_groups_of_the_next_batch() -> None:
    driver = Driver(make_spec(max_bytes=40, max_active_groups=100))
    # 16 bytes each: two fit. With groups_per_step=2 waiting, the third would exceed the budget.
    assert driver.admit(3) == [0, 1, None]
    assert driver.ledger.counters["producer_waits/bytes"] == 1
    driver.compute("rollout")  # 4 rows x 8 bytes: 64 bytes are resident
    driver.compute_all()
    assert driver.train(0) is not None
    assert driver.admit(3) == [
        2,
        3,
        None,
    ]  # the last batch still fills the budget, yet the next one needs its two groups


def test_no_batch_is_formed_before_that_of_the_step_before_is_known(driver: Driver) -> None:
    """Ranks may be at step 2 when a store comes back that has yet to be told of step 1."""
    driver.admit(4)
    driver.compute_all()
    assert driver.train(1) is None
    driver.ledger.catch_up([[0, 1, 2, 3]], 0)
    assert driver.train(1) == [4, 5, 6, 7]


def test_a_group_shrunk_by_drops_counts_as_a_group_of_the_batch(driver: Driver) -> None:
    driver.admit(2)
    lease = driver.lease("rollout")
    driver.ledger.drop(lease.id, "rollout", [1], "too_long")
    driver.write(lease, "rollout", [0])
    driver.compute_all()
    assert driver.train(0) == [0, 2, 3]


def test_the_end_of_a_straggler_lets_the_batch_behind_it_form(driver: Driver) -> None:
    driver.admit(3)
    straggler = driver.lease("rollout")
    driver.compute_all()
    assert driver.train(0) is None
    driver.ledger.drop(straggler.id, "rollout", [0, 1], "engine_failed")  # and those that wait for a batch are woken
    assert driver.train(0) == [2, 3, 4, 5]


def test_the_batch_is_the_first_groups_in_order_however_they_finish(driver: Driver) -> None:
    driver.admit(4)
    leases = [driver.lease("rollout") for _ in range(4)]
    for group in (3, 2, 1):
        driver.write(leases[group], "rollout", [2 * group, 2 * group + 1])
        driver.compute_all()
    assert driver.train(0) is None  # group 0 lags, and the order is strict
    driver.write(leases[0], "rollout", [0, 1])
    driver.compute_all()
    assert driver.train(0) == [0, 1, 2, 3]


def test_a_window_lets_others_overtake_a_straggler_but_no_more_than_it_says() -> None:
    driver = Driver(make_spec(window=3, max_staleness=2, max_active_groups=8))
    driver.admit(8)
    leases = [driver.lease("rollout") for _ in range(8)]
    for group in range(1, 8):
        driver.write(leases[group], "rollout", [2 * group, 2 * group + 1])
        driver.compute_all()
    assert driver.train(0) == [2, 3, 4, 5]  # groups 1 and 2 overtake group 0
    assert driver.train(1) is None  # nobody else may
    driver.write(leases[0], "rollout", [0, 1])
    driver.compute_all()
    assert driver.train(1) == [0, 1, 6, 7]


def test_staleness_beyond_the_bound_raises_in_a_strict_store() -> None:
    driver = Driver(
        make_spec(max_staleness=0, max_active_groups=4)
    )  # admits more than (0 + 1) x 2 groups: misconfigured
    driver.admit(4)
    driver.compute_all(version=0)
    assert driver.train(0) is not None
    with pytest.raises(StalenessViolation, match=r"group 2.*version 0.*staleness 1 > max_staleness=0"):
        driver.train(1)
    check_invariants(driver.ledger)


def test_staleness_beyond_the_bound_is_evicted_and_counted_in_production() -> None:
    driver = Driver(make_spec(max_staleness=0, max_active_groups=4, strict=False))
    driver.admit(4)
    driver.compute_all(version=0)
    driver.train(0)
    assert driver.train(1) is None
    assert driver.ledger.counters["dropped/stale"] == 4
    assert driver.admit(2) == [4, 5]
    driver.compute_all(version=1)
    assert driver.train(1) == [8, 9, 10, 11]
    assert driver.ledger.counters["staleness/0"] == 8


def test_what_a_trajectory_has_read_counts_for_the_ranks_shares() -> None:
    driver = Driver(make_spec(groups_per_step=2))
    driver.admit(2)
    driver.compute_all()
    driver.ledger.residents.groups[0].context_tokens = [3000, 0]
    made = driver.ledger.lease_shared("train", 0, 2, 1, "trainer", 0.0)
    assert [driver.ledger.rows_of_rank(made, rank) for rank in range(2)] in ([[0], [1, 2, 3]], [[1, 2, 3], [0]])


def test_where_old_turns_are_context_rows_without_a_young_one_go_alone() -> None:
    driver = Driver(make_spec(max_staleness=0, max_active_groups=4, old_turns_are_context=True))
    driver.admit(4)
    driver.compute_all(version=0)
    assert driver.train(0) == [0, 1, 2, 3]
    for group in (2, 3):
        driver.ledger.residents.groups[group].oldest = [1, 0]  # as if its first row had a turn of version 1
    assert driver.train(1) == [4, 6]
    assert driver.ledger.counters["dropped/stale"] == 2


def test_all_ranks_share_the_same_batch_and_its_rows_end_with_the_last_ack(driver: Driver) -> None:
    driver.admit(2)
    driver.compute_all()
    ledger = driver.ledger
    made = ledger.lease_shared("train", 0, 3, 1, "trainer", 0.0)
    assert ledger.lease_shared("train", 0, 3, 1, "trainer", 0.0) is made
    shares = [ledger.rows_of_rank(made, rank) for rank in range(3)]
    assert sorted(row for share in shares for row in share) == [0, 1, 2, 3]
    for rank in (2, 0, 0):
        ledger.complete_shared(made.lease_id, rank)
        check_invariants(ledger)
    assert ledger.counters["rows_trained"] == 0
    ledger.complete_shared(made.lease_id, 1)
    ledger.complete_shared(made.lease_id, 1)
    check_invariants(ledger)
    assert ledger.counters["rows_trained"] == 4
    assert ledger.rounds.last_batch == [0, 1, 2, 3]
    with pytest.raises(LeaseExpired, match="trained already"):
        ledger.lease_shared("train", 0, 3, 1, "trainer", 0.0)


def test_ranks_that_disagree_about_their_number_are_refused(driver: Driver) -> None:
    driver.admit(2)
    driver.compute_all()
    made = driver.ledger.lease_shared("train", 0, 2, 1, "trainer", 0.0)
    with pytest.raises(StoreError, match="split over 2 ranks, not 3"):
        driver.ledger.lease_shared("train", 0, 3, 1, "trainer", 0.0)
    with pytest.raises(StoreError, match="rank 2 is none of the 2"):
        driver.ledger.complete_shared(made.lease_id, 2)


def test_a_batch_whose_update_was_lost_is_formed_again(driver: Driver) -> None:
    driver.admit(4)
    driver.compute_all()
    made = driver.ledger.lease_shared("train", 0, 1, 1, "trainer", 0.0)
    driver.ledger.release(made.lease_id)
    check_invariants(driver.ledger)
    with pytest.raises(LeaseExpired):
        driver.ledger.complete_shared(made.lease_id, 0)
    assert driver.train(0) == [0, 1, 2, 3]
    assert driver.ledger.counters["rows_trained"] == 4


def test_a_batch_that_overtook_a_straggler_overtakes_it_again() -> None:
    """Though the straggler has come meanwhile: a step that is taken again is taken on the same rows."""
    driver = Driver(make_spec(window=3))
    driver.admit(3)
    straggler = driver.lease("rollout")
    driver.compute_all()
    made = driver.ledger.lease_shared("train", 0, 1, 1, "trainer", 0.0)
    driver.ledger.release(made.lease_id)
    driver.write(straggler, "rollout", [0, 1])
    driver.compute_all()
    assert driver.train(0) == [2, 3, 4, 5]
    driver.admit(1)
    driver.compute_all(version=1)
    assert driver.train(1) == [0, 1, 6, 7]


def test_a_batch_that_lost_a_group_is_formed_again_in_order() -> None:
    driver = Driver(make_spec(window=3))
    driver.admit(4)
    straggler = driver.lease("rollout")
    driver.compute_all()
    made = driver.ledger.lease_shared("train", 0, 1, 1, "trainer", 0.0)
    assert made.parts == [[2, 3, 4, 5]]
    driver.write(straggler, "rollout", [0, 1])
    driver.compute_all()
    driver.ledger.lost({2: {"prompt_ids": 0b11}}, 0.0)
    driver.ledger.release(made.lease_id)
    assert driver.train(0) == [0, 1, 2, 3]


def test_a_group_that_lagged_holds_up_no_batch_of_groups_that_came_back() -> None:
    """Groups 0 to 2 are complete, and 3 lags. Group 0 is lost with its node, and its batch comes back: 1 and 2 are the
    next."""
    driver = Driver(make_spec(max_active_groups=4))
    driver.admit(3)
    driver.compute_all()
    driver.admit(1)
    made = driver.ledger.lease_shared("train", 0, 1, 1, "trainer", 0.0)
    assert driver.ledger.lease_shared("train", 1, 1, 1, "trainer", 0.0) is None  # 2 alone; 3 lags
    driver.ledger.lost({0: {"prompt_ids": 0b11}}, 0.0)
    driver.ledger.release(made.lease_id)
    assert driver.train(0) == [2, 3, 4, 5]


def test_trainers_that_replace_others_begin_after_the_last_step_of_all_ranks() -> None:
    driver = Driver(make_spec(max_active_groups=8))
    driver.admit(8)
    driver.compute_all()
    ledger = driver.ledger
    assert ledger.settle("train") == 0
    made = ledger.lease_shared("train", 0, 2, 1, "trainer", 0.0)
    ledger.complete_shared(made.lease_id, 1)
    assert ledger.settle("train") == 0  # rank 0 has not said so
    with pytest.raises(LeaseExpired):
        ledger.complete_shared(made.lease_id, 0)
    again = ledger.lease_shared("train", 0, 3, 1, "trainer", 0.0)  # perhaps over another number of ranks
    assert sorted(chain(*again.parts)) == sorted(chain(*made.parts)) == [0, 1, 2, 3]
    for rank in range(3):
        ledger.complete_shared(again.lease_id, rank)
    assert ledger.settle("train") == 1
    assert ledger.counters["rows_trained"] == 4
    assert ledger.counters["batches_released"] == 1


def test_a_batch_ahead_of_one_that_was_not_trained_goes_back_as_well() -> None:
    driver = Driver(make_spec(max_active_groups=8))
    driver.admit(8)
    driver.compute_all()
    for number in range(2):
        made = driver.ledger.lease_shared("train", number, 2, 1, "trainer", 0.0)
        driver.ledger.complete_shared(made.lease_id, 0)
    assert driver.ledger.settle("train") == 0
    check_invariants(driver.ledger)
    assert [driver.train(number) for number in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_scorers_that_take_the_place_of_others_begin_with_a_round_of_their_own(driver: Driver) -> None:
    driver.admit(3)
    driver.compute("rollout")
    assert driver.ledger.settle("reference") == 0
    first = driver.ledger.lease_shared("reference", 0, 2, 2, "reference", 0.0)
    lease = driver.ledger.residents.leases.held[first.lease_id]
    written = driver.ledger.rows_of_rank(first, 0)
    driver.write(lease, "reference", written)
    driver.ledger.lease_shared("reference", 1, 2, 2, "reference", 0.0)
    assert driver.ledger.settle("reference") == driver.ledger.settle("reference") == 2
    assert not driver.ledger.residents.leases.held
    again = driver.ledger.lease_shared("reference", 2, 2, 100, "reference", 0.0)
    assert sorted(row for part in again.parts for row in part) == sorted(set(range(6)) - set(written))


def test_a_batch_in_training_never_expires(driver: Driver) -> None:
    driver.admit(2)
    driver.compute_all()
    made = driver.ledger.lease_shared("train", 0, 1, 1, "trainer", 0.0)
    assert driver.ledger.expire(1e9) == []
    assert driver.ledger.next_deadline() is None
    driver.ledger.complete_shared(made.lease_id, 0)


def test_other_stages_are_shared_over_ranks_by_whole_units(driver: Driver) -> None:
    driver.admit(3)
    driver.compute("rollout")
    made = driver.ledger.lease_shared("reference", 0, 2, 4, "reference", 0.0)
    assert sorted(driver.ledger.rows_of_rank(made, 0) + driver.ledger.rows_of_rank(made, 1)) == [0, 1, 2, 3]
    lease = driver.ledger.residents.leases.held[made.lease_id]
    share = driver.ledger.rows_of_rank(made, 0)
    driver.write(lease, "reference", share)
    assert driver.ledger.rows_of_rank(made, 0) == []
    with pytest.raises(StoreError, match="completed by writing"):
        driver.ledger.complete_shared(made.lease_id, 0)
    driver.ledger.expire(10.0)
    with pytest.raises(LeaseExpired, match="expired or was released"):
        driver.ledger.lease_shared("reference", 0, 2, 4, "reference", 0.0)
    again = driver.ledger.lease_shared("reference", 1, 2, 9, "reference", 11.0)
    assert sorted(row for part in again.parts for row in part) == sorted(set(range(6)) - set(share))


def test_a_batch_whose_loss_compares_a_group_is_shared_by_whole_groups() -> None:
    stages = tuple(replace(stage, whole_groups=stage.unit == "batch") for stage in make_spec().stages)
    driver = Driver(make_spec(stages=stages, group_size=3, groups_per_step=4, max_active_groups=4))
    driver.admit(4)
    driver.compute_all()
    made = driver.ledger.lease_shared("train", 0, 2, 1, "trainer", 0.0)
    homes = [{row // 3 for row in part} for part in made.parts]
    assert homes[0].isdisjoint(homes[1])
    assert sorted(map(len, made.parts)) == [6, 6]


def test_trained_rows_stay_until_the_next_batch_is_trained() -> None:
    driver = Driver(make_spec(max_active_groups=4))
    driver.admit(4)
    driver.compute_all()
    driver.train(0)
    assert driver.ledger.freed == []
    driver.train(1)
    assert driver.ledger.freed == [(0, 0b11), (1, 0b11)]
    assert driver.ledger.rounds.last_batch == [4, 5, 6, 7]


def test_a_version_that_no_batch_can_have_made_is_refused(driver: Driver) -> None:
    with pytest.raises(StoreError, match=r"served\(1\): only 0 batches"):
        driver.ledger.served(1)


def test_the_train_stage_is_not_leased_row_by_row(driver: Driver) -> None:
    with pytest.raises(UnknownStage, match="use lease_shared"):
        driver.ledger.lease("train", 1, "trainer", 0.0)
