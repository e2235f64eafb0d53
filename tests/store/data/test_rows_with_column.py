import numpy as np
import pytest

from penstock.store.data.rows import Rows
from penstock.store.errors import WrongLength

ROWS = Rows.from_lists({"prompt_ids": [[5, 6], [7]]}, group_ids=[3, 4])


def test_a_column_is_added_in_its_standard_type_and_the_rows_stay_as_they_were():
    rows = ROWS.with_column("reward", np.array([1.0, np.nan]))
    assert rows.values("reward").dtype == np.float32
    assert rows.names == ("prompt_ids", "reward")
    assert rows.group_ids.tolist() == [3, 4]
    assert ROWS.names == ("prompt_ids",)


def test_a_column_of_the_same_name_is_replaced():
    rows = ROWS.with_column("reward", [1, 2]).with_column("reward", [3, 4])
    assert rows.values("reward").tolist() == [3.0, 4.0]


def test_ragged_columns_are_taken_row_by_row():
    rows = ROWS.with_column("behavior_logprobs", [np.float32([-1, -2]), np.float32([])])
    assert [array.tolist() for array in rows.arrays("behavior_logprobs")] == [[-1.0, -2.0], []]


def test_a_column_needs_one_value_a_row():
    with pytest.raises(WrongLength, match="column 'reward': 1 values for 2 rows"):
        ROWS.with_column("reward", [1.0])
