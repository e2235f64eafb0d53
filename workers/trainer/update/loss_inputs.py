"""The arguments that a loss takes, found once from its signature, and the call with them.

The loss of a dataflow names what it reads (`Dataflow.train`, `algorithms/losses/`): columns of the rows, and
what only the trainer has.

Legend: B rows of the micro-batch, T response tokens, padded.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.algorithms.aggregation import BatchTotals
from penstock.algorithms.graph.stage import PROVIDED_BY_TRAINER
from penstock.conf.errors import DataflowError, suggest
from penstock.workers.protocols import Loss
from penstock.workers.trainer.update.batching import MicroBatch


@dataclass(frozen=True)
class LossInputs:
    """A loss and what it reads. `columns` are those that it must have and those of its optional ones that the rows
    bring.
    """

    loss: Loss
    columns: tuple[str, ...]
    takes_entropy: bool
    takes_old_logprobs: bool
    provided: tuple[str, ...]

    @classmethod
    def of(cls, loss: Loss, names: tuple[str, ...]) -> "LossInputs":
        """Find what a loss reads. `names`: columns of the rows. Raises `DataflowError` for a column that the loss needs
        and the rows lack."""
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
        """True if the samples of a group must be in one micro-batch."""
        return "group_ids" in self.provided

    def call(
        self,
        batch: MicroBatch,
        totals: BatchTotals,
        of_model: Mapping[str, Any],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's contribution to the loss, `[]` with gradient, and to each metric. `of_model`: the
        model's outputs, by the names that a loss has for them. Raises `DataflowError` if this model lacks an output
        that the loss asks for."""
        available = {**of_model, "mask": batch.mask_BT, "totals": totals, "group_ids": batch.group_ids_B}
        missing = [name for name in self.provided if name not in available]
        if missing:
            raise DataflowError(
                f"the loss takes {missing[0]!r}, and the model that it trains gives {', '.join(sorted(of_model))}. "
                "Only a policy gives log-probabilities, only a critic values, only a reward model scores."
            )
        arguments = {name: available[name] for name in self.provided}
        return self.loss(**arguments, **{name: batch.columns[name] for name in self.columns})
