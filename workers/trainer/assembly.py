"""The parts of one rank, put together from its specification. Programs without Ray use the parts as they are.

    assemble_trainer(spec, address) ─▶ TrainerParts: trainer, state for checkpoints, loop over a store
    assemble_scorer(spec, address)  ─▶ ScorerParts: model, loop over a store

All ranks are assembled at the same time, with one address: they meet there.

Where engines and ranks run at the same time on CPUs, the time that a rank takes for a token is then measured by the
threads that it computes with (`seconds_per_token`), before the first step; `orchestrator/cluster/placement/threads.py`
divides the threads.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from penstock.algorithms.graph.columns import ROUTED_EXPERTS, field_of
from penstock.metering.meters import Meters
from penstock.store.data.rows import Rows
from penstock.workers.pictures.processor import PictureProcessor
from penstock.workers.runtime.serving import Phases
from penstock.workers.trainer.datum_trainer import DatumTrainer
from penstock.workers.trainer.memory_checkpoint import MemoryCheckpoint
from penstock.workers.trainer.models.vision import PictureCache, vision_tower
from penstock.workers.trainer.own_models import open_leader, trainers_of
from penstock.workers.trainer.pass_trial import measured_costs
from penstock.workers.trainer.policy_trainer import PolicyTrainer
from penstock.workers.trainer.preparation import Preparation, Replay
from penstock.workers.trainer.rank_spec import RankSpec, ScorerSpec, TrainerSpec
from penstock.workers.trainer.ranks import Ranks
from penstock.workers.trainer.scalar import CriticTrainer, ScalarTrainer
from penstock.workers.trainer.slot_trainer import SlotTrainer, with_slot
from penstock.workers.trainer.step_meter import StepMeter
from penstock.workers.trainer.token_recorder import PLACES
from penstock.workers.trainer.trainer_worker import ScorerWorker, TrainerWorker
from penstock.workers.trainer.training_state import TrainingState
from penstock.workers.trainer.update.sequences import without_old_turns

T = TypeVar("T")
NUM_ROWS, NUM_TOKENS = 8, 127
"""Numbers of rows and of tokens in each for the trial: about a thousand tokens, one micro-batch."""
NUM_TRIES = 3
"""Number of tries, of which the shortest counts: the first one is slower, and so is one that another process has
disturbed."""
FORWARDS = 3
"""Cost of an update in forward passes: a backward pass has twice the products of a forward one."""


@dataclass(frozen=True)
class TrainerParts:
    """The parts of a rank that trains."""

    trainer: PolicyTrainer
    state: TrainingState
    """The state of the trainer, or of those of several policies, and of its critic, if it has one."""
    memory_checkpoint: MemoryCheckpoint | None
    """The copy of the state in the node's memory after each update; None where that is off."""
    worker: TrainerWorker

    def take_device(self) -> None:
        """Bring everything back to the device that this rank shares with an engine, unless it has stayed there."""
        for trainer in self.state.trainers.values():
            if not trainer.config.stays_on_device:
                trainer.take_device()

    def leave_device(self) -> None:
        """Leave the device, once a checkpoint has copied what it needs from there. What the copy in the node's memory
        has of the present state is not copied again. States stay where there is room for both
        (`trainer.stay_on_device`)."""
        if self.trainer.config.stays_on_device:
            for trainer in self.state.trainers.values():
                trainer.free_device()
            return
        kept = self.memory_checkpoint.kept() if self.memory_checkpoint is not None else {}
        for name, trainer in self.state.trainers.items():
            own = {piece.removeprefix(f"{name}/"): kept[piece] for piece in kept if piece.startswith(f"{name}/")}
            trainer.leave_device(own)


@dataclass(frozen=True)
class ScorerParts:
    """The parts of a rank that only computes."""

    trainer: PolicyTrainer
    worker: ScorerWorker
    scorer: "OffloadableScorer"


class OffloadableScorer:
    """A scorer on a device that it shares with ranks and engines: it leaves the device on demand, unless it computes,
    and comes back by itself when it has to compute. So no rank of several waits for another one that is offloaded."""

    def __init__(self, trainer: PolicyTrainer) -> None:
        self._trainer = trainer
        self._computing = threading.Lock()
        self._is_offloaded = False

    def on_device(self, compute: Callable[[Rows], T]) -> Callable[[Rows], T]:
        """The function, for which the scorer comes back to the device."""

        def computed(rows: Rows) -> T:
            with self._computing:
                if self._is_offloaded:
                    self._trainer.take_device()
                    self._is_offloaded = False
                return compute(rows)

        return computed

    def leave_device(self) -> None:
        """Leave the device. Does nothing while it computes."""
        if self._computing.acquire(blocking=False):
            try:
                self._trainer.leave_device()
                self._is_offloaded = True
            finally:
                self._computing.release()


