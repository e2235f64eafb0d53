"""`ipc`, `nccl` and `nccl_m2n`: the trainer's side of a stream from GPU to GPU, over vLLM's own trainer engines.

    connect   WeightTransferTrainerFactory.trainer_init(init_info, client, source)     all ranks
    send      engine.send_weights()                                                    all ranks
                ├─ iterates the source: whole tensors, gathered by all ranks, a bucket at a time
                └─ on rank 0 calls the client: update_weights(info) … finish_weight_update()
                                                 └─ Part ─▶ every engine's `deliver`

vLLM's engines expect a client that calls the other side for every step of a transfer. Here an engine's own `load` does
that, with its pauses, deadlines and assertions (`rollout/engine_vllm.py`); so the client only carries parts. vLLM is
imported in `connect`.
"""

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from penstock.conf.errors import DeadlineExceeded, PenstockError, ResourceError, WeightError
from penstock.workers.weights.streaming.watch import watched
from penstock.workers.weights.streaming.weight_stream import WeightStream
from penstock.workers.weights.transport import Delivery, Engines, Info, Part, StreamedVersion


@dataclass(frozen=True)
class SenderPlace:
    """The place of this process among the trainer's ranks, and the time and memory that it may take."""

    rank: int
    num_ranks: int
    device: torch.device
    timeout_s: float
    """Longest silence, in seconds: no tensor taken, no engine connected."""
    bucket_bytes: int


class PartsClient:
    """vLLM's `VLLMWeightSyncClient`, which rank 0 calls: hands parts to the engines of the run.

    Engines start and finish by themselves, so `start_weight_update` has nothing to do and
    `finish_weight_update` says that all has been sent.
    """

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.version = 0
        self.alarm = threading.Event()
        """Event of the first failure: other calls under way then wait for partners in vain."""
        self.failure: PenstockError | None = None

    def init_weight_transfer_engine(self, init_info: Info) -> None:
        """Connect the engines. vLLM thinks of one engine with many workers, so several engines take consecutive places
        among the ranks."""
        step = self._engines.workers_per_engine
        infos = []
        for index in range(self._engines.num_engines):
            offset = {"rank_offset": init_info["rank_offset"] + index * step} if "rank_offset" in init_info else {}
            infos.append(init_info | offset)
        self._carry(lambda: self._engines.connect(infos))

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Info) -> None:
        self._carry(lambda: self._engines.deliver(Part(self.version, _portable(update_info))))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._carry(lambda: self._engines.deliver(Part(self.version, None)))

    def _carry(self, call: Callable[[], None]) -> None:
        try:
            call()
        except PenstockError as error:
            self.failure = self.failure or error
            self.alarm.set()
            raise


InitInfo = Callable[[SenderPlace, Engines, str, int], Any]
"""Function `(place, engines, address, bucket_bytes)` that returns vLLM's `TrainerInitInfo` of one backend."""


