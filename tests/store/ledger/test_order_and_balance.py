"""The groups that make a batch, and how its rows are split: pure functions, by hand and by property."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.store.ledger.batches import balance, choose_groups, row_cost


def choose(complete: set[int], end: int, count: int, window: int) -> list[int] | None:
    return choose_groups(0, end, count, window, lambda group: True, complete.__contains__)


def test_strict_order_waits_for_the_oldest_group() -> None:
    assert choose({1, 2, 3}, 4, 2, 1) is None
    assert choose({0, 1, 3}, 4, 2, 1) == [0, 1]
    assert choose({0, 2, 3}, 4, 2, 1) is None


def test_a_window_counts_from_the_oldest_group_that_lags() -> None:
    assert choose({1, 2, 3}, 4, 2, 3) == [1, 2]
    assert choose({1, 2, 3}, 4, 3, 3) is None
    assert choose({0, 1, 3, 4}, 5, 4, 3) == [0, 1, 3, 4]  # group 2 lags: 3 and 4 may pass, 5 could not


def test_a_window_cut_short_by_the_last_group_admitted_is_still_counted_once() -> None:
    assert choose({1, 2}, 3, 3, 9) is None


@given(st.sets(st.integers(0, 20)), st.integers(1, 5), st.integers(1, 6))
def test_nobody_is_overtaken_by_more_than_the_window_allows(complete: set[int], count: int, window: int) -> None:
    waiting = set(range(21))
    taken: list[int] = []
    while (
        chosen := choose_groups(
            min(waiting, default=21), 21, count, window, waiting.__contains__, complete.__contains__
        )
    ) is not None:
        taken += chosen
        waiting -= set(chosen)
    for group in range(21):
        before = taken[: taken.index(group)] if group in taken else taken
        assert sum(other > group for other in before) <= window - 1
    free = [group for group in sorted(waiting) if group in complete and group - min(waiting) < window]
    assert len(free) < count  # and whatever could be taken was


def test_rows_are_spread_by_cost_and_not_by_count() -> None:
    # Karmarkar-Karp on {8, 7, 6, 5, 4} ends with 16 and 14 (the optimum is 15 and 15).
    parts = balance([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][position] for position in part) for part in parts) == [14, 16]


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 6))
def test_every_row_is_in_exactly_one_part_and_no_part_is_far_off(costs: list[int], num_parts: int) -> None:
    parts = balance(costs, num_parts)
    assert len(parts) == num_parts
    assert sorted(position for part in parts for position in part) == list(range(len(costs)))
    assert all(part == sorted(part) for part in parts)
    sums = [sum(costs[position] for position in part) for part in parts]
    assert max(sums) - min(sums) <= max(costs, default=0)
    assert balance(costs, num_parts) == parts


def test_attention_makes_long_rows_cost_more_than_their_tokens() -> None:
    assert row_cost(64) == 65
    assert row_cost(4096) == 2 * 4096
    assert row_cost(8192) == 3 * 8192


def long_tailed_lengths(seed: int, num_rows: int, mean: float, spread: float) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(mean, spread, num_rows)
    return [int(length) for length in np.clip(drawn, 16, 4096)]


def heaviest_over_mean(costs: list[float], parts: list[list[int]]) -> float:
    by_rank = [sum(costs[position] for position in part) for part in parts]
    return max(by_rank) / (sum(by_rank) / len(by_rank))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 16), st.floats(4, 7), st.floats(0.3, 1.2))
def test_the_heaviest_rank_is_within_5_percent_of_the_mean_or_one_row_is_more(
    seed: int, num_ranks: int, mean: float, spread: float
) -> None:
    """Each rank has 64 rows."""
    costs = [row_cost(length) for length in long_tailed_lengths(seed, 64 * num_ranks, mean, spread)]
    bound = max(1.05, num_ranks * max(costs) / sum(costs))
    assert heaviest_over_mean(costs, balance(costs, num_ranks)) <= bound


@pytest.mark.parametrize("quadratic_tokens", [2048, 2**14, 2**30])
def test_95_of_100_batches_stay_within_5_percent_whatever_attention_costs(quadratic_tokens: int) -> None:
    random, found = np.random.default_rng(0), []
    for seed in range(100):
        num_ranks, mean, spread = random.integers(2, 17), random.uniform(5.5, 7), random.uniform(0.3, 1.0)
        lengths = long_tailed_lengths(seed, 64 * num_ranks, mean, spread)
        costs = [length * (1 + length / quadratic_tokens) for length in lengths]
        found.append(heaviest_over_mean(costs, balance([row_cost(length) for length in lengths], num_ranks)))
    assert sorted(found)[94] <= 1.05
    assert max(found) <= 1.15
