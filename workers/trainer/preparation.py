"""What the trainers compute on the step's whole batch before the update: stages with `per="batch"`.

    this rank's rows ─▶ gather over ranks ─▶ stage function on all rows ─▶ this rank's values, as columns of its rows

Statistics over the batch (REINFORCE++'s deviation, whitening) are thus over all of it, whatever the number of ranks:
every rank computes the same, in order of row id. Called by `worker.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.algorithms.columns import Column
from penstock.algorithms.dataflow import Stage
from penstock.store.rows import Rows
from penstock.workers.compute.worker import ComputeWorker

Gather = Callable[[Any], list[Any]]
"""A picklable value of each rank, in order of rank. Collective."""


class Preparation:
    """The stages of a dataflow that run in its trainers.

    prepared = Preparation(flow.in_trainer, flow.columns, group.gather).apply(rows)
    """

    def __init__(self, stages: Sequence[Stage], columns: dict[str, Column], gather: Gather) -> None:
        self._workers = [ComputeWorker(stage, columns) for stage in stages]
        self._gather = gather

    def apply(self, rows: Rows) -> Rows:
        """These rows, with the columns that the stages write. Collective, also for a rank without rows. Raises
        `DataflowError` if a function returns what its stage does not declare."""
        for worker in self._workers:
            everybody = [part for part in self._gather(_only(rows, worker.stage.reads)) if len(part)]
            if not everybody:
                continue
            together = Rows.concat(everybody) if len(everybody) > 1 else everybody[0]
            order = np.argsort(together.row_ids, kind="stable")
            results = worker.apply(together.select(order))
            mine = np.searchsorted(together.row_ids[order], rows.row_ids)
            for name, values in results.items():
                rows = rows.with_column(name, [values[position] for position in mine.tolist()])
        return rows


def _only(rows: Rows, names: Sequence[str]) -> Rows:
    return Rows(rows.row_ids, rows.group_ids, rows.table().select(list(names)))
