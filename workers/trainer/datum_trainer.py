"""A rank of a trainer that takes data with targets of their own and a summed loss (`training_calls.py`) beside rows.

    data ─▶ rows ─▶ micro-batches ─▶ forward, loss, backward ─▶ log-probabilities of each datum, metrics of all

Micro-batches are cut for a call alone: what it returns and adds to the gradients depends on nothing but its data and
the weights.

Legend: N targets of a micro-batch.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.algorithms.losses.summed import summed_loss
from penstock.conf.errors import DataError
from penstock.workers.calls.training_calls import Datum, ForwardOutput, LossCall
from penstock.workers.trainer.trainer import PolicyTrainer
from penstock.workers.trainer.update import batching, datums
from penstock.workers.trainer.update.batching import MicroBatch
from penstock.workers.trainer.update.minibatches import LossInputs
from penstock.workers.trainer.update.tally import Tally

T = TypeVar("T")


class DatumTrainer(PolicyTrainer):
    """Lifecycle: that of a `PolicyTrainer`."""

    def forward_data(self, data: Sequence[Datum], loss: LossCall | None, *, backward: bool) -> ForwardOutput:
        """Score the targets of this rank's data; with `backward` the gradients of the summed loss are added to those
        since the last step. `loss` None: scores alone. Metrics are those of all ranks' data: `loss`. Collective. Raises
        `DataError` on all ranks alike, having changed nothing."""
        formula = _no_loss if loss is None else summed_loss(loss.name, loss.config)
        rows = self._agreed(lambda: datums.rows_of(data, loss, self._limits))
        inputs = LossInputs.of(formula, rows.names)
        with self._phase("agreement on micro-batches"):
            minibatches = self._batcher.minibatches(rows, inputs, 1)
        tally, found = Tally(), [np.zeros(0, np.float32)] * len(data)

        def share(batch: MicroBatch) -> Tensor:
            logprobs_N = self._scores(batch, "none")[0]
            if batch.is_dummy:
                return logprobs_N.sum() * 0.0
            for position, values in zip(batch.rows.tolist(), batching.split_rows(batch, logprobs_N), strict=True):
                found[position] = values
            value, metrics = inputs.call(batch, minibatches[0].totals, {"logprobs": batch.scatter(logprobs_N)})
            for key, metric in metrics.items():
                tally.add(key, metric)
            return value

        for minibatch in minibatches:
            if backward:
                self._accumulate(minibatch.batches, share, defaultdict(float))
                self._has_gradients = True
            else:
                self._forward_alone(minibatch.batches, share)
        with self._phase("metrics of all data"):
            metrics = tally.reduced(self.ranks)
        if loss is not None:
            metrics.setdefault("loss", 0.0)
        return ForwardOutput(datums.shaped(found, data), metrics)

    @property
    def _limits(self) -> datums.Limits:
        lm = self.model.lm
        return datums.Limits(
            self.max_length, lm.get_input_embeddings().num_embeddings, lm.get_output_embeddings().out_features
        )

    @torch.no_grad()
    def _forward_alone(self, batches: Sequence[MicroBatch], share: Callable[[MicroBatch], Tensor]) -> None:
        for batch in batches:
            with self._phase("forward without gradient"):
                share(batch)
        self.engine.free()

    def _agreed(self, make: Callable[[], T]) -> T:
        """Return what `make` returns on this rank. Where it raises `DataError` on any, all ranks do: none is left
        waiting for another."""
        made, failure = None, None
        try:
            made = make()
        except DataError as error:
            failure = str(error)
        with self._phase("agreement on data"):
            failures = [text for text in self.ranks.gather_ranks(failure) if text is not None]
        if failures:
            raise DataError(failures[0])
        assert made is not None
        return made


def _no_loss(logprobs: Tensor, mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return logprobs.sum() * 0.0, {}
