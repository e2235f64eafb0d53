"""The cut of rows on all ranks alike: a batch into minibatches of whole groups, one an optimizer step, and those into
micro-batches, as many on every rank. `batching.py` decides how rows are cut; here ranks tell each other of it.
"""

from dataclasses import dataclass, replace

import numpy as np

from penstock.algorithms.aggregation import BatchTotals
from penstock.conf.trainer import TrainerConfig
from penstock.store.data.rows import Rows
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.update import batching
from penstock.workers.trainer.update.batching import MicroBatch
from penstock.workers.trainer.update.loss_inputs import LossInputs


@dataclass(frozen=True)
class Minibatch:
    """The data of one optimizer step: this rank's micro-batches (as many as on any rank) and totals over all ranks."""

    batches: list[MicroBatch]
    totals: BatchTotals


@dataclass(frozen=True)
class Cutter:
    """Cuts the rows of one rank. Both methods are collective, and raise `DataError` for a row that does not fit the
    model."""

    ranks: Ranks
    config: TrainerConfig
    max_length: int | None
    """Longest sequence of prompt and response, in tokens; None: unbounded."""
    rows_alone: bool = False
    """True if each row is a micro-batch in a pass without a loss: sums in matrix products depend on the shape, so among
    others a row may come out with other last bits."""

    def microbatches(self, rows: Rows) -> list[MicroBatch]:
        """Cut all rows for a pass without a loss."""
        parts = np.arange(len(rows)).reshape(-1, 1) if self.rows_alone else [np.arange(len(rows))]
        batches = [batch for part in parts for batch in self._cut(rows, part, ())]
        count = max(self.ranks.gather(len(batches)))
        return batching.pad_plan(batches, count, self.ranks.device)

    def minibatches(self, rows: Rows, inputs: LossInputs) -> list[Minibatch]:
        """Make a minibatch for each optimizer step of an update, with the columns that the loss takes."""
        columns = inputs.columns
        if "behavior_logprobs" in rows and "behavior_logprobs" not in columns:
            columns = (*columns, "behavior_logprobs")
        count = self.config.num_minibatches
        every_group = self.ranks.gather(np.unique(rows.group_ids)) if count > 1 else []
        parts = batching.split_minibatches(rows.group_ids, np.concatenate(every_group) if every_group else [], count)
        cuts = [self._cut(rows, part, columns, whole_groups=inputs.takes_groups) for part in parts]
        sizes = [
            (len(batches), sum((_totals(batch, inputs.takes_groups) for batch in batches), BatchTotals(0, 0)))
            for batches in cuts
        ]
        minibatches = []
        for batches, others in zip(cuts, zip(*self.ranks.gather(sizes), strict=True), strict=True):
            totals = sum((other for _, other in others), BatchTotals(0, 0))
            padded = batching.pad_plan(batches, max(number for number, _ in others), self.ranks.device)
            minibatches.append(Minibatch(padded, totals))
        return minibatches

    def _cut(
        self, rows: Rows, positions: np.ndarray, columns: tuple[str, ...], *, whole_groups: bool = False
    ) -> list[MicroBatch]:
        """Cut these rows and move them to the device."""
        lengths, counts = (of_rows[positions] for of_rows in batching.row_lengths(rows, self.max_length))
        budget = self.config.max_tokens_per_microbatch
        if whole_groups:
            cuts = batching.plan_groups(lengths, rows.group_ids[positions], budget, counts)
        else:
            cuts = batching.plan(lengths, budget, counts)
        return [batching.collate(rows, positions[cut], columns).to(self.ranks.device) for cut in cuts]


def _totals(batch: MicroBatch, whole_groups: bool) -> BatchTotals:
    """Totals of one micro-batch. Groups can be counted where none is cut apart."""
    totals = BatchTotals.of(batch.mask_BT)
    return replace(totals, num_groups=len(batch.group_ids_B.unique())) if whole_groups else totals
