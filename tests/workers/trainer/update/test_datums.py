"""Data of calls as rows."""

import numpy as np
import pytest

from penstock.conf.errors import DataError
from penstock.workers.protocols import Datum, LossCall
from penstock.workers.trainer.datum_trainer import ModelLimits, rows_of

LIMITS = ModelLimits(None, 16, 16)


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "dro"])
def test_a_rank_without_data_has_the_columns_that_the_loss_needs(loss: str) -> None:
    ones = np.ones(2, np.float32)
    columns = {} if loss == "cross_entropy" else {"logprobs": ones, "advantages": ones}
    datum = Datum(np.array([1, 2], np.int32), np.array([2, 3]), columns)
    empty = rows_of([], LossCall(loss), LIMITS)
    assert len(empty) == 0
    assert set(empty.names) == set(rows_of([datum], LossCall(loss), LIMITS).names)


def test_a_rank_without_data_refuses_what_the_others_do() -> None:
    with pytest.raises(DataError, match="there is no loss 'sum'"):
        rows_of([], LossCall("sum"), LIMITS)
