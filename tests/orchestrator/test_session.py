"""The rows that each rank of a session's trainer gets."""

from typing import Any

import numpy as np
import pytest

from penstock.conf.run import RunConfig
from penstock.conf.trainer import TrainerConfig
from penstock.orchestrator.loops.policy import Model
from penstock.store.data.rows import Rows


class Asked(Model):
    """Ranks that answer with the sum of each row's response, and note what they were given."""

    def _all(self, method: str, arguments: Any, timeout_s: float) -> list[Any]:
        self.given = [rows.lists("response_ids") for (rows,) in arguments]
        return [[np.asarray([sum(row)], np.float32) for row in rows] for rows in self.given]


@pytest.mark.parametrize(("tensor", "sequence"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_ranks_that_split_the_work_on_a_row_get_the_same_rows(tensor: int, sequence: int) -> None:
    trainer = TrainerConfig(num_ranks=4, tensor_parallel_size=tensor, sequence_parallel_size=sequence)
    ranks = Asked([(f"Trainer-{rank}", None) for rank in range(4)], RunConfig(trainer=trainer))
    responses = [[number + 1] * (number % 3 + 1) for number in range(9)]
    rows = Rows.from_lists({"prompt_ids": [[1]] * 9, "response_ids": responses}, group_ids=list(range(9)))
    sums = [float(values[0]) for values in ranks.logprobs(rows)]
    assert sums == [sum(response) for response in responses]
    peers = tensor * sequence
    for first in range(0, 4, peers):
        assert all(ranks.given[first] == ranks.given[first + more] for more in range(peers))
    assert sorted(row for first in range(0, 4, peers) for row in ranks.given[first]) == sorted(responses)
