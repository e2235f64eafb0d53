"""The pieces that ranks report must be every element of a model, once; each is a few boxes."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import WeightError
from penstock.workers.weights.piece import Piece, boxes, gather_spans, place_of


def spans_of(by_rank: list[list[tuple[str, tuple[int, ...], tuple[int, int]]]]) -> list[list[tuple[int, int]]]:
    own = [Piece(name, shape, first, torch.empty(count)) for name, shape, (first, count) in by_rank[0]]
    others = [[(name, shape, "bfloat16", span) for name, shape, span in some] for some in by_rank[1:]]
    return [tensor.spans for tensor in gather_spans(own, "bfloat16", lambda mine: [mine, *others])]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.data())
def test_pieces_that_are_every_element_once_are_taken_and_others_refused(counts: list[int], data: Any) -> None:
    total, first, own = sum(counts), 0, []
    for count in counts:
        own.append([("w", (total,), (first, count))])
        first += count
    assert [count for _, count in spans_of(own)[0]] == counts
    rank = data.draw(st.integers(0, len(counts) - 1))
    name, shape, (first, count) = own[rank][0]
    own[rank] = [(name, shape, (first, count + 1))]
    with pytest.raises(WeightError, match=r"'w' of shape .* are not every element once"):
        spans_of(own)


def test_ranks_that_list_different_tensors_are_refused() -> None:
    a, b = ("a", (1,), (0, 1)), ("b", (1,), (0, 0))
    with pytest.raises(WeightError, match="different orders"):
        spans_of([[a, b], [b, a]])


def corners_of(piece: Piece) -> list[tuple[tuple[int, ...], list[Any]]]:
    return [(box.corner, box.values.tolist()) for box in boxes([piece])]


def test_a_run_is_a_part_of_a_row_whole_rows_and_a_part_of_a_row() -> None:
    run = Piece("w", (4, 3), 2, torch.arange(2, 10))
    assert corners_of(run) == [((0, 2), [[2]]), ((1, 0), [[3, 4, 5], [6, 7, 8]]), ((3, 0), [[9]])]
    assert corners_of(Piece("w", (2, 2, 2), 3, torch.arange(3, 6))) == [((0, 1, 1), [[[3]]]), ((1, 0, 0), [[[4, 5]]])]


def test_a_box_stays_as_it_is_and_nothing_is_left_out() -> None:
    box = Piece("w", (4, 6), 8, torch.zeros(2, 3))
    assert list(boxes([box])) == [box]
    assert box.corner == (1, 2)
    assert list(boxes([Piece("w", (4, 6), 24, torch.zeros(0)), Piece("w", (4, 6), 24, torch.zeros(0, 3))])) == []
    assert corners_of(Piece("scalar", (), 0, torch.tensor([7]))) == [((), 7)]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_the_boxes_of_a_run_are_its_elements_in_order_and_few(extents: list[int], data: Any) -> None:
    shape, total = tuple(extents), math.prod(extents)
    first = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(1, total - first))
    whole = torch.arange(total).reshape(shape)
    values = torch.arange(first, first + count)
    found = list(boxes([Piece("w", shape, first, values)]))
    assert len(found) <= 2 * len(shape) - 1
    assert torch.equal(torch.cat([box.values.reshape(-1) for box in found]), values)
    for box in found:
        part = tuple(slice(at, at + extent) for at, extent in zip(box.corner, box.values.shape, strict=True))
        assert torch.equal(whole[part], box.values)
        assert place_of(box.corner, shape) == box.first
        assert box.values.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
