"""A micro-batch's share of the policy's loss, and of what is told of it, from the scores of its tokens.

Legend: B rows of the micro-batch, T response tokens, padded, N response tokens, J candidates of each.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.algorithms.graph.columns import CANDIDATE_LOGPROBS
from penstock.workers.trainer.token_recorder import TokenRecorder
from penstock.workers.trainer.update.batching import MicroBatch
from penstock.workers.trainer.update.minibatches import LossInputs, Minibatch
from penstock.workers.trainer.update.tally import Tally, add_mismatch


@dataclass(frozen=True)
class UpdateParts:
    """The parts of one update that all its micro-batches share."""

    inputs: LossInputs
    tally: Tally
    old_logprobs: list[np.ndarray] | None
    """Log-probabilities before the update, `[T_i]` for each row, where the loss asks for them and weights change before
    its last micro-batch."""
    recorder: TokenRecorder | None


def contribution(
    minibatch: Minibatch, batch: MicroBatch, shared: UpdateParts, is_first: bool, scores: tuple[Tensor, Tensor]
) -> Tensor:
    """Share of the minibatch's loss, `[]` with gradient. `is_first`: weights are still those from before the update.
    `scores`: log-probabilities and entropies of the response tokens, `[N]` each, or the first `[N, 1 + J]`."""
    inputs, tally, old = shared.inputs, shared.tally, shared.old_logprobs
    logprobs_N, entropy_N = scores
    if batch.is_dummy:
        return logprobs_N.sum() * 0.0
    candidates_BTJ = None
    if batch.candidates_NJ is not None:
        candidates_BTJ, logprobs_N = batch.scatter(logprobs_N[:, 1:]), logprobs_N[:, 0]
    logprobs_BT = batch.scatter(logprobs_N)
    old_BT = logprobs_BT.detach()
    if old is not None:
        old_BT = batch.pad([old[position] for position in batch.rows])
    entropy_BT = batch.scatter(entropy_N) if inputs.takes_entropy else None
    available = {"logprobs": logprobs_BT, "entropy": entropy_BT, "old_logprobs": old_BT}
    if candidates_BTJ is not None:
        available[CANDIDATE_LOGPROBS] = candidates_BTJ
    loss, metrics = inputs.call(batch, minibatch.totals, available)
    for name, value in metrics.items():
        tally.add(f"actor/{name}", value)
    num_tokens = max(1.0, minibatch.totals.num_tokens)
    tally.add("actor/entropy", entropy_N.sum() / num_tokens)
    if shared.recorder is not None:
        before_BT = logprobs_BT if is_first else old_BT if old is not None else None
        shared.recorder.add(batch, logprobs_BT, before_BT)
    if is_first and "behavior_logprobs" in batch.columns:
        add_mismatch(tally, logprobs_BT, batch.columns["behavior_logprobs"], batch.mask_BT, num_tokens)
    return loss
