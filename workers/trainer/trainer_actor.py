"""`Trainer-<model>-<rank>` and `Scorer-<stage>-<rank>`: the Ray shells around the parts of one rank, made by
`assembly.py`.

    Trainer   is driven:  step ─▶ worker   begin_saving ─▶ state   begin_publishing ─▶ trainer   send ─▶ transport
    Scorer    serves:     run ─▶ worker, until the store closes

All ranks of a model get the same calls in the same order; torch.distributed does the rest between them. What is called
collective returns only when every rank has been called. `progress` is answered by another thread meanwhile.

Light to import: the process that starts a run imports these classes; torch and transformers are imported when an actor
is made.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import ray

from penstock.conf.errors import NotStarted
from penstock.conf.weights import SYNC_PHASES, WeightsConfig
from penstock.metering.ray_export import exported
from penstock.network.host import free_address
from penstock.store.client.sync import SyncStoreClient
from penstock.store.data.rows import Rows
from penstock.store.epoch import Epoch
from penstock.workers.protocols import (
    AdamParams,
    AdapterSpec,
    AdapterState,
    Datum,
    ForwardOutput,
    Loss,
    LossCall,
    Publication,
    UpdateReport,
)
from penstock.workers.runtime.builds import check_torch_build, hide_gpus
from penstock.workers.runtime.numerics import numerics
from penstock.workers.runtime.processes import (
    ProcessId,
    keep_compiled,
    prepare_for_torch,
    register,
    use_expandable_segments,
)
from penstock.workers.runtime.serving import (
    EXPORTING,
    IDLE,
    KEEPING,
    PUBLISHING,
    RESUMING,
    SAVING,
    SERVING,
    WAITING,
    Phases,
    Progress,
)
from penstock.workers.runtime.url_files import SavedFile
from penstock.workers.trainer.collective_errors import recorder_environment
from penstock.workers.trainer.rank_spec import RankSpec, ScorerSpec, TrainerSpec
from penstock.workers.trainer.step_report import StepReport, TokenValues
from penstock.workers.weights.engine_calls import ReceivingEngines, StreamedVersion

if TYPE_CHECKING:
    from penstock.workers.trainer.assembly import ScorerParts, TrainerParts
    from penstock.workers.trainer.ranks import Meeting, Ranks
    from penstock.workers.trainer.slot_trainer import SlotTrainer
    from penstock.workers.weights.chain.plan import ChunkPlan
    from penstock.workers.weights.weight_senders import StreamTransport

T = TypeVar("T")


class _Rank:
    """State and calls that both shells share: the rank's specification, its parts, its meeting place, its process."""

    _meeting: "Meeting | None" = None
    _spec: RankSpec

    def __init__(self, spec: RankSpec) -> None:
        if spec.config.num_gpus_per_rank:
            if spec.expands_segments:
                use_expandable_segments()
            check_torch_build()
        else:
            hide_gpus()
            prepare_for_torch()  # before torch is imported
        keep_compiled()
        from penstock.workers.trainer import assembly

        self._assembly = assembly
        self._spec = spec
        self._phases = Phases()

    def __repr__(self) -> str:
        return self._spec.name

    def process(self, stacks: str) -> ProcessId:
        """Return the identity of this process. From now on a signal writes its stacks below `stacks`."""
        return register(stacks)

    def numerics(self) -> dict[str, Any]:
        """Return what decides the bits that this process computes."""
        return numerics(self._spec.attention)

    def gpus(self) -> list[str]:
        """Numbers of the GPUs that Ray has given this rank."""
        return [str(number) for number in ray.get_runtime_context().get_accelerator_ids()["GPU"]]

    def address(self) -> str:
        """Open the meeting place of all ranks on this rank, the first, and return it as `host:port`."""
        from penstock.workers.trainer.ranks import Meeting

        self._meeting = Meeting(ray.util.get_node_ip_address())
        return self._meeting.address

    def _prepare_collectives(self) -> None:
        """Have process groups use the node's interface, and write what they called where the run looks for it. What the
        user has set stays."""
        from penstock.workers.trainer.ranks import use_interface_of

        use_interface_of(ray.util.get_node_ip_address())
        if (folder := self._spec.records_root) is not None and self._spec.num_ranks > 1:
            os.makedirs(folder, exist_ok=True)
            for name, value in recorder_environment(folder).items():
                os.environ.setdefault(name, value)

    def _collective(self, name: str, ranks: "Ranks") -> AbstractContextManager[None]:
        """Name failures in the block: another rank's death is raised as `PartnerGone`, wherever this rank waits for
        it."""
        from penstock.workers.trainer.ranks import phase

        return phase(name, ranks)

    def _needed(self, part: T | None, what: str) -> T:
        """Return the part. Raises `NotStarted` where it is missing."""
        if part is None:
            raise NotStarted(f"{self._spec.name}: this call needs {what}.")
        return part


