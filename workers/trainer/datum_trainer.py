"""A rank of a trainer that takes data with targets of their own and a summed loss (`workers/protocols.py`) beside rows.

    Datum(token_ids [T], targets [T, K], columns)  ─▶  prompt_ids [T], target_ids [T * K], a column [T * K] for each
    rows ─▶ micro-batches ─▶ forward, loss, backward ─▶ log-probabilities of each datum, metrics of all

Micro-batches are cut for a call alone: what it returns and adds to the gradients depends on nothing but its data and
the weights.

Legend: T tokens that the model reads for a datum, K targets at each of them, N targets of a micro-batch.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.algorithms.losses.summed import CLIP_HIGH, CLIP_LOW, INPUTS, check_inputs, inputs_of, summed_loss
from penstock.conf.errors import DataError
from penstock.store.data.rows import Rows
from penstock.workers.pictures.prompt_pictures import NO_PICTURES
from penstock.workers.protocols import Datum, ForwardOutput, LossCall
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.update import batching
from penstock.workers.trainer.update.batching import MicroBatch
from penstock.workers.trainer.update.minibatches import LossSignature
from penstock.workers.trainer.update.sequences import TARGETS
from penstock.workers.trainer.update.tally import Tally

ABSENT = {"weights": 1.0, "clip_low_threshold": CLIP_LOW, "clip_high_threshold": CLIP_HIGH}
"""Numbers that stand for an input that a datum lacks and another has; bounds that the loss's config sets come first."""
T = TypeVar("T")


@dataclass(frozen=True)
class ModelLimits:
    """The model's bounds."""

    max_length: int | None
    """Tokens of the longest sequence; None: unbounded."""
    num_inputs: int
    """Number of tokens that it reads."""
    num_targets: int
    """Number of tokens that it predicts."""


class DatumTrainer(PolicyTrainer):
    """Lifecycle: that of a `PolicyTrainer`."""

    def forward_data(self, data: Sequence[Datum], loss: LossCall | None, *, backward: bool) -> ForwardOutput:
        """Score the targets of this rank's data; with `backward` the gradients of the summed loss are added to those
        since the last step. `loss` None: scores alone. Metrics are those of all ranks' data: `loss`. Collective. Raises
        `DataError` on all ranks alike, having changed nothing."""
        formula = _no_loss if loss is None else summed_loss(loss.name, loss.config)
        rows = self._fail_together(lambda: rows_of(data, loss, self._limits))
        inputs = LossSignature.of(formula, rows.names)
        with self._phase("agreement on micro-batches"):
            minibatches = self._batcher.minibatches(rows, inputs, 1)
        tally, found = Tally(), dict[int, np.ndarray]()

        def share(batch: MicroBatch) -> Tensor:
            logprobs_N = self._scores(batch, "none")[0]
            if batch.is_dummy:
                return logprobs_N.sum() * 0.0
            found.update(zip(batch.rows.tolist(), batching.split_rows(batch, logprobs_N), strict=True))
            value, metrics = inputs.call(batch, minibatches[0].totals, {"logprobs": batch.scatter(logprobs_N)})
            for key, metric in metrics.items():
                tally.of(batch).add(key, metric)
            return value

        for minibatch in minibatches:
            if backward:
                self._accumulate(minibatch.batches, share, defaultdict(float))
                self._has_gradients = True
            else:
                self._forward_alone(minibatch.batches, share)
        with self._phase("metrics of all data"):
            metrics, of_data = tally.reduced(self.ranks), self._of_block(found)
        if loss is not None:
            metrics.setdefault("loss", 0.0)
        return ForwardOutput(shaped([of_data[number] for number in range(len(data))], data), metrics)

    @property
    def _limits(self) -> ModelLimits:
        lm = self.model.lm
        return ModelLimits(
            self.max_length, lm.get_input_embeddings().num_embeddings, lm.get_output_embeddings().out_features
        )

    @torch.no_grad()
    def _forward_alone(self, batches: Sequence[MicroBatch], share: Callable[[MicroBatch], Tensor]) -> None:
        for batch in batches:
            with self._phase("forward without gradient"):
                share(batch)
        self.engine.free()

    def _fail_together(self, make: Callable[[], T]) -> T:
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


def rows_of(data: Sequence[Datum], loss: LossCall | None, limits: ModelLimits) -> Rows:
    """Rows of the data, in their order, each a group of its own: what `collate` and a summed loss read. `loss` None:
    inputs are not looked at. Raises `DataError` for a datum that does not fit the model or the loss."""
    for number, datum in enumerate(data):
        _check(number, datum, loss, limits)
    columns: dict[str, list[Any]] = {
        "prompt_ids": [datum.token_ids for datum in data],
        "response_ids": [np.zeros(0, np.int32)] * len(data),
        TARGETS: [np.asarray(datum.targets, np.int64).reshape(-1) for datum in data],
    }
    needed = inputs_of(loss.name)[0] if loss is not None else []  # of a rank without data, too
    given = [name for datum in data for name in datum.columns] if loss is not None else []
    names = dict.fromkeys([*needed, *given])
    absent = ABSENT | (dict(loss.config) if loss is not None else {})
    for name in names:
        columns[INPUTS.get(name, name)] = [
            np.asarray(datum.columns[name], np.float32).reshape(-1)
            if name in datum.columns
            else np.full(datum.targets.size, absent[name], np.float32)
            for datum in data
        ]
    if any(datum.pictures is not None for datum in data):
        seen = [(datum.pictures or NO_PICTURES).columns() for datum in data]
        columns |= {name: [one[name] for one in seen] for name in NO_PICTURES.columns()}
    return Rows.from_lists(columns)


def shaped(values: Sequence[np.ndarray], data: Sequence[Datum]) -> list[np.ndarray]:
    """One float32 array for each datum, of the shape of its targets. `values`: `[T * K]` of each row of `rows_of`."""
    return [array.reshape(datum.targets.shape) for array, datum in zip(values, data, strict=True)]


def _check(number: int, datum: Datum, loss: LossCall | None, limits: ModelLimits) -> None:
    tokens, targets = datum.token_ids, datum.targets
    if tokens.ndim != 1 or not len(tokens):
        raise DataError(f"datum {number}: token ids of shape {list(tokens.shape)}. Give at least one, in one dim.")
    if limits.max_length is not None and len(tokens) > limits.max_length:
        raise DataError(
            f"datum {number} has {len(tokens)} tokens, more than the model's {limits.max_length} positions. Cut it."
        )
    if targets.ndim not in (1, 2) or len(targets) != len(tokens) or not targets.size:
        raise DataError(
            f"datum {number} has targets of shape {list(targets.shape)} for {len(tokens)} tokens. Give one, or as many "
            "as another, after each token: [tokens] or [tokens, K]."
        )
    for what, ids, count in (("token ids", tokens, limits.num_inputs), ("targets", targets, limits.num_targets)):
        if ids.min() < 0 or ids.max() >= count:
            raise DataError(
                f"datum {number} has {what} from {ids.min()} to {ids.max()}: the model has 0 to {count - 1}."
            )
    if loss is None:
        return
    try:
        check_inputs(loss.name, datum.columns)
    except DataError as error:
        raise DataError(f"datum {number}: {error}") from None
    for name, values in datum.columns.items():
        if values.shape != targets.shape:
            raise DataError(
                f"datum {number}: input {name!r} has shape {list(values.shape)}, and targets {list(targets.shape)}. "
                "Give one number for each target."
            )
        if not np.isfinite(values).all():
            raise DataError(f"datum {number}: input {name!r} has numbers that are not finite.")
