"""Blocks of a packed micro-batch: where they lie, and what their tokens attend to."""

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.trainer.update.token_layout import Blocks, mask_of

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=20)
CPU = torch.device("cpu")


def test_positions_begin_anew_with_each_block() -> None:
    blocks = Blocks.of([4, 2, 1])
    assert blocks.position_ids_1T.tolist() == [[0, 1, 2, 3, 0, 1, 0]]
    assert blocks.bounds.tolist() == [0, 4, 6, 7]


@given(LENGTHS, st.integers(0, 5))
def test_runs_are_the_blocks_in_their_order_and_then_padding(lengths: list[int], padding: int) -> None:
    runs = list(Blocks.of(lengths).runs(sum(lengths) + padding))
    expected = lengths + [padding] * (padding > 0)
    assert [length for count, length in runs for _ in range(count)] == expected
    assert all(first[1] != second[1] for first, second in pairwise(runs))


@given(LENGTHS)
def test_bounds_and_positions_agree(lengths: list[int]) -> None:
    blocks = Blocks.of(np.array(lengths))
    starts = np.repeat(blocks.bounds[:-1].numpy(), lengths)
    assert (starts + blocks.position_ids_1T[0].numpy()).tolist() == list(range(sum(lengths)))


def test_a_window_of_two_is_a_token_and_the_one_before() -> None:
    assert mask_of(3, 2, CPU).int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]


def test_no_mask_is_made_where_plain_causal_attention_is_meant() -> None:
    assert mask_of(5, None, CPU) is None
    assert mask_of(5, 5, CPU) is None
    assert mask_of(5, 4, CPU) is not None