def assemble_trainer(
    spec: TrainerSpec, address: str | None, phases: Phases | None = None, meters: Meters | None = None
) -> TrainerParts:
    """Assemble a rank that trains. `address`: where the ranks meet (host:port on rank 0's node); one rank alone needs
    none. `phases`, `meters`: where it notes what it does, and how much. Collective. Raises `ModelError`,
    `ConfigError`."""
    trainer = _policy_trainer(spec, address)
    critic = _critic(spec, address)
    ranks = trainer.all_ranks
    replay = None
    if spec.config.replay.share:
        place = ranks.data_rank, ranks.num_data_ranks
        replay = Replay(spec.config.replay, spec.max_staleness, ranks.gather, *place)
    preparation = Preparation(spec.in_trainer, spec.columns, ranks.gather, critic, replay, is_saved=spec.is_saved)
    policies = trainers_of(trainer)
    trainers = policies | ({"critic": critic} if critic is not None else {})
    for one in trainers.values():
        one.num_epochs = spec.epochs_per_batch
    for one in policies.values():
        one.keeps_caches = spec.keeps_caches
    state = TrainingState(trainers, spec.checkpoint_timeout_s, preparation)
    memory_checkpoint = None
    if spec.memory_checkpoint_root is not None:
        memory_checkpoint = MemoryCheckpoint(state, trainer, spec.memory_checkpoint_root, is_saved=spec.is_saved)
    within = memory_checkpoint if not spec.keeps_beside else None
    if trainer.ranks.block is not None and spec.max_staleness > 0 and spec.slot_rank is None:
        costs = measured_costs(trainer)
        for one in trainers.values():
            one.split_by(costs)
    size = trainer.size if len({one.size for one in policies.values()}) == 1 else None
    meter = StepMeter(meters or Meters(), size, ranks.num_peers, ranks.device, spec.epochs_per_batch)
    meter.begin()
    worker = TrainerWorker(
        trainer,
        spec.policies,
        ranks,
        preparation=preparation,
        checkpoint=within.save if within is not None else None,
        phases=phases,
        without_old=_without_old(spec),
        note=meter.note,
    )
    worker.probe_temperature = spec.temperature if spec.probes and ranks.rank == 0 else None
    worker.hash_of_weights = None if spec.publishes else trainer.hash_of_weights
    worker.every = {policy.name: spec.config.every(policy.name) for policy in spec.policies}
    if spec.config.policy_ranks:
        worker.own_ranks = {name: one.ranks for name, one in policies.items()}
    worker.after_step = spec.after_step
    return TrainerParts(trainer, state, memory_checkpoint, worker)


def assemble_scorer(spec: ScorerSpec, address: str | None, phases: Phases | None = None) -> ScorerParts:
    """Assemble a rank that only computes; arguments and errors as for `assemble_trainer`."""
    options = _options(spec) | {"rows_alone": spec.rows_alone, "trainable": False}
    trainer = _trainer_class(spec)(spec.config, spec.model_path, _ranks(spec, address), **options)
    _attach_vision(trainer, spec)
    trainer.check_scores()
    scorer = OffloadableScorer(trainer)
    compute = scorer.on_device(partial(_scored, trainer, spec))
    worker = ScorerWorker(compute, spec.stage, trainer.ranks, phases=phases)
    return ScorerParts(trainer, worker, scorer)


def _scored(trainer: PolicyTrainer, spec: ScorerSpec, rows: Rows) -> dict[str, Any]:
    """The values that a scorer writes for rows, by column: zeros for rows that another model scores. Collective."""
    if spec.rows_of is None:
        return _scored_all(trainer, spec, rows)
    name, value = spec.rows_of
    tasks = rows.strings("task") if len(rows) else []
    own = [row for row, task in enumerate(tasks) if field_of(task, name, "algorithm.teacher_by") == value]
    lengths = rows.lengths("response_ids").tolist() if len(rows) else []
    found: dict[str, Any] = {}
    for number, (column, of_own) in enumerate(_scored_all(trainer, spec, rows.select(own)).items()):
        each, dtype = spec.candidates if number else 1, np.int32 if number == 1 else np.float32
        found[column] = [np.zeros(each * length, dtype) for length in lengths]
        for row, values in zip(own, of_own, strict=True):
            found[column][row] = values
    return found


