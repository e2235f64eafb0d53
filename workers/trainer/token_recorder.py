"""The values of each sampled token in an update, for people to read. Noted on steps whose samples are written.

    trainer_logprobs   the trainer's log-probability before the update: what `mismatch/*` compares with the engine's
    loss_mask          whether the token moves the weights by its log-probability. False: its gradient is exactly 0, as
                       the advantage is 0, the ratio was clipped, or a correction masked it
    advantage          of the token, where not all tokens of a response have the same

Nothing is computed for them: log-probabilities are those of the forward pass, and the backward pass passes by the
gradient of each. They are noted by micro-batch and kept until the next step, and the controller asks for them
(`orchestrator/observability/reporting/sample_log.py`).

Legend: B rows of the micro-batch, T response tokens, padded, N rows of this rank, T_i response tokens of row i.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from penstock.store.data.rows import Rows
from penstock.workers.trainer.step_report import TokenValues
from penstock.workers.trainer.update.batching import MicroBatch, split_rows

ADVANTAGE, PLACES = "token_advantage", "token_places"
"""Columns of the rows of a step whose tokens are noted: of the dataflow, and the place of each sampled token before old
turns were cut."""


class TokenRecorder:
    """Lifecycle: `add` each micro-batch of one update before its backward pass, `values` after the update."""

    def __init__(self) -> None:
        self._logprobs: list[tuple[MicroBatch, Tensor]] = []
        self._moving: list[tuple[MicroBatch, Tensor]] = []

    def add(self, batch: MicroBatch, logprobs_BT: Tensor, before_BT: Tensor | None) -> None:
        """Note a micro-batch. `logprobs_BT`: with gradient, those that the loss is computed of. `before_BT`: those
        before the update, if known."""
        if before_BT is not None:
            self._logprobs.append((batch, before_BT.detach()))
        logprobs_BT.register_hook(lambda gradient_BT: self._moving.append((batch, gradient_BT != 0)))

    def values(
        self, rows: Rows, lengths: Sequence[int], gather: Callable[[Any], list[Any]] = lambda value: [value]
    ) -> TokenValues | None:
        """Values of the update's tokens. `rows`: that were trained; those after as many as there are `lengths` are of
        earlier steps, and left out. `lengths`: tokens of each as it was sampled; where those are more, `rows` have the
        column `PLACES`. `gather`: gathers a value of each rank that has noted some of the rows. None: nothing was
        noted, as the model has no log-probabilities."""
        logprobs, moving = dict[int, np.ndarray](), dict[int, np.ndarray]()
        for own_logprobs, own_moving in gather((_by_row(self._logprobs), _by_row(self._moving))):
            logprobs, moving = logprobs | own_logprobs, moving | own_moving
        if len(rows) and not moving:
            return None
        rows = rows.select(range(len(lengths)))
        places = rows.arrays(PLACES) if PLACES in rows else [np.arange(length) for length in lengths]
        advantages = rows.arrays(ADVANTAGE) if ADVANTAGE in rows else [None] * len(rows)
        known, masks, credits = [], [], []
        for position, length in enumerate(lengths):
            one = logprobs.get(position)
            known.append(None if one is None else _spread(one, places[position], np.full(length, np.nan, np.float32)))
            mask = moving.get(position, np.zeros(len(places[position]), np.float32))
            masks.append(_spread(mask > 0, places[position], np.zeros(length, np.bool_)))
            credit = advantages[position]
            credits.append(None if credit is None else _spread(credit, places[position], np.full(length, np.nan)))
        return TokenValues(np.asarray(rows.row_ids, np.int64), known, masks, credits)


def with_places(rows: Rows) -> Rows:
    """The rows, of which old turns may be cut, with a column of where each token stands; it is cut with the others."""
    return rows.with_column(PLACES, [np.arange(length) for length in rows.lengths("response_ids").tolist()])


def _by_row(noted: Sequence[tuple[MicroBatch, Tensor]]) -> dict[int, np.ndarray]:
    """Arrays of `[T_i]` float32 by the row's position among the update's rows."""
    return {
        position: values
        for batch, values_BT in noted
        for position, values in zip(batch.rows.tolist(), split_rows(batch, values_BT[batch.mask_BT]), strict=True)
    }


def _spread(values: np.ndarray, places: np.ndarray, whole: np.ndarray) -> np.ndarray:
    whole[places] = values
    return whole
