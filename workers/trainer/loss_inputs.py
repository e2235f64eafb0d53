"""Which arguments a loss takes, found once from its signature, and the call with them.

The loss of a dataflow names what it reads (`algorithms/dataflow.py`, `algorithms/losses/`): columns of the rows, and
what only the trainer has. Called by `fsdp.py` for every micro-batch.

Legend: B rows of the micro-batch, T response tokens, padded.
"""

import inspect
from dataclasses import dataclass

from torch import Tensor

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.dataflow import PROVIDED_BY_TRAINER
from penstock.conf.errors import DataflowError, suggest
from penstock.workers.protocols import Loss
from penstock.workers.trainer.batching import MicroBatch


@dataclass(frozen=True)
class LossInputs:
    """A loss and what it wants. `columns` are those that it must have and those of its optional ones that the rows
    bring.
    """

    loss: Loss
    columns: tuple[str, ...]
    takes_entropy: bool
    takes_old_logprobs: bool
    provided: tuple[str, ...]

    @classmethod
    def of(cls, loss: Loss, names: tuple[str, ...]) -> "LossInputs":
        """`names`: columns of the rows. Raises `DataflowError` for a column that the loss needs and the rows lack."""
        provided, columns = [], []
        for name, parameter in inspect.signature(loss).parameters.items():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if name in PROVIDED_BY_TRAINER:
                provided.append(name)
            elif parameter.default is parameter.empty:
                if name not in names:
                    raise DataflowError(
                        f"the loss reads column {name!r}, which the rows lack{suggest(name, names)} "
                        "Let a stage before flow.train write it, or give the parameter a default."
                    )
                columns.append(name)
            elif parameter.default is None and name in names:
                columns.append(name)
        return cls(loss, tuple(columns), "entropy" in provided, "old_logprobs" in provided, tuple(provided))

    @property
    def takes_groups(self) -> bool:
        """The samples of a group must be in one micro-batch."""
        return "group_ids" in self.provided

    def call(
        self,
        batch: MicroBatch,
        totals: BatchTotals,
        logprobs_BT: Tensor,
        entropy_BT: Tensor | None,
        old_logprobs_BT: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's contribution to the loss, `[]` with gradient, and to each metric."""
        available = {
            "logprobs": logprobs_BT,
            "old_logprobs": old_logprobs_BT,
            "entropy": entropy_BT,
            "mask": batch.mask_BT,
            "totals": totals,
            "group_ids": batch.group_ids_B,
        }
        arguments = {name: available[name] for name in self.provided}
        return self.loss(**arguments, **{name: batch.columns[name] for name in self.columns})