def _scored_all(trainer: PolicyTrainer, spec: ScorerSpec, rows: Rows) -> dict[str, Any]:
    if spec.prompt in rows and spec.prompt != "prompt_ids":
        rows = rows.with_column("prompt_ids", rows.arrays(spec.prompt))
    if spec.candidates:
        return dict(zip(spec.columns, trainer.candidates(rows, spec.candidates), strict=True))
    (column,) = spec.columns
    return {column: trainer.scores(rows) if isinstance(trainer, ScalarTrainer) else trainer.logprobs(rows)}


def seconds_per_token(trainer: PolicyTrainer, counts: Sequence[int]) -> dict[int, float]:
    """Seconds of an update for a token, by number of threads. Collective; changes nothing that is trained."""
    rows = trial_rows(trainer.max_length or NUM_TOKENS + 1)
    num_tokens = int(rows.lengths("response_ids").sum()) + len(rows)
    found = {}
    for count in counts:
        use_threads(count)
        found[count] = FORWARDS * min(_forward_seconds(trainer, rows) for _ in range(NUM_TRIES)) / num_tokens
    return found


def use_threads(num_threads: int) -> None:
    """Have the calling thread compute with this number of threads; 0 changes nothing."""
    if num_threads:
        torch.set_num_threads(num_threads)


def _without_old(spec: TrainerSpec) -> Callable[[Rows, int], Rows] | None:
    """A function that returns rows for a version without turns that are too old for it; None where there are no such
    turns."""
    if not spec.leaves_out_old:
        return None
    tokens = frozenset({PLACES, *(name for name, column in spec.columns.items() if column.shape == "token")})
    return lambda rows, version: without_old_turns(rows, version - spec.max_staleness, tokens)


def _policy_trainer(spec: TrainerSpec, address: str | None) -> PolicyTrainer:
    """The trainer of the policy, or of several."""
    if spec.own_models:
        return open_leader(spec.config, spec.own_models, lambda: _ranks(spec, address), **_options(spec))
    config = with_slot(spec.config, spec.slot_rank) if spec.slot_rank is not None else spec.config
    kind = SlotTrainer if spec.slot_rank is not None else _trainer_class(spec, DatumTrainer)
    trainer = kind(config, spec.model_path, _ranks(spec, address), **_options(spec))
    try:
        if ROUTED_EXPERTS in spec.columns:
            trainer.replay_experts()
        _attach_vision(trainer, spec)
        trainer.check_scores()
        trainer.try_export()
    except BaseException:
        trainer.close()
        raise
    return trainer


def _critic(spec: TrainerSpec, address: str | None) -> CriticTrainer | None:
    """The critic, where a stage asks for one."""
    if not any(stage.kind in ("values", "critic") for stage in spec.in_trainer):
        return None
    config = replace(spec.config, optimizer=spec.config.critic_optimizer, policies={})
    critic = CriticTrainer(config, spec.model_path, _ranks(spec, address), **_options(spec))
    _attach_vision(critic, spec)
    return critic


def _trainer_class(spec: RankSpec, policy: type[PolicyTrainer] = PolicyTrainer) -> type[PolicyTrainer]:
    return ScalarTrainer if spec.head == "scores" else policy


def _ranks(spec: RankSpec, address: str | None) -> Ranks:
    """This rank among the others, for one trainer. Collective."""
    use_threads(spec.num_threads)
    return Ranks.join(spec.config, spec.rank, spec.num_ranks, address)


def _options(spec: RankSpec) -> dict[str, Any]:
    """Arguments that every trainer of the rank gets."""
    return {"temperature": spec.temperature, "attention": spec.attention, "engine_dtype": spec.engine_dtype}


def _forward_seconds(trainer: PolicyTrainer, rows: Rows) -> float:
    started = time.perf_counter()
    trainer.logprobs(rows)
    return time.perf_counter() - started


def trial_rows(max_length: int) -> Rows:
    """Rows for the trial. They consist of token 0, which every model has."""
    response = [0] * min(NUM_TOKENS, max_length - 1)
    return Rows.from_lists({"prompt_ids": [[0]] * NUM_ROWS, "response_ids": [response] * NUM_ROWS})


def _attach_vision(trainer: PolicyTrainer | ScalarTrainer, spec: RankSpec) -> None:
    """Have a trainer of a vision model read pictures. Raises `ConfigError`, also for a model of text in a run with
    pictures."""
    if spec.picture_digest is not None or vision_tower(trainer.model.lm):
        processor = PictureProcessor.of(trainer.model_path, spec.picture_digest)
        trainer.attach_vision(PictureCache(processor, trainer.model.lm.config))
