"""Rows: no padding, no surprises, and the same after a trip through pickle."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.data.rows import Rows
from penstock.store.errors import StoreError, UnknownColumn, WrongLength

ROWS = {"prompt_ids": [[5, 6], [5, 6], [], [7]], "reward": [1.0, 0.0, 2.0, 3.0], "task": ["a", "b", "c", "d"]}


def example() -> Rows:
    return Rows.from_lists(ROWS, group_ids=[4, 4, 9, 9])


def test_columns_come_in_their_declared_type() -> None:
    rows = example()
    assert rows.values("reward").dtype == np.float32
    assert rows.arrays("prompt_ids")[0].dtype == np.int32
    assert rows.strings("task") == ["a", "b", "c", "d"]
    assert rows.lists("prompt_ids") == [[5, 6], [5, 6], [], [7]]
    assert rows.names == ("prompt_ids", "reward", "task")


def test_ragged_columns_are_one_buffer_and_offsets() -> None:
    values, offsets = example().ragged("prompt_ids")
    assert values.tolist() == [5, 6, 5, 6, 7]
    assert offsets.tolist() == [0, 2, 4, 4, 5]
    assert np.shares_memory(example().arrays("prompt_ids")[0], values) is False  # another Rows, another buffer
    rows = example()
    assert np.shares_memory(rows.arrays("prompt_ids")[0], rows.ragged("prompt_ids")[0])


def test_groups_are_positions_in_order_of_appearance() -> None:
    assert [(group, where.tolist()) for group, where in example().select([3, 0, 2]).groups()] == [(9, [0, 2]), (4, [1])]


def test_wrong_accessors_name_the_right_one() -> None:
    with pytest.raises(StoreError, match=r"'prompt_ids' is list<.*use .arrays"):
        example().values("prompt_ids")
    with pytest.raises(StoreError, match=r"'task' is string.*use .strings"):
        example().arrays("task")
    with pytest.raises(UnknownColumn, match="'advantage' is not among those leased"):
        example().values("advantage")
    with pytest.raises(WrongLength, match="unequal"):
        Rows.from_lists({"reward": [1.0], "task": ["a", "b"]})


def test_the_table_of_a_slice_has_only_its_own_values() -> None:
    rows = Rows(np.arange(2), np.zeros(2), example().table().slice(2, 2))
    assert rows.ragged("prompt_ids")[0].tolist() == [7]
    assert rows.lengths("prompt_ids").tolist() == [0, 1]


@given(st.lists(st.lists(st.integers(0, 99), max_size=5), max_size=8), st.randoms(use_true_random=False))
def test_select_concat_and_pickle_keep_every_row(prompts: list[list[int]], random) -> None:
    rows = Rows.from_lists({"prompt_ids": prompts})
    order = list(range(len(prompts)))
    random.shuffle(order)
    chosen = rows.select(order)
    assert chosen.lists("prompt_ids") == [prompts[index] for index in order]
    assert chosen.row_ids.tolist() == order
    both = pickle.loads(pickle.dumps(Rows.concat([chosen, rows])))
    assert both.lists("prompt_ids") == chosen.lists("prompt_ids") + prompts
    assert [array.tolist() for array in both.arrays("prompt_ids")] == both.lists("prompt_ids")


def test_the_table_with_ids_has_them_before_its_columns() -> None:
    table = example().table_with_ids()
    assert table.column_names[:2] == ["group_id", "row_id"]
    assert table.column("row_id").to_pylist() == example().row_ids.tolist()
    assert table.drop_columns(["group_id", "row_id"]).equals(example().table())


TWO = Rows.from_lists({"prompt_ids": [[5, 6], [7]]}, group_ids=[3, 4])


def test_a_column_is_added_in_its_standard_type_and_the_rows_stay_as_they_were():
    rows = TWO.with_column("reward", np.array([1.0, np.nan]))
    assert rows.values("reward").dtype == np.float32
    assert rows.names == ("prompt_ids", "reward")
    assert rows.group_ids.tolist() == [3, 4]
    assert TWO.names == ("prompt_ids",)


def test_a_column_of_the_same_name_is_replaced():
    rows = TWO.with_column("reward", [1, 2]).with_column("reward", [3, 4])
    assert rows.values("reward").tolist() == [3.0, 4.0]


def test_ragged_columns_are_taken_row_by_row():
    rows = TWO.with_column("behavior_logprobs", [np.float32([-1, -2]), np.float32([])])
    assert [array.tolist() for array in rows.arrays("behavior_logprobs")] == [[-1.0, -2.0], []]


def test_a_column_needs_one_value_a_row():
    with pytest.raises(WrongLength, match="column 'reward': 1 values for 2 rows"):
        TWO.with_column("reward", [1.0])


def test_rows_with_pictures_are_pickled_with_each_picture_once() -> None:
    large, other = b"x" * 10_000, b"y" * 10_000
    rows = Rows.from_lists({"prompt_ids": [[1], [1], [2]], "pictures": [[large], [large], [other, large]]}, [0, 0, 1])
    sent = pickle.dumps(rows)
    assert len(sent) < 22_000
    found = pickle.loads(sent)
    assert [list(map(bytes, one)) for one in found.blobs("pictures")] == [[large], [large], [other, large]]
    assert found.lists("prompt_ids") == [[1], [1], [2]]
    assert found.group_ids.tolist() == [0, 0, 1]
    assert len(pickle.dumps(found.select([0, 1]))) < 12_000


def test_a_column_by_its_name_has_the_form_that_suits_it() -> None:
    rows = Rows.from_lists(
        {"prompt_ids": [[1, 2], [3]], "reward": [1.0, 0.0], "task": ["{}", "[]"], "pictures": [[b"x"], []]}
    )
    assert rows["reward"].tolist() == [1.0, 0.0]
    assert [ids.tolist() for ids in rows["prompt_ids"]] == [[1, 2], [3]]
    assert rows["task"] == ["{}", "[]"]
    assert [list(map(bytes, one)) for one in rows["pictures"]] == [[b"x"], []]
    with pytest.raises(UnknownColumn):
        rows["rewards"]


def test_means_of_groups_leave_out_what_is_not_known() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0], np.float32)
    assert example().group_mean(values).tolist() == [1.0, 1.0, 4.0, 4.0]
    assert np.isnan(example().group_mean(np.full(4, np.nan))).all()
    assert example().group_mean(np.array([0, 1, 2, 4])).tolist() == [0.5, 0.5, 3.0, 3.0]
    with pytest.raises(WrongLength):
        example().group_mean(values[:3])


def test_a_function_of_columns_is_called_for_each_group() -> None:
    rows = Rows.from_lists(
        {"reward": [1.0, 0.0, np.nan, 5.0], "response_ids": [[1], [1, 2], [1], [1, 2, 3]]}, group_ids=[0, 0, 0, 1]
    )
    found = rows.per_group(lambda reward: reward - reward.mean(), "reward")
    np.testing.assert_array_equal(found, np.array([0.5, -0.5, np.nan, 0.0], np.float32))
    by_length = rows.per_group(
        lambda reward, response_ids: [len(ids) for ids in response_ids], "reward", "response_ids"
    )
    np.testing.assert_array_equal(by_length, np.array([1, 2, np.nan, 3], np.float32))
    with pytest.raises(WrongLength, match=r"group 0: values of shape \(\) for 2 rows"):
        rows.per_group(lambda reward: reward.mean(), "reward")
    with pytest.raises(UnknownColumn):
        rows.per_group(lambda rewards: rewards, "rewards")


def test_columns_as_tensors_are_copies() -> None:
    rows = Rows.from_lists({"reward": [1.0, 0.0], "response_ids": [[1], [1, 2]], "task": ["{}", "[]"]})
    reward = rows.tensors("reward")
    reward[0] = 7.0
    assert (rows["reward"].tolist(), rows.tensors("task")) == ([1.0, 0.0], ["{}", "[]"])
    assert [ids.tolist() for ids in rows.tensors("response_ids")] == [[1], [1, 2]]
