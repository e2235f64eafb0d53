"""The order of prompts: each row once an epoch, another order each epoch, resumable anywhere."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import DataError
from penstock.workers.prompts.order import PromptCursor, PromptOrder, epoch_order


def test_order_is_fixed_by_seed_and_epoch_alone():
    assert epoch_order(6, seed=0, epoch=0).tolist() == epoch_order(6, seed=0, epoch=0).tolist()
    orders = {tuple(epoch_order(20, seed, epoch).tolist()) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_without_shuffling_rows_come_as_they_are():
    assert epoch_order(4, seed=9, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3]


def test_every_row_is_as_likely_first_as_any_other():
    firsts = [int(epoch_order(4, seed, 0)[0]) for seed in range(4000)]
    assert all(900 < firsts.count(row) < 1100 for row in range(4))


@given(num_rows=st.integers(1, 30), seed=st.integers(0, 2**31), epoch=st.integers(0, 50))
def test_an_epoch_has_every_row_once(num_rows, seed, epoch):
    assert sorted(epoch_order(num_rows, seed, epoch).tolist()) == list(range(num_rows))


@given(num_rows=st.integers(1, 7), seed=st.integers(0, 100), before=st.integers(0, 30), after=st.integers(0, 30))
def test_a_resumed_order_goes_on_where_the_first_one_stopped(num_rows, seed, before, after):
    order = PromptOrder(num_rows, seed)
    for _ in range(before):
        order.next()
    saved = PromptCursor.from_dict(json.loads(json.dumps(order.cursor.to_dict())))
    resumed = PromptOrder(num_rows, seed, saved)
    assert [resumed.next() for _ in range(after)] == [order.next() for _ in range(after)]


def test_a_dataset_without_rows_is_refused():
    with pytest.raises(DataError, match="no rows"):
        PromptOrder(0, seed=0)
