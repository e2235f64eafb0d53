"""The pieces that ranks report must be every element of a model, once."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import WeightError
from penstock.workers.weights.piece import Piece, spans_by_tensor


def spans_of(by_rank: list[list[tuple[str, tuple[int, ...], tuple[int, int]]]]) -> list[list[tuple[int, int]]]:
    own = [Piece(name, shape, first, torch.empty(count)) for name, shape, (first, count) in by_rank[0]]
    return [spans for _, _, spans in spans_by_tensor(own, lambda mine: [mine, *by_rank[1:]])]


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