class Trainer(_Rank):
    """Lifecycle: `address` on the first of several ranks, `start` on all with it, `attach` where there is a store, then
    `step`, `begin_publishing` and the rest, then `close`. Calls that change a run carry the `epoch` of the command that
    makes them (`store/epoch.py`), and raise `TakenOver` for an older one. Streams have none: no other command takes
    them over."""

    _spec: TrainerSpec
    _started: "TrainerParts | None" = None

    def __init__(self, spec: TrainerSpec) -> None:
        super().__init__(spec)
        self._epoch = Epoch()
        self._num_threads = spec.num_threads
        self._meters = exported(spec.origin)
        self._connected: StreamTransport | None = None

    def start(self, address: str | None) -> None:
        """Load the models and join the other ranks; one rank alone needs no address. Collective. Raises `ModelError`,
        `ConfigError`, `DeadlineExceeded` with the ranks that do not come."""
        self._prepare_collectives()
        self._started = self._assembly.assemble_trainer(self._spec, address, self._phases, self._meters)
        self._phases.enter(IDLE)

    def attach(self, store: Any, epoch: int = 0) -> None:
        """Take the next steps from this store. A step that waits for a batch of the previous store raises
        `PartnerGone`."""
        self._epoch.check(epoch)
        self._parts.worker.attach(SyncStoreClient(store))

    def step(self, step: int, records_tokens: bool = False, epoch: int = 0) -> StepReport | None:
        """Run step number `step`, counted from 1, on the store's next batch. None: the store has closed.
        `records_tokens`: see `TrainerWorker.step`. Collective."""
        self._epoch.check(epoch)
        worker = self._parts.worker
        self._needed(worker.store, "a store")
        with self._together(f"step {step}"):
            return worker.step(step, records_tokens)

    def try_threads(self, counts: Sequence[int]) -> dict[int, float]:
        """Measure how many seconds an update takes this rank for a token, by number of threads. Collective; changes
        nothing that is trained."""
        with self._together("try numbers of threads"):
            return self._assembly.seconds_per_token(self._parts.trainer, counts)

    def use_threads(self, num_threads: int) -> None:
        """Compute with this number of threads from now on."""
        self._num_threads = num_threads

    def token_values(self, step: int) -> TokenValues | None:
        """Return what the last update knew of each token of this rank's rows, if it was that of `step` and recorded
        it."""
        return self._parts.worker.token_values(step)

    def update(self, rows: Rows, loss: Loss) -> UpdateReport:
        """Run one update on these rows of this rank (the imperative API). Collective."""
        return self._parts.trainer.update(rows, loss)

    def forward_backward(self, rows: Rows, loss: Loss) -> UpdateReport:
        """Add the gradients of these rows of this rank to those since the last step (the imperative API).
        Collective."""
        with self._together("forward and backward"):
            return self._parts.trainer.forward_backward(rows, loss)

    def optim_step(self, params: AdamParams | None = None) -> dict[str, float]:
        """Step by the gradients since the last step; None: by the configured optimizer's numbers (the imperative API).
        Collective. Raises `DataError`."""
        with self._together("optimizer step"):
            return self._parts.trainer.optim_step(params)

    def logprobs(self, rows: Rows) -> list[np.ndarray]:
        """Return `[T_i]` float32 for each row of this rank (the imperative API). Collective."""
        return self._parts.trainer.logprobs(rows)

    # Data with targets of their own, for the weights that are trained or for adapters by name. Each rank gets its own
    # share of the data, else the same arguments. Collective; wrong arguments raise `DataError` on all ranks alike, and
    # change nothing.

    def forward_data(self, data: Sequence[Datum], loss: LossCall | None, backward: bool) -> ForwardOutput:
        """Score the targets of this rank's share of the data by the weights that are trained, as `forward_adapter` does
        by an adapter's; `optim_step` steps by the gradients. Raises `NotStarted` for a trainer of scores."""
        from penstock.workers.trainer.datum_trainer import DatumTrainer

        trainer = self._parts.trainer
        if not isinstance(trainer, DatumTrainer):
            raise NotStarted("this trainer trains scores, not a policy: it takes no data with targets.")
        with self._together("forward of data"):
            return trainer.forward_data(data, loss, backward=backward)

    def create_adapter(self, name: str, spec: AdapterSpec, state: AdapterState | None = None) -> None:
        """Make an adapter, in the place of one of that name: new, or of a state."""
        with self._together(f"create adapter {name}"):
            self._adapters.create(name, spec, state)

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter, if there is one of that name."""
        with self._together(f"drop adapter {name}"):
            self._adapters.drop(name)

    def forward_adapter(self, name: str, data: Sequence[Datum], loss: LossCall | None, backward: bool) -> ForwardOutput:
        """Score the targets of this rank's share of the data; with `backward` gradients of the summed loss are added to
        the adapter's. `loss` None: scores alone. Returns the log-probabilities of this rank's data in their order, and
        metrics of all ranks' data, the same on each."""
        with self._together(f"forward of adapter {name}"):
            return self._adapters.forward(name, data, loss, backward=backward)

    def step_adapter(self, name: str, params: AdamParams) -> dict[str, float]:
        """Step and clear the gradients. Returns `grad_norm` and `skipped_nonfinite`, the same on each rank."""
        with self._together(f"step of adapter {name}"):
            return self._adapters.step(name, params)

    def adapter_state(self, name: str) -> AdapterState | None:
        """The adapter's whole state on rank 0; None on the others."""
        with self._together(f"state of adapter {name}"):
            return self._adapters.state(name)

    # Checkpoints, copies in memory, publications.

    def begin_saving(self, directory: str, epoch: int = 0) -> bool:
        """Take the present state; it is copied and written while training continues. False: an earlier one is still
        being written. Collective. Raises `DataflowError` for a state that no checkpoint can keep."""
        self._epoch.check(epoch)
        with self._phases.within(SAVING), self._together(f"save to {directory}"):
            return self._parts.state.begin(directory)

    def finish_saving(self) -> list[SavedFile]:
        """Wait for what `begin_saving` started; may run beside `step`. Raises `CheckpointError`,
        `DeadlineExceeded`."""
        return self._parts.state.finish()

    def resume(self, directory: str, files: list[SavedFile]) -> None:
        """Go on from a checkpoint. Collective. Raises `CheckpointError`."""
        with self._phases.within(RESUMING), self._together(f"resume {directory}"):
            self._parts.state.load(directory, files)

    def restore(self, step: int, epoch: int = 0) -> None:
        """Go on from the in-memory checkpoint of a step, after `start`, where each rank's node has its own. Those of
        later steps become invalid. Collective. Raises `MemoryCheckpointError`, on all ranks alike, having changed
        nothing."""
        self._epoch.check(epoch)
        checkpoint = self._needed(self._parts.memory_checkpoint, "faults.keep_state=true")
        worker = self._parts.worker
        with self._phases.within(RESUMING):
            worker.after_step = None
            checkpoint.restore(step)
            worker.after_step = step

    def begin_keeping(self, step: int, epoch: int = 0) -> None:
        """Begin to copy the state after step `step` into memory: forward and backward passes may be run when this
        returns, and the next optimizer step waits for the copy. Collective. Raises `PartnerGone`."""
        self._epoch.check(epoch)
        with self._phases.within(KEEPING), self._together(f"copy of the state after step {step}"):
            self._parts.worker.check_state(step)
            if self._parts.memory_checkpoint is not None:
                self._parts.memory_checkpoint.begin(step)

    def finish_keeping(self, step: int, epoch: int = 0) -> str | None:
        """Wait for what `begin_keeping` started; may run beside `step`. None: the copy is there; else why there are no
        copies from now on, reported once. Raises `PartnerGone`, `DeadlineExceeded`."""
        self._epoch.check(epoch)
        checkpoint = self._parts.memory_checkpoint
        with self._collective(f"copy of the state after step {step}", self._parts.trainer.all_ranks):
            return checkpoint.finish(step) if checkpoint is not None else None

    def after_step(self) -> int | None:
        """The step whose weights and optimizer this rank has. None: an update has failed, or is under way."""
        return self._parts.worker.after_step

    def plan_chunks(self, node: str, num_receivers: int) -> "ChunkPlan":
        """Publish to other nodes from now on: this rank is on `node`, and so many nodes receive. The same plan on every
        rank. Collective. Raises `WeightError`."""
        with self._together("plan publications"):
            return self._parts.trainer.plan_chunks(node, num_receivers)

    def begin_publishing(self, directory: str, version: int, epoch: int = 0) -> None:
        """Begin to write a version of the weights into shared memory, below `directory`: when this returns, they may
        change. Collective. Raises `WeightError`, and `PartnerGone` where this rank does not have the state after that
        step."""
        self._epoch.check(epoch)
        with self._phases.within(PUBLISHING), self._together(f"publish version {version}"):
            if self._parts.worker.store is not None:  # else this is no run of a controller, which counts steps
                self._parts.worker.check_state(version)
            self._parts.trainer.begin_publishing(directory, version)

    def finish_publishing(self, version: int, epoch: int = 0) -> Publication:
        """Wait for what `begin_publishing` started; may run beside `step`. Raises `WeightError`, `DeadlineExceeded`,
        `PartnerGone`."""
        self._epoch.check(epoch)
        with self._collective(f"publish version {version}", self._parts.trainer.all_ranks):
            return self._parts.trainer.finish_publishing(version, SYNC_PHASES * self._spec.phase_timeout_s)

    def free_address(self) -> str:
        """Return `host:port` on this node for a transport to listen on."""
        return free_address(ray.util.get_node_ip_address())

    def connect(self, name: str, engines: ReceivingEngines, address: str, config: WeightsConfig) -> None:
        """Meet the engines, where weights are streamed to them. `address`: where they can meet. Collective. Raises
        `DeadlineExceeded`, `WeightError`, `ResourceError`."""
        from penstock.workers.weights.weight_senders import SendingRank, StreamTransport

        rank, timeout_s = SendingRank.of(self._parts.trainer), self._spec.phase_timeout_s
        self._connected = StreamTransport(name, rank, bucket_mib=config.bucket_mib, timeout_s=timeout_s)
        self._connected.connect(engines, address)

    def prepare(self, version: int) -> StreamedVersion:
        """Return what engines need to know of a version before `send` brings it. Collective."""
        return self._transport.prepare(version)

    def send(self, version: int) -> None:
        """Stream a version, while the engines' `load` receives it. Collective. Raises `WeightError`,
        `DeadlineExceeded`, or what an engine raised."""
        with self._phases.within(PUBLISHING):
            self._transport.send(version)

    def take_device(self) -> None:
        """Bring everything back to the device that this rank shares with an engine."""
        self._parts.take_device()

    def leave_device(self) -> None:
        """Make room on the device that this rank shares with an engine."""
        self._parts.leave_device()

    def export(self, directory: str) -> dict[str, int]:
        """Write a HF model directory; return the weight files of this rank, with their bytes. Collective. Raises
        `WeightError`."""
        with self._phases.within(EXPORTING), self._together("export"):
            return self._parts.trainer.export(directory)

    def progress(self) -> Progress:
        """Rows trained, and rows of the present batch. A rank with nothing else to do publishes or copies its state,
        while it does. May be called at any time."""
        if self._started is None:
            return self._phases.progress()
        worker = self._started.worker
        said = self._phases.progress(worker.num_rows, worker.num_in_flight, worker.tokens_in_flight)
        if said.phase not in (IDLE, WAITING):
            return said
        if (published_s := self._started.trainer.publisher.seconds_under_way) is not None:
            return replace(said, phase=PUBLISHING, phase_s=published_s)
        kept = self._started.memory_checkpoint
        if kept is not None and (kept_s := kept.seconds_under_way) is not None:
            return replace(said, phase=KEEPING, phase_s=kept_s)
        return said

    def close(self) -> None:
        """Disconnect from engines and ranks, if there are any."""
        if self._connected is not None:
            self._connected.close()
        if self._started is not None:
            if self._started.memory_checkpoint is not None:
                self._started.memory_checkpoint.close()
            self._started.trainer.close()
        if self._meeting is not None:
            self._meeting.close()

    def _together(self, name: str) -> AbstractContextManager[None]:
        """Compute in the block with this rank's number of threads: torch keeps it for each calling thread, and Ray
        calls from several."""
        self._assembly.use_threads(self._num_threads)
        return self._collective(name, self._parts.trainer.all_ranks)

    @property
    def _adapters(self) -> "SlotTrainer":
        from penstock.workers.trainer.slot_trainer import SlotTrainer

        trainer = self._parts.trainer
        if not isinstance(trainer, SlotTrainer):
            raise NotStarted("this trainer has no slot for adapters. Give its specification a slot_rank.")
        return trainer

    @property
    def _parts(self) -> "TrainerParts":
        return self._needed(self._started, "`start` first")

    @property
    def _transport(self) -> "StreamTransport":
        return self._needed(self._connected, "`connect` first")


