"""The rows of a step that engines score again, to see that they compute what the trainer computes.

With `max_staleness > 0` the tokens of a batch were sampled under older weights, so that they say how far the policy has
moved, and hide an engine that is slightly wrong. After step v + 1 is made and before engines load its version, they
still have version v, under which the trainer has just computed the log-probabilities of the step's first rows. A few of
these rows go to each engine (`orchestrator/control/engine_probe.py`); they cost the trainer no pass of its own.

Legend: B rows of the micro-batch, T response tokens, padded, P tokens before a response.
"""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from penstock.store.data.rows import Rows
from penstock.workers.probing import ProbeRow
from penstock.workers.trainer.token_recorder import TokenRecorder
from penstock.workers.trainer.update.batching import MicroBatch
from penstock.workers.trainer.update.sequences import SPANS, TEMPERATURES, context_column

SHARE = 0.01
"""Largest share of a step's tokens that are scored again, unless a single row is more."""


class ProbeRecorder:
    """Keeps the log-probabilities of the first rows of an update, and passes micro-batches on to a `TokenRecorder`."""

    def __init__(self, rows: Rows, tokens: TokenRecorder | None = None, temperature: float = 1.0) -> None:
        """`rows`: those of this rank. `temperature`: that they were sampled at, where they have none of their own."""
        self._tokens, self._temperature = tokens, temperature
        self._lengths = rows.lengths(context_column(rows)) + rows.lengths("response_ids")
        self._budget = SHARE * float(self._lengths.sum())
        self._known: list[tuple[int, Tensor]] = []

    def add(self, batch: MicroBatch, logprobs_BT: Tensor, before_BT: Tensor | None) -> None:
        """Note a micro-batch; arguments as of `TokenRecorder.add`."""
        if self._tokens is not None:
            self._tokens.add(batch, logprobs_BT, before_BT)
        if before_BT is None:
            return
        for row, position in enumerate(batch.rows.tolist()):
            if position >= len(self._lengths):  # of an earlier step
                continue
            self._budget -= float(self._lengths[position])
            if self._known and self._budget < 0:
                return
            self._known.append((position, before_BT.detach()[row][batch.mask_BT[row]]))

    def rows(self, rows: Rows) -> tuple[ProbeRow, ...]:
        """The rows that were noted. `rows`: that were trained."""
        return tuple(self._made(rows))

    def _made(self, rows: Rows) -> Iterator[ProbeRow]:
        contexts, responses = rows.arrays(context_column(rows)), rows.arrays("response_ids")
        spans = rows.arrays(SPANS) if SPANS in rows else None
        temperatures = rows.arrays(TEMPERATURES) if TEMPERATURES in rows else None
        for position, logprobs in self._known:
            context, response = contexts[position], responses[position]
            if spans is not None:  # the first turn alone: what follows it was read between turns
                _, num_read, num_sampled = spans[position][:3].tolist()
                context, response = context[:num_read], response[:num_sampled]
            at = {self._temperature} if temperatures is None else {*temperatures[position][: len(response)].tolist()}
            if len(at) != 1 or 0 in at:
                continue
            known = np.asarray(logprobs[: len(response)].cpu(), np.float32)
            yield ProbeRow(np.concatenate([context, response]).astype(np.int32), known, at.pop())
