"""Places of pictures in a prompt: expanded once, found again, and refused where tokens and pictures do not belong
together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import DataError
from penstock.workers.pictures.prompt_pictures import check_ranges, expanded

PAD = 1


def test_a_placeholder_becomes_as_many_as_its_picture_has_features() -> None:
    assert expanded([5, PAD, 6], PAD, [4]) == ([5, 1, 1, 1, 1, 6], [(1, 4)])


def test_the_range_of_a_second_picture_begins_after_the_features_of_the_first() -> None:
    assert expanded([5, PAD, 6, 7, PAD], PAD, [3, 2]) == ([5, 1, 1, 1, 6, 7, 1, 1], [(1, 3), (6, 2)])


def test_text_without_pictures_stays_as_it_is() -> None:
    assert expanded([5, 6], PAD, []) == ([5, 6], [])


def test_tokens_that_are_expanded_already_are_refused_by_name() -> None:
    once, _ = expanded([5, PAD, 6], PAD, [6])
    with pytest.raises(DataError, match=r"6 placeholders .* for 1 pictures.*expanded already.*expanded twice"):
        expanded(once, PAD, [6])


@pytest.mark.parametrize("lengths", [[], [2, 2]])
def test_a_prompt_has_a_placeholder_for_each_picture(lengths: list[int]) -> None:
    with pytest.raises(DataError, match="one placeholder for each of its pictures"):
        expanded([5, PAD, 6], PAD, lengths)


@given(st.lists(st.tuples(st.lists(st.integers(2, 9), max_size=4), st.integers(1, 5)), max_size=5), st.data())
def test_ranges_hold_the_placeholders_and_nothing_else_of_the_prompt(parts, data) -> None:
    ids = [token for text, _ in parts for token in (*text, PAD)]
    lengths = [length for _, length in parts]
    tokens, ranges = expanded(ids, PAD, lengths)
    check_ranges(tokens, ranges, PAD, lengths)
    inside = {place for offset, length in ranges for place in range(offset, offset + length)}
    assert [token for place, token in enumerate(tokens) if place not in inside] == [t for t in ids if t != PAD]
    assert len(inside) == sum(lengths) == tokens.count(PAD)


WHOLE = [5, 1, 1, 1, 6, 1, 1, 7]
MUTANTS = {
    "lost a picture": (WHOLE, [(1, 3)], [3]),
    "grid of another picture": (WHOLE, [(1, 3), (5, 2)], [3, 4]),
    "pictures swapped": (WHOLE, [(1, 3), (5, 2)], [2, 3]),
    "ranges swapped": (WHOLE, [(5, 2), (1, 3)], [2, 3]),
    "ranges that overlap": (WHOLE, [(1, 3), (2, 2)], [3, 2]),
    "a range that is shifted": (WHOLE, [(0, 3), (5, 2)], [3, 2]),
    "a prompt that is cut on its left": (WHOLE[2:], [(0, 3), (3, 2)], [3, 2]),
    "a prompt that is cut on its right": (WHOLE[:6], [(1, 3), (5, 2)], [3, 2]),
    "expanded twice": ([5, *[1] * 5, 6, 1, 1, 7], [(1, 3), (7, 2)], [3, 2]),
    "no picture for the placeholders": (WHOLE, [], []),
    "no range for a picture": (WHOLE, [], [3]),
}


def test_tokens_and_pictures_that_belong_together_are_taken() -> None:
    check_ranges(WHOLE, [(1, 3), (5, 2)], PAD, [3, 2])


@pytest.mark.parametrize("name", MUTANTS)
def test_tokens_and_pictures_that_do_not_belong_together_are_refused(name: str) -> None:
    ids, ranges, lengths = MUTANTS[name]
    with pytest.raises(DataError, match="picture"):
        check_ranges(ids, ranges, PAD, lengths)
