"""Rows by the groups that they lie in: spans and masks, whatever rows come, in whatever order."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.store.ledger.group import masks_of, num_rows, row_ids, spans_of


@st.composite
def some_rows(draw: st.DrawFn) -> list[int]:
    """Runs of rows, many of which begin or end with a group, and rows anywhere."""
    runs = st.tuples(st.integers(0, 40), st.integers(1, 20)).map(lambda run: list(range(run[0], run[0] + run[1])))
    return [row for run in draw(st.lists(runs, max_size=4)) for row in run]


@given(some_rows(), st.integers(1, 8))
def test_spans_say_where_each_row_is_in_the_order_in_which_they_came(rows: list[int], size: int) -> None:
    spans = spans_of(rows, size)
    assert [group * size + index for group, _, indices in spans for index in indices] == rows
    assert [position + i for _, position, indices in spans for i in range(len(indices))] == list(range(len(rows)))
    assert all(0 <= indices.start < indices.stop <= size for _, _, indices in spans)


@given(some_rows(), st.integers(1, 8))
def test_masks_have_each_row_once(rows: list[int], size: int) -> None:
    masks = masks_of(spans_of(rows, size))
    assert sorted(row for group, mask in masks.items() for row in row_ids(group, mask, size)) == sorted(set(rows))
    assert num_rows(masks) == len(set(rows))


def test_whole_groups_one_after_the_other_are_a_span_each() -> None:
    assert spans_of([8, 9, 10, 11, 12, 13, 14, 15], 4) == [(2, 0, range(4)), (3, 4, range(4))]
