"""Rows over ranks: every row once, in even parts, and groups whole where that is asked for or worth it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.ledger.batches import GroupLoad, largest_cost, pays_to_share, row_cost, spread

LOADS = st.lists(
    st.builds(
        lambda prompt, said: GroupLoad(prompt, [prompt + tokens for tokens in said]),
        st.integers(0, 3000), st.lists(st.integers(1, 500), min_size=1, max_size=8),
    ),
    max_size=12,
)  # fmt: skip


@given(LOADS, st.integers(1, 5), st.booleans(), st.booleans())
def test_every_row_is_in_one_part(loads: list[GroupLoad], parts: int, whole: bool, shares: bool) -> None:
    found = spread(loads, parts, whole_groups=whole, shares=shares)
    assert len(found) == parts
    assert sorted(row for part in found for row in part) == list(range(sum(len(load.rows) for load in loads)))
    assert all(part == sorted(part) for part in found)


@given(LOADS, st.integers(1, 5))
def test_the_costliest_part_costs_no_more_than_with_rows_spread_one_by_one(loads: list[GroupLoad], parts: int) -> None:
    assert largest_cost(loads, spread(loads, parts, shares=True)) <= largest_cost(loads, spread(loads, parts))


def test_groups_stay_whole_unless_the_costliest_part_is_cheaper_with_them_cut() -> None:
    assert spread([GroupLoad(2000, [2010] * 8)] * 2, 2, shares=True) == [list(range(8)), list(range(8, 16))]
    parts = spread([GroupLoad(20, [100] * 8)] * 3, 2, shares=True)
    assert [len(part) for part in parts] == [12, 12]


def test_a_tree_costs_its_prompt_once() -> None:
    assert GroupLoad(4096, [4096, 4096]).cost == row_cost(4096)
    assert GroupLoad(0, [100, 300]).cost == row_cost(100) + row_cost(300)
    # A group of a long prompt and short responses weighs as much as one and a half of the other rows.
    loads = [GroupLoad(2000, [2010] * 8), GroupLoad(2000, [2010] * 8), GroupLoad(0, [1500] * 4)]
    parts = spread(loads, 3, shares=True)
    assert [sum(row // 8 == 0 for row in part) for part in parts].count(8) == 1
    assert sorted(map(len, parts)) == [2, 9, 9]


def test_fewer_groups_than_ranks_are_cut_apart() -> None:
    parts = spread([GroupLoad(1000, [1100] * 8)], 4, shares=True)
    assert [len(part) for part in parts] == [2] * 4


@pytest.mark.parametrize(("tokens", "saved", "pays"), [(72, 35, True), (72, 31, False), (2000, 299, False)])
def test_little_is_not_worth_a_tree(tokens: int, saved: int, pays: bool) -> None:
    assert pays_to_share(tokens, saved) is pays
