"""A rank of a critic or of a reward model: the trainer of `policy_trainer.py` around a scalar head.

    critic:        values(rows) ─▶ old_values ─▶ … ─▶ update(rows, value_loss)
    reward model:  update(rows, bradley_terry_loss)      later, elsewhere:  scores(rows) ─▶ reward

A loss that takes `values` gets one number a response token, one that takes `scores` one a row, each with gradient.

Legend: B rows of the micro-batch, T response tokens, padded, N response tokens.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.store.data.rows import Rows
from penstock.workers.trainer.models.language_model import ScalarModel, max_length, open_scalar_lm
from penstock.workers.trainer.models.starting_weights import StartingWeights
from penstock.workers.trainer.policy_trainer import PolicyTrainer, UpdateContext
from penstock.workers.trainer.update.batching import MicroBatch
from penstock.workers.trainer.update.minibatches import Minibatch
from penstock.workers.weights.checkpoint_form import HEAD


class ScalarTrainer(PolicyTrainer):
    """Trains a reward model, like `PolicyTrainer`."""

    model: ScalarModel

    def _open(
        self, path: str, dtype: str, attention: str, checkpoint_layers: bool
    ) -> tuple[nn.Module, StartingWeights, int | None]:
        lm, weights = open_scalar_lm(
            path, new=(HEAD,) if self.trainable else (), dtype=dtype, attention=attention,
            checkpoint_layers=checkpoint_layers,
        )  # fmt: skip
        return ScalarModel(lm), weights, max_length(lm)

    def check_scores(self) -> None:
        """Do nothing: `open_scalar_lm` has checked that the head is a linear layer, and nothing follows it."""

    @torch.no_grad()
    def values(self, rows: Rows) -> list[np.ndarray]:
        """Return `[T_i]` float32 for each row: what is expected before each response token. Collective. Raises
        `DataError`."""
        return self._by_token(rows, self._outputs)

    @torch.no_grad()
    def scores(self, rows: Rows) -> np.ndarray:
        """Return `[rows]` float32: the score of each response, read at its last token. Collective. Raises
        `DataError`."""
        results: dict[int, float] = {}
        for batch in self._all_batches(rows):
            scores_B = self._head_outputs(batch, batch.last_B)
            if not batch.is_dummy:
                results |= zip(batch.rows.tolist(), scores_B.cpu().tolist(), strict=True)
        self.engine.free()
        found = self._of_block(results)
        return np.array([found[row] for row in range(len(rows))], np.float32)

    def _outputs(self, batch: MicroBatch) -> Tensor:
        return self._head_outputs(batch, batch.positions_N)

    def _head_outputs(self, batch: MicroBatch, positions_K: Tensor) -> Tensor:
        self.engine.split_over(batch.group_size)
        numbers_K: Tensor = self.engine.forward(batch.input_ids_SL, positions_K, batch.blocks)
        return numbers_K

    def _contribution(self, minibatch: Minibatch, shared: UpdateContext, is_first: bool, batch: MicroBatch) -> Tensor:
        whole = "scores" in shared.inputs.provided
        positions = batch.last_B if whole else batch.positions_N
        numbers = self._head_outputs(batch, positions)
        if batch.is_dummy:
            return numbers.sum() * 0.0
        available: dict[str, Any] = {"scores": numbers} if whole else {"values": batch.scatter(numbers)}
        loss, metrics = shared.inputs.call(batch, minibatch.totals, available)
        for name, value in metrics.items():
            shared.tally.of(batch).add(f"{self.metrics_prefix}/{name}", value)
        return loss


class CriticTrainer(ScalarTrainer):
    """Trains a critic; its metrics are `critic/…`.

    critic = CriticTrainer(config, path)
    critic.values(rows)               # [T_i] for each row
    critic.update(rows, value_loss)   # rows with returns and old_values
    """

    metrics_prefix = "critic"
