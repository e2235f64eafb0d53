"""Passes and groups of ranks by the lengths of rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.trainer.update import rank_groups
from penstock.workers.trainer.update.rank_groups import (
    Group,
    Pass,
    PassCost,
    PassCosts,
    group_at,
    partitions,
    plan_passes,
)
from tests.amounts import amount

FREE = PassCosts({size: PassCost(0.0, 1 / size, 0.0) for size in (1, 2, 4)})
"""Costs of ranks that exchange at no cost."""
SLOWER = PassCosts({1: PassCost(1.0, 1.0, 0.0), 2: PassCost(1.0, 0.6, 0.0), 4: PassCost(1.0, 0.4, 0.0)})
"""Costs in which each doubling of a group takes a fifth or more of what it gains."""


def planned(lengths: list[int], costs: PassCosts, num_places: int = 4, max_tokens: int = 100) -> list[Pass]:
    tokens = np.array(lengths, np.int64)
    return plan_passes(tokens, tokens**2, num_places, max_tokens, costs)


def seconds_of(passes: list[Pass], lengths: list[int], costs: PassCosts) -> float:
    """The sum over passes of the seconds of the slowest group."""
    of_group = [
        [costs.seconds(one.size, sum(lengths[row] for row in one.items), sum(lengths[row] ** 2 for row in one.items))
         for one in groups]
        for groups in passes
    ]  # fmt: skip
    return sum(max(some) for some in of_group)


def test_a_long_row_is_split_and_short_ones_beside_it_are_not() -> None:
    assert planned([100, 25, 25, 30, 20], SLOWER) == [(Group(2, (0,)), Group(1, (3, 4)), Group(1, (1, 2)))]


def test_rows_of_one_length_are_alone() -> None:
    (groups,) = planned([50] * 4, SLOWER)
    assert groups == tuple(Group(1, (row,)) for row in range(4))


def test_one_row_is_split_over_all_ranks_if_that_is_faster() -> None:
    assert planned([90], SLOWER) == [(Group(4, (0,)),)]
    assert [group.items for group in planned([90], PassCosts({1: SLOWER.by_size[1], 2: PassCost(1, 2, 0)}))[0]] == [
        (0,), (), (), ()
    ]  # fmt: skip


def test_a_row_beyond_the_budget_of_every_group_is_alone_in_the_largest() -> None:
    passes = planned([900, 10], FREE)
    assert Group(4, (0,)) in [group for groups in passes for group in groups]


def test_partitions_of_eight_ranks_are_all_sums_of_powers_of_two() -> None:
    every = list(partitions(8, [1, 2, 4, 8]))
    assert len(every) == len(set(every)) == 10
    assert all(sum(one) == 8 and sorted(one, reverse=True) == list(one) for one in every)


COSTS = st.builds(
    lambda each, exchange, square: PassCosts({
        size: PassCost(each * (1 + exchange * (size > 1)), (1 + exchange * (size - 1)) / size, square / size)
        for size in (1, 2, 4)
    }),
    st.floats(0, 100), st.floats(0, 1), st.floats(0, 0.1),
)  # fmt: skip
LENGTHS = st.lists(st.integers(1, 500), max_size=40)


@pytest.mark.parametrize("num_places", [4, 8])
@given(lengths=LENGTHS, costs=COSTS, max_tokens=st.integers(50, 400))
def test_every_row_is_computed_once_within_the_memory_of_its_group(
    num_places: int, lengths: list[int], costs: PassCosts, max_tokens: int
) -> None:
    passes = planned(lengths, costs, num_places, max_tokens)
    assert sorted(row for groups in passes for group in groups for row in group.items) == list(range(len(lengths)))
    for groups in passes:
        assert sum(group.size for group in groups) == num_places
        for group in groups:
            tokens = sum(lengths[row] for row in group.items)
            assert tokens <= group.size * max_tokens or (len(group.items) == 1 and group.size == 4)


@given(lengths=LENGTHS, costs=COSTS)
def test_all_places_find_their_groups_in_every_pass(lengths: list[int], costs: PassCosts) -> None:
    passes = planned(lengths, costs)
    assert passes == planned(lengths, costs)
    for groups in passes:
        own = [group_at(groups, place) for place in range(4)]
        for place, group in enumerate(own):
            first = place - place % group.size  # groups of one size begin at its multiples, as process groups do
            assert all(other is group for other in own[first : first + group.size])


@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=30), costs=COSTS, max_tokens=st.integers(100, 400))
def test_a_choice_for_each_pass_is_never_slower_than_one_for_all(
    lengths: list[int], costs: PassCosts, max_tokens: int
) -> None:
    chosen = seconds_of(planned(lengths, costs, max_tokens=max_tokens), lengths, costs)
    for size in (1, 2, 4):
        if max(lengths) <= size * max_tokens or size == 4:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(rank_groups, "partitions", lambda *_, size=size: iter([(size,) * (4 // size)]))
                fixed = planned(lengths, costs, max_tokens=max_tokens)
            assert {group.size for groups in fixed for group in groups} == {size}
            assert chosen <= seconds_of(fixed, lengths, costs) * (1 + 1e-9)


def test_lognormal_lengths_take_fewer_seconds_and_bytes_than_any_size_for_all() -> None:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(512) - 0.72, 1.2, amount(256)), 1, 8192).astype(np.int64)
    sizes: dict[str, int] = {"num_parameters": 10_000_000, "num_layers": 8, "width": 256, "element_bytes": 4}
    costs = PassCosts.estimated([1, 2, 4], "cpu", **sizes)
    passes = plan_passes(lengths, lengths**2, 4, 8192, costs)
    chosen = seconds_of(passes, lengths.tolist(), costs)
    split = sum(lengths[row] for groups in passes for group in groups if group.size > 1 for row in group.items)
    assert split < 0.5 * lengths.sum()
    assert chosen < 1.15 * sum(costs.by_size[1].token * lengths + costs.by_size[1].square * lengths**2) / 4