class Scorer(_Rank):
    """Lifecycle: `address` on the first of several ranks, `start` on all with it, then `run`, or `logprobs` in a
    session, then `close`. `run` with another store ends the one before."""

    _spec: ScorerSpec
    _started: "ScorerParts | None" = None

    def start(self, address: str | None) -> None:
        """Start like `Trainer.start`."""
        self._prepare_collectives()
        self._started = self._assembly.assemble_scorer(self._spec, address, self._phases)
        self._phases.enter(SERVING)

    def run(self, store: Any) -> None:
        """Serve the stage until the store closes. Collective."""
        with self._collective(f"serve {self._spec.stage}", self._parts.trainer.ranks):
            self._parts.worker.run(SyncStoreClient(store))

    def leave_device(self) -> None:
        """Make room on the device for ranks that train. It comes back by itself for the next rows. Does nothing before
        the start."""
        if self._started is not None:
            self._started.scorer.leave_device()

    def progress(self) -> Progress:
        """Rows computed, and rows of the present round. May be called at any time."""
        worker = self._started.worker if self._started is not None else None
        return self._phases.progress(worker.num_computed, worker.num_in_flight) if worker else self._phases.progress()

    def stats(self) -> dict[str, float]:
        """Rows served and seconds spent computing, since the start. May be called beside `run`."""
        return self._parts.worker.stats()

    def logprobs(self, rows: Rows) -> list[np.ndarray]:
        """Return `[T_i]` float32 for each row of this rank (the imperative API). Collective."""
        return self._parts.trainer.logprobs(rows)

    def close(self) -> None:
        """Leave the other ranks, if this one has joined them."""
        if self._started is not None:
            self._started.trainer.close()
        if self._meeting is not None:
            self._meeting.close()

    @property
    def _parts(self) -> "ScorerParts":
        return self._needed(self._started, "`start` first")
