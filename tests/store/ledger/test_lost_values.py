"""Values that are gone with their node are made again: each rule on a history small enough to follow by hand.

Rows 0 and 1 are of group 0, rows 2 and 3 of group 1. `rollout` makes responses, `reward` and `reference` work on single
rows, `group_advantage` on groups.
"""

from dataclasses import replace

import pytest

from penstock.algorithms.graph.columns import ROLLOUT_COLUMNS
from penstock.store.errors import LeaseExpired, RowsLost
from penstock.store.ledger.group import bits
from penstock.store.ledger.lost_values import group_loss
from penstock.store.service.snapshot import restore, scalars, values_of
from tests.store.checked_ledger import CheckedLedger
from tests.store.driver import Driver, facts_for, facts_of, living_groups, make_spec
from tests.store.invariants import check_invariants


def lose(driver: Driver, cells: dict[int, dict[str, int]]) -> None:
    driver.ledger.lost(cells, 0.0)
    check_invariants(driver.ledger)


def present(driver: Driver, row: int) -> set[str]:
    """Columns of a row."""
    group, sample = driver.ledger.residents.groups[row // 2], row % 2
    index = driver.ledger.residents.readiness.column_index
    return {name for name, column in index.items() if group.have[column] >> sample & 1}


def made_again(driver: Driver, version: int = 0) -> list[tuple[str, list[int]]]:
    """What is worked off, stage by stage, until nothing is free."""
    done = []
    for stage in ("rollout", "reward", "reference", "group_advantage"):
        while rows := driver.compute(stage, version=version):
            done.append((stage, rows))
    return done


def ready(driver: Driver, groups: int = 2) -> None:
    driver.admit(groups)
    driver.compute_all()


def test_a_loss_is_the_earliest_column_and_all_that_follows(driver: Driver) -> None:
    ready(driver)
    residents = driver.ledger.residents
    index = residents.readiness.column_index
    gone = [0b10 if name == "response_ids" else 0 for name in index]
    loss = group_loss(residents.groups[0], gone, residents.readiness.stages, residents.source)
    columns = {name: [*bits(loss.columns[column])] for name, column in index.items() if loss.columns[column]}
    assert columns == {name: [1] for name in (*ROLLOUT_COLUMNS, "reward", "reference_logprobs")} | {"advantage": [0, 1]}
    assert loss.stages == [0b10, 0b10, 0b10, 0b11, 0]  # rollout, reward, reference, group_advantage; never train


def test_a_lost_response_is_sampled_again_and_everything_of_it_computed_again(driver: Driver) -> None:
    ready(driver)
    lose(driver, {0: {"response_ids": 0b10}})
    assert present(driver, 0) == {"prompt_ids", "task", *ROLLOUT_COLUMNS, "reward", "reference_logprobs"}
    assert present(driver, 1) == {"prompt_ids", "task"}
    assert driver.train(0) is None
    assert made_again(driver) == [("rollout", [1]), ("reward", [1]), ("reference", [1]), ("group_advantage", [0, 1])]
    assert driver.train(0) == [0, 1, 2, 3]
    counters = driver.ledger.counters
    assert counters["rows_trained"] == 4
    assert counters["completed/rollout"] - counters["lost/rollout"] == 4
    assert [counters[f"lost/{stage}"] for stage in ("rollout", "reward", "reference", "group_advantage")] == [
        1, 1, 1, 2,
    ]  # fmt: skip
    assert counters["response_tokens_generated"] == 15  # five responses of 3 tokens were sampled
    assert counters["response_tokens_trained"] == 12


def test_a_lost_reward_leaves_the_response(driver: Driver) -> None:
    ready(driver)
    before = driver.ledger.residents.credits.bytes
    lose(driver, {0: {"reward": 0b01}})
    assert driver.ledger.residents.credits.bytes == before - 3 * 8  # one reward, two advantages
    assert made_again(driver) == [("reward", [0]), ("group_advantage", [0, 1])]
    assert driver.ledger.residents.credits.bytes == before
    assert driver.train(0) == [0, 1, 2, 3]


def test_a_lost_value_made_from_a_whole_group_is_computed_for_the_whole_group(driver: Driver) -> None:
    ready(driver)
    lose(driver, {1: {"advantage": 0b01}})
    assert made_again(driver) == [("group_advantage", [2, 3])]


def test_nothing_is_lost_twice_nor_of_groups_that_are_gone(driver: Driver) -> None:
    ready(driver)
    lose(driver, {0: {"reward": 0b01}, 77: {"reward": 0b01}})
    before = dict(driver.ledger.counters)
    lose(driver, {0: {"reward": 0b01}})
    assert driver.ledger.counters == before


def test_a_reward_of_a_lost_response_is_refused_though_it_comes_in_time(driver: Driver) -> None:
    driver.admit(2)
    driver.compute("rollout")
    lease = driver.lease("reward", max_units=1)
    lose(driver, {0: {"response_text": 0b01}})
    assert driver.ledger.counters["revoked/reward"] == 1
    with pytest.raises(LeaseExpired):
        driver.write(lease, "reward", [0])
    driver.compute("rollout")
    with pytest.raises(LeaseExpired):  # the new response is there, and that was the reward of the old one
        driver.write(lease, "reward", [0])
    assert "reward" not in present(driver, 0)
    assert driver.compute("reward") == [0, 1, 2, 3]


def test_what_a_lease_says_of_revoked_rows_is_ignored_and_of_its_others_kept(driver: Driver) -> None:
    driver.admit(2)
    driver.compute("rollout")
    lease = driver.lease("reward", max_units=3)
    driver.write(lease, "reward", [0])
    lose(driver, {0: {"response_text": 0b11}})
    driver.compute("rollout")
    driver.ledger.drop(lease.id, "reward", [0, 1], "reward_error")  # of the old responses, one of them done before
    assert driver.ledger.counters["dropped/reward_error"] == 0
    assert driver.write(lease, "reward", [0, 1, 2]) == [2]
    assert driver.ledger.counters["ignored/not_awaited"] == 2
    assert driver.compute("reward") == [0, 1, 3]


def test_a_response_that_was_half_written_is_sampled_anew_by_another(driver: Driver) -> None:
    driver.admit()
    lease = driver.lease("rollout")
    driver.ledger.write(lease.id, "rollout", [0, 1], ["response_text"], facts_of(["response_text"], 2), 0.0)
    lose(driver, {0: {"response_text": 0b11}})
    rest = [name for name in ROLLOUT_COLUMNS if name != "response_text"]
    with pytest.raises(LeaseExpired):
        driver.ledger.write(lease.id, "rollout", [0, 1], rest, facts_for("rollout", 2), 0.0)
    assert driver.compute("rollout") == [0, 1]


def test_siblings_that_are_being_compared_are_compared_again(driver: Driver) -> None:
    driver.admit()
    driver.compute("rollout")
    driver.compute("reward")
    lease = driver.lease("group_advantage")
    lose(driver, {0: {"reward": 0b10}})
    with pytest.raises(LeaseExpired):
        driver.write(lease, "group_advantage", [0, 1])
    assert made_again(driver)[0] == ("reward", [1])
    assert "advantage" in present(driver, 0)


def test_a_group_whose_prompt_is_lost_is_dropped_with_its_reason_and_credit(driver: Driver) -> None:
    assert driver.admit(5) == [0, 1, 2, 3, None]
    driver.compute_all()
    lose(driver, {1: {"prompt_ids": 0b11}})
    assert driver.ledger.counters["dropped/node_lost"] == 2
    assert driver.ledger.freed == [(1, 0b11)]
    assert driver.admit(2) == [4, None]
    assert driver.train(0) == [0, 1, 4, 5]


def test_ranks_that_share_a_round_go_on_with_the_rows_that_are_left(driver: Driver) -> None:
    driver.admit(2)
    driver.compute("rollout")
    ledger = driver.ledger
    made = ledger.lease_shared("reference", 0, 2, 4, "reference", 0.0)
    first, second = (ledger.rows_of_rank(made, rank) for rank in range(2))
    lost = second[0]
    lose(driver, {lost // 2: {"response_ids": 1 << lost % 2}})
    assert ledger.rows_of_rank(made, 0) == first
    assert ledger.rows_of_rank(made, 1) == second[1:]
    lose(driver, {0: {"response_ids": 0b11}, 1: {"response_ids": 0b11}})
    assert ledger.lease_shared("reference", 0, 2, 4, "reference", 0.0) is made  # no rank waits for one that is refused
    assert [ledger.rows_of_rank(made, rank) for rank in range(2)] == [[], []]
    driver.compute("rollout")
    again = ledger.lease_shared("reference", 1, 2, 4, "reference", 0.0)
    assert sorted(ledger.rows_of_rank(again, 0) + ledger.rows_of_rank(again, 1)) == [0, 1, 2, 3]


def test_a_step_goes_on_whose_ranks_have_their_rows(driver: Driver) -> None:
    ready(driver, groups=4)
    ledger = driver.ledger
    made = ledger.lease_shared("train", 0, 2, 1, "trainer", 0.0)
    lose(driver, {0: {"response_ids": 0b11}, 1: {"reward": 0b01}})
    assert driver.lease("rollout") is None  # while it may be trained, nobody makes it again
    assert driver.lease("reward") is None
    for rank in range(2):
        ledger.complete_shared(made.lease_id, rank)
        check_invariants(ledger)
    assert ledger.counters["rows_trained"] == 4
    assert ledger.counters["response_tokens_trained"] == 12
    assert ledger.rounds.last_batch == [0, 1, 2, 3]
    assert ledger.last_batch() == []  # group 1: an advantage is of both rewards
    assert driver.train(1) == [4, 5, 6, 7]


def test_a_rank_late_for_its_rows_is_told_and_the_batch_formed_again_in_order(driver: Driver) -> None:
    ready(driver, groups=4)
    ledger = driver.ledger
    made = ledger.lease_shared("train", 0, 2, 1, "trainer", 0.0)
    lose(driver, {1: {"response_ids": 0b01}})
    late = next(rank for rank in range(2) if 2 in made.parts[rank])
    with pytest.raises(RowsLost, match=r"of rank \d in round 0 of stage 'train'.*Release the round"):
        ledger.rows_of_rank(made, late)
    ledger.complete_shared(made.lease_id, 1 - late)
    ledger.release(made.lease_id)
    check_invariants(ledger)
    assert ledger.counters["rows_trained"] == 0
    assert driver.train(0) is None  # groups 2 and 3 are whole, and must wait
    assert made_again(driver) == [("rollout", [2]), ("reward", [2]), ("reference", [2]), ("group_advantage", [2, 3])]
    assert driver.train(0) == [0, 1, 2, 3]
    assert ledger.counters["rows_trained"] == 4


def test_a_prompt_lost_under_way_costs_its_group_only_if_the_step_is_lost(driver: Driver) -> None:
    ready(driver, groups=4)
    ledger = driver.ledger
    made = ledger.lease_shared("train", 0, 1, 1, "trainer", 0.0)
    lose(driver, {0: {"prompt_ids": 0b11}})
    assert ledger.counters["dropped/node_lost"] == 0
    ledger.release(made.lease_id)
    check_invariants(ledger)
    assert ledger.counters["dropped/node_lost"] == 2
    made = ledger.lease_shared("train", 0, 1, 1, "trainer", 0.0)
    assert ledger.rows_of_rank(made, 0) == [2, 3, 4, 5]
    lose(driver, {1: {"prompt_ids": 0b11}})
    ledger.complete_shared(made.lease_id, 0)
    check_invariants(ledger)
    assert ledger.counters["dropped/node_lost"] == 2
    assert ledger.counters["rows_trained"] == 4


def test_a_snapshot_of_a_batch_under_way_has_no_more_than_is_left_of_it(driver: Driver) -> None:
    ready(driver, groups=4)
    ledger = driver.ledger
    ledger.lease_shared("train", 0, 1, 1, "trainer", 0.0)
    lose(driver, {0: {"prompt_ids": 0b11}, 1: {"response_ids": 0b01}})
    values = scalars(ledger)
    groups = [values_of(group, 2) for group in living_groups(ledger)]
    driver.ledger = CheckedLedger(ledger.spec)
    restore(driver.ledger, values, groups)
    check_invariants(driver.ledger)
    assert driver.ledger.counters["dropped/node_lost"] == 2
    assert made_again(driver)[0] == ("rollout", [2])
    assert driver.train(0) == [2, 3, 4, 5]


def test_a_row_made_again_is_as_fresh_as_its_admission_promises() -> None:
    driver = Driver(make_spec(max_active_groups=4, max_staleness=1))
    ready(driver, groups=4)
    assert driver.train(0) == [0, 1, 2, 3]
    lose(driver, {2: {"response_ids": 0b11}})
    made_again(driver, version=1)
    assert driver.train(1) == [4, 5, 6, 7]
    assert driver.ledger.counters["staleness/0"] == 4 + 2  # group 2 was sampled again under version 1
    assert driver.ledger.counters["staleness/1"] == 2


def test_a_straggler_by_loss_is_overtaken_by_no_more_than_the_window() -> None:
    driver = Driver(make_spec(window=3, max_staleness=2, max_active_groups=8))
    ready(driver, groups=8)
    lose(driver, {0: {"response_ids": 0b01}})
    lagging = driver.lease("rollout")
    assert driver.train(0) == [2, 3, 4, 5]
    assert driver.train(1) is None
    driver.write(lagging, "rollout", [0], version=1)
    driver.compute_all()
    assert driver.train(1) == [0, 1, 6, 7]


def test_whole_group_columns_of_a_shrunk_group_are_computed_again_for_its_rows() -> None:
    spec = make_spec(group_size=3)
    driver = Driver(replace(spec, groups_per_step=1, max_active_groups=2))
    driver.admit()
    lease = driver.lease("rollout")
    driver.ledger.drop(lease.id, "rollout", [1], "too_long")
    driver.write(lease, "rollout", [0, 2])
    driver.compute_all()
    lose(driver, {0: {"reward": 0b100}})
    assert driver.compute("reward") == [2]
    assert driver.compute("group_advantage") == [0, 2]
    assert driver.train(0) == [0, 2]
