"""One rank of a trainer as a run wants it: trainer, critic, checkpoints, transport, and the store's loop around them.
Called by `actor.py`, method by method.

All ranks of a group get the same calls in the same order; torch.distributed does the rest between them. A trainer that
updates is driven step by step by the controller; one that only computes log-probabilities pulls its rows by itself
(`run`).
"""

import socket
from typing import Any, cast

import numpy as np
import ray

from penstock.conf.weights import WeightsConfig
from penstock.store.client.sync import SyncStoreClient
from penstock.store.data.rows import Rows
from penstock.workers.files import SavedFile
from penstock.workers.protocols import Loss, Publication, UpdateReport
from penstock.workers.trainer.checkpointing.training_state import TrainingState
from penstock.workers.trainer.preparation import Preparation
from penstock.workers.trainer.report import StepReport
from penstock.workers.trainer.scalar import ScalarTrainer
from penstock.workers.trainer.spec import TrainerSpec
from penstock.workers.trainer.trainer import PolicyTrainer
from penstock.workers.trainer.worker import ScorerWorker, TrainerWorker
from penstock.workers.weights.trainer_side import TrainerSide, make_transport
from penstock.workers.weights.transport import Engines, Transport, Update


class TrainerRank:
    """Lifecycle: `address` on rank 0, `start` on all with it, then `step`/`publish` or `run`, then `close`."""

    def __init__(self, spec: TrainerSpec, store: Any | None) -> None:
        self._spec = spec
        self._store = SyncStoreClient(store) if store is not None else None
        self._trainer: PolicyTrainer | None = None
        self._worker: TrainerWorker | ScorerWorker | None = None
        self._state: TrainingState | None = None
        self._transport: Transport | None = None

    def address(self) -> str:
        """`host:port` where this rank, the first, can listen for the others."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def start(self, address: str) -> None:
        """Load the model and join the other ranks. Collective."""
        spec = self._spec
        trainer = self._trainer = self._make(spec.head == "scores", address)
        critic = None
        if spec.trains and any(stage.kind in ("values", "critic") for stage in spec.in_trainer):
            options = {"metrics_prefix": "critic", "optimizer": spec.config.critic_optimizer}
            critic = cast(ScalarTrainer, self._make(True, address, **options))
        group = trainer.group
        preparation = Preparation(spec.in_trainer, spec.columns, group.gather, critic, is_saved=spec.is_saved)
        if spec.trains:
            trainers = {"policy": trainer} | ({"critic": critic} if critic is not None else {})
            self._state = TrainingState(trainers, spec.checkpoint_timeout_s, preparation)
        if self._store is None:
            return
        if spec.loss is not None:
            self._worker = TrainerWorker(
                trainer,
                self._store,
                group.data_rank,
                group.num_data_ranks,
                spec.loss,
                preparation=preparation,
                speaks_for_rows=group.speaks_for_rows,
            )
        else:
            compute = trainer.scores if isinstance(trainer, ScalarTrainer) else trainer.logprobs
            self._worker = ScorerWorker(
                compute,
                self._store,
                spec.stage,
                spec.column,
                group.data_rank,
                group.num_data_ranks,
                speaks_for_rows=group.speaks_for_rows,
            )

    def _make(self, is_scalar: bool, address: str, **options: Any) -> PolicyTrainer:
        spec = self._spec
        return (ScalarTrainer if is_scalar else PolicyTrainer)(
            spec.config,
            spec.model_path,
            temperature=spec.temperature,
            rank=spec.rank,
            num_ranks=spec.num_ranks,
            address=address,
            num_threads=spec.num_threads,
            attention=spec.attention,
            trainable=spec.trains,
            engine_dtype=spec.engine_dtype,
            **options,
        )

    @property
    def _ready(self) -> PolicyTrainer:
        assert self._trainer is not None
        return self._trainer

    def step(self, round: int) -> StepReport | None:
        """Update number `round` on the store's next batch. None: the store has closed. Collective."""
        assert isinstance(self._worker, TrainerWorker)
        return self._worker.step(round)

    def run(self) -> None:
        """Serve a log-probability stage until the store closes. Collective."""
        assert isinstance(self._worker, ScorerWorker)
        self._worker.run()

    def stats(self) -> dict[str, float]:
        return self._worker.stats() if isinstance(self._worker, ScorerWorker) else {}

    def update(self, rows: Rows, loss: Loss) -> UpdateReport:
        """The imperative API: one update on these rows of this rank. Collective."""
        return self._ready.update(rows, loss)

    def logprobs(self, rows: Rows) -> list[np.ndarray]:
        return self._ready.logprobs(rows)

    def begin_saving(self, directory: str) -> bool:
        """Take the state of now; it is copied and written while training goes on. False: an earlier one is still being
        written. Collective. Raises `DataflowError` for a state that no checkpoint can keep."""
        assert self._state is not None
        return self._state.begin(directory)

    def finish_saving(self) -> list[SavedFile]:
        """Wait for what `begin_saving` started; may run beside `step`. Raises `CheckpointError`,
        `DeadlineExceeded`."""
        assert self._state is not None
        return self._state.finish()

    def load(self, directory: str, files: list[SavedFile]) -> None:
        """Go on from a checkpoint. Collective. Raises `CheckpointError`."""
        assert self._state is not None
        self._state.load(directory, files)

    def publish(self, directory: str, version: int) -> Publication:
        return self._ready.publish(directory, version)

    def connect(self, name: str, engines: Engines, address: str, directory: str, config: WeightsConfig) -> None:
        """Meet the engines, where weights are streamed to them. `address`: where they can meet; `directory`: root of
        publications. Collective."""
        side = TrainerSide.of(self._ready)
        self._transport = make_transport(
            name, side, directory=directory, bucket_mib=config.bucket_mib, timeout_s=self._spec.update_timeout_s
        )
        self._transport.connect(engines, address)

    def prepare(self, version: int) -> Update:
        """What the engines are to be told of a version that `send` brings. Collective."""
        assert self._transport is not None
        return self._transport.prepare(version)

    def send(self, version: int) -> None:
        """Stream a version, while the engines' `update` receives it. Collective."""
        assert self._transport is not None
        self._transport.send(version)

    def take_device(self) -> None:
        """Bring everything back to the device that it shares with an engine. Collective."""
        self._ready.take_device()

    def leave_device(self) -> None:
        """Make room on the device that it shares with an engine. Collective."""
        self._ready.leave_device()

    def export(self, directory: str) -> None:
        """Write a HF model directory. Collective."""
        self._ready.export(directory)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._trainer is not None:
            self._trainer.close()