class StreamTransport:
    """A rank of the sending side. Lifecycle: `connect`, then `prepare` and `send` for each version, `close`.

    After a failure in `connect` or `send` it is broken, and its process should end: a thread may be stuck in a
    collective.
    """

    streams = True

    def __init__(
        self,
        name: str,
        init_info: InitInfo,
        stream: WeightStream,
        place: SenderPlace,
        source: Any = None,
        trainer_init: Callable[..., Any] | None = None,
    ) -> None:
        """`source`: iterated by vLLM's engine, if not `stream` itself. `trainer_init`: makes vLLM's trainer engine;
        default its factory."""
        self.name = name
        self._init_info = init_info
        self._stream = stream
        self._source = stream if source is None else source
        self._place = place
        self._trainer_init = trainer_init
        self._engine: Any = None
        self._client: PartsClient | None = None
        self._broken: str | None = None

    def connect(self, engines: Engines, address: str) -> None:
        """Meet the engines. Raises `DeadlineExceeded`, `ResourceError` for a package that is missing, or what an
        engine raised."""
        client = self._client = PartsClient(engines)

        def meet() -> None:
            start = self._trainer_init or _vllm_trainer_init()
            largest = max((meta.num_bytes for meta in self._stream.metadata()), default=0)
            bucket_bytes = max(self._place.bucket_bytes, largest)
            info = self._init_info(self._place, engines, address, bucket_bytes)
            self._engine = start(info, client=client, source=self._source)

        self._run(meet, "connecting trainer and engines", client)

    def prepare(self, version: int) -> Delivery:
        return StreamedVersion(version, len(self._stream.metadata()))

    def send(self, version: int) -> None:
        client = self._client
        if self._broken is not None or client is None:
            raise WeightError(f"weights.transport={self.name} is not connected: {self._broken or 'never was'}.")
        client.version = version
        if self._place.device.type == "cuda":
            torch.cuda.synchronize(self._place.device)  # vLLM packs in streams that do not wait for the optimizer's
        self._run(self._engine.send_weights, f"weight sync to version {version}, phase send", client)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None and self._broken is None:
            engine.shutdown()
        self._broken = self._broken or "it was closed"

    def _run(self, action: Callable[[], None], phase: str, client: PartsClient) -> None:
        """Run an action under the watch. Every way in which it can fail gives one named error, and breaks the
        transport."""
        client.alarm = threading.Event()
        failure: BaseException | None = None
        try:
            watched(
                action,
                timeout_s=self._place.timeout_s,
                progress=lambda: self._stream.num_taken,
                alarm=client.alarm,
                device=self._place.device,
            )
        except Exception as error:  # noqa: BLE001 - vLLM, NCCL and CUDA raise what they like; it is named below
            failure = error
        # An engine's error comes first: what failed here afterwards is its consequence.
        failure = client.failure or failure
        if failure is not None:
            named = self._named(failure, f"{phase}, trainer rank {self._place.rank} of {self._place.num_ranks}")
            self._broken = str(named)
            raise named from (None if named is failure else failure)

    def _named(self, failure: BaseException, where: str) -> PenstockError:
        if isinstance(failure, PenstockError):
            return failure
        if isinstance(failure, ImportError):
            return ResourceError(f"weights.transport={self.name} needs what is not installed: {failure}")
        if isinstance(failure, TimeoutError):
            return DeadlineExceeded(
                f"{where}, {self.name}: nothing moved for {self._place.timeout_s:g} s ({self._stream.position}). An "
                "engine or another rank does not take part; see their errors, or raise weights.phase_timeout_s."
            )
        return WeightError(f"{where}, {self.name}: {type(failure).__name__}: {failure} ({self._stream.position}).")


def ipc_init_info(place: SenderPlace, engines: Engines, address: str, bucket_bytes: int) -> Any:
    """Settings of `ipc`, packed: tensors are copied into one buffer that both processes see, a bucket at a time."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    return IPCTrainerInitInfo(rank=place.rank, packed=True, packed_buffer_size_bytes=bucket_bytes)


def nccl_init_info(place: SenderPlace, engines: Engines, address: str, bucket_bytes: int) -> Any:
    """Settings of `nccl`: rank 0 and all engines' workers connect; the trainer's other ranks only gather."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    host, _, port = address.rpartition(":")
    return NCCLTrainerInitInfo(
        rank=place.rank,
        master_address=host,
        master_port=int(port),
        world_size=1 + engines.num_engines * engines.workers_per_engine,
        packed=True,
        packed_buffer_size_bytes=bucket_bytes,
    )


def m2n_init_info(place: SenderPlace, engines: Engines, address: str, bucket_bytes: int) -> Any:
    """Settings of `nccl_m2n`: all ranks and all workers connect. An engine's workers shard, engines replicate."""
    from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo

    host, _, port = address.rpartition(":")
    return M2NTrainerInitInfo(
        rank=place.rank,
        master_address=host,
        master_port=int(port),
        world_size=place.num_ranks + engines.num_engines * engines.workers_per_engine,
        num_trainer_ranks=place.num_ranks,
        dst_mesh_dims=(engines.num_engines, engines.workers_per_engine),
    )


INIT_INFOS: dict[str, InitInfo] = {"ipc": ipc_init_info, "nccl": nccl_init_info, "nccl_m2n": m2n_init_info}


def _vllm_trainer_init() -> Callable[..., Any]:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    return cast(Callable[..., Any], WeightTransferTrainerFactory.trainer_init)


def _portable(info: Info) -> Info:
    """The info in a form that reaches vLLM's engine process: handles of GPU memory contain classes (`vllm/ipc.py`)."""
    handles = info.get("ipc_handles")
    if handles is None:
        return info
    from penstock.workers.weights.vllm.ipc import PICKLED

    return {key: value for key, value in info.items() if key != "ipc_handles"} | {PICKLED: pickle.dumps(handles)}
