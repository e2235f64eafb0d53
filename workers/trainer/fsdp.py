"""One rank of the trainer: FSDP2, float32 master weights, AdamW. Log-probabilities, updates, publications.

    update(rows, loss):  rows ─▶ minibatches of whole groups ─▶ micro-batches ─▶ forward, loss, backward ─▶ clip, AdamW
    publish(root, v):    each rank writes its shard into shared memory; rank 0 seals

How rows are cut into micro-batches and spread over ranks changes no result but for rounding: losses are divided by totals over all
ranks, gradients are sums. Driven by `worker.py` inside an actor, or directly by a straight-line loop.

Legend: B rows of the micro-batch, T response tokens, padded, N response tokens.
"""

import math
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from penstock.algorithms.aggregation import BatchTotals
from penstock.conf.trainer import TrainerConfig
from penstock.store.rows import Rows
from penstock.workers.protocols import Loss, Publication, UpdateReport
from penstock.workers.trainer import batching, writing
from penstock.workers.trainer.batching import MicroBatch
from penstock.workers.trainer.loss_inputs import LossInputs
from penstock.workers.trainer.mismatch import Mismatch
from penstock.workers.trainer.policy_model import PolicyModel, load_causal_lm, max_length
from penstock.workers.trainer.schedule import learning_rate
from penstock.workers.trainer.sharding import ProcessGroup, ShardedPolicy


@dataclass
class _Step:
    """What one optimizer step trains on: this rank's micro-batches (as many as on any rank) and the totals over all ranks."""

    batches: list[MicroBatch]
    totals: BatchTotals


@dataclass
class _Tally:
    """Sums over the micro-batches of one optimizer step on this rank."""

    metrics: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    entropy: float = 0.0


class FsdpTrainer:
    """A rank among `num_ranks`, all of which make the same calls in the same order, each with its own rows (maybe none).

        trainer = FsdpTrainer(TrainerConfig(), "path/to/model", temperature=1.0)
        report = trainer.update(rows, partial(ppo_clip_loss, clip_high=0.28))
        publication = trainer.publish("/dev/shm/run", version=1)
        trainer.close()

    `trainable=False`: a reference; it has no optimizer and `update` is an error.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model_path: str,
        *,
        temperature: float = 1.0,
        rank: int = 0,
        num_ranks: int = 1,
        address: str | None = None,
        num_threads: int = 0,
        attention: str = "sdpa",
        trainable: bool = True,
        engine_dtype: str = "float32",
    ) -> None:
        """Load the model and join the other ranks. Collective.

        `temperature`: of the sampling distribution. `address`: host:port where ranks meet; one rank needs none. `num_threads`: of
        torch; 0 leaves it. `engine_dtype`: of publications. Raises `ModelError`, `ConfigError`.
        """
        if num_threads:
            torch.set_num_threads(num_threads)
        self.config = config
        self.model_path = model_path
        self.engine_dtype = engine_dtype
        self.step = 0
        """Updates so far; the schedule's clock."""
        self.group = ProcessGroup.join(rank, num_ranks, address, config.collective_timeout_s, config.num_gpus_per_rank > 0)
        lm = load_causal_lm(
            model_path,
            dtype="float32" if trainable else config.dtype,
            attention=attention,
            checkpoint_layers=trainable and config.activation_checkpointing,
        )
        self.max_length = max_length(lm)
        self.model = PolicyModel(lm, temperature=temperature, chunk_tokens=config.logprob_chunk_tokens)
        self.model.requires_grad_(trainable)
        self.policy = ShardedPolicy(self.model, self.group, config.dtype)
        self.optimizer = self._build_optimizer() if trainable else None

    def _build_optimizer(self) -> torch.optim.AdamW:
        options = self.config.optimizer
        return torch.optim.AdamW(
            self.model.parameters(),
            lr=options.lr,
            betas=(options.betas[0], options.betas[1]),
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )

    def set_step(self, step: int) -> None:
        """Updates made before this one's start, when resuming: where the learning-rate schedule goes on."""
        self.step = step

    @torch.no_grad()
    def logprobs(self, rows: Rows) -> list[np.ndarray]:
        """`[T_i]` float32 for each row: log-probabilities of the response tokens at the sampling temperature. Collective.

        Raises `DataError` for a row that does not fit the model.
        """
        batches = self._microbatches(rows, np.arange(len(rows)), ())
        counts = self.group.gather(len(batches))
        results: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
        for batch in batching.pad_plan(batches, max(counts)):
            device_batch = batch.to(self.group.device)
            values_N, _ = self.model(device_batch.input_ids_BL, device_batch.positions_N, device_batch.targets_N)
            if not batch.is_dummy:
                for position, values in zip(batch.rows.tolist(), batching.split_rows(batch, values_N), strict=True):
                    results[position] = values
        self.policy.free()
        return results

    def update(self, rows: Rows, loss: Loss) -> UpdateReport:
        """One policy update, `num_minibatches` optimizer steps, over the union of all ranks' rows. Collective.

        `rows`: `prompt_ids`, `response_ids`, and the columns that `loss` names. Metrics: the loss's own as `actor/<name>` (means over
        minibatches), `actor/entropy|grad_norm|lr|skipped_nonfinite`, and `mismatch/…` when rows have `behavior_logprobs`. A step whose
        gradient norm is not finite is left out, counted, and leaves weights and optimizer as they were.
        Raises `DataError`, `DataflowError`.
        """
        if self.optimizer is None:
            raise RuntimeError("this trainer was made with trainable=False; it has no optimizer.")
        started = time.perf_counter()
        seconds: dict[str, float] = defaultdict(float)
        inputs = LossInputs.of(loss, rows.names)
        columns = inputs.columns
        if "behavior_logprobs" in rows and "behavior_logprobs" not in columns:
            columns = (*columns, "behavior_logprobs")
        steps = self._plan_steps(rows, columns)
        rate = learning_rate(self.config.optimizer, self.step, self.config.max_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        old = self.logprobs(rows) if inputs.takes_old_logprobs and len(steps) > 1 else None
        seconds["plan"] = time.perf_counter() - started

        mismatch = Mismatch()
        sums: dict[str, float] = defaultdict(float)
        for number, step in enumerate(steps):
            tally = self._accumulate(step, inputs, old, mismatch if number == 0 else None, seconds)
            sums["entropy"] += tally.entropy
            for name, value in tally.metrics.items():
                sums[name] += value
            norm, skipped = self._optimizer_step(seconds)
            sums["grad_norm"] += norm / self.group.num_ranks
            sums["skipped_nonfinite"] += skipped * len(steps) / self.group.num_ranks
        self.step += 1
        metrics = self._reduced(sums, len(steps)) | mismatch.reduced(self.group) | {"actor/lr": rate}
        lengths = rows.lengths("response_ids") if len(rows) else np.zeros(0, np.int64)
        seconds["update"] = time.perf_counter() - started
        return UpdateReport(metrics, len(rows), int(lengths.sum()), dict(seconds))
