"""`ipc`, `nccl` and `nccl_m2n`: the trainer's side of a stream from GPU to GPU, over vLLM's own trainer engines.

    connect   WeightTransferTrainerFactory.trainer_init(init_info, client, source)     all ranks
    send      engine.send_weights()                                                    all ranks
                ├─ iterates the source: whole tensors, gathered by all ranks, a bucket at a time
                └─ on rank 0 calls the client: update_weights(info) … finish_weight_update()
                                                 └─ Part ─▶ every engine's `deliver`

vLLM's engines expect a client that calls the other side for every step of a transfer. Here an engine's own `load` does
that, with its pauses, deadlines and assertions (`rollout/engine_vllm.py`); so the client only carries parts. vLLM is
imported in `connect`.

Both calls are watched, since they may never return: a collective that lost its partner blocks in a library that knows
no deadline. So it runs in a thread of its own, and when it has made no progress for too long it is left behind with an
error. The stuck thread remains until its process ends, which is what the error leads to.
"""

import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from penstock.conf.errors import DeadlineExceeded, PenstockError, ResourceError, WeightError
from penstock.workers.weights.streaming.weight_stream import WeightStream
from penstock.workers.weights.transport import Delivery, Engines, Info, Part, StreamedVersion
from penstock.workers.weights.vllm.plugin import PICKLED


@dataclass(frozen=True)
class SenderPlace:
    """The place of this process among the trainer's ranks, and the time and memory that it may take."""

    rank: int
    num_ranks: int
    device: torch.device
    timeout_s: float
    """Longest silence, in seconds: no tensor taken, no engine connected."""
    bucket_bytes: int


InitInfo = Callable[[SenderPlace, Engines, str, int], Any]
"""Function `(place, engines, address, bucket_bytes)` that returns vLLM's `TrainerInitInfo` of one backend."""


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
        self._carry(lambda: self._engines.deliver(Part(self.version, portable(update_info))))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._carry(lambda: self._engines.deliver(Part(self.version, None)))

    def _carry(self, call: Callable[[], None]) -> None:
        try:
            call()
        except PenstockError as error:
            self.failure = self.failure or error
            self.alarm.set()
            raise


class StreamTransport:
    """A rank of the sending side. Lifecycle: `connect`, then `prepare` and `send` for each version, `close`.

    After a failure in `connect` or `send` it is broken, and its process should end: a thread may be stuck in a
    collective.
    """

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
        self.stream = stream
        self._source = stream if source is None else source
        self.place = place
        self.trainer_init = trainer_init
        self.engine: Any = None
        """vLLM's trainer engine, once the engines have met."""
        self._client: PartsClient | None = None
        self._broken: str | None = None

    def connect(self, engines: Engines, address: str) -> None:
        """Meet the engines. Raises `DeadlineExceeded`, `ResourceError` for a package that is missing, or what an
        engine raised."""
        client = self._client = PartsClient(engines)

        def meet() -> None:
            start = self.trainer_init or _vllm_trainer_init()
            largest = max((meta.num_bytes for meta in self.stream.metadata()), default=0)
            bucket_bytes = max(self.place.bucket_bytes, largest)
            info = self._init_info(self.place, engines, address, bucket_bytes)
            self.engine = start(info, client=client, source=self._source)

        self._run(meet, "connecting trainer and engines", client)

    def prepare(self, version: int) -> Delivery:
        return StreamedVersion(version, len(self._source.metadata()))

    def send(self, version: int) -> None:
        client = self._client
        if self._broken is not None or client is None:
            raise WeightError(f"weights.transport={self.name} is not connected: {self._broken or 'never was'}.")
        client.version = version
        if self.place.device.type == "cuda":
            torch.cuda.synchronize(self.place.device)  # vLLM packs in streams that do not wait for the optimizer's
        self._run(self.engine.send_weights, f"weight sync to version {version}, phase send", client)

    def close(self) -> None:
        engine, self.engine = self.engine, None
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
                timeout_s=self.place.timeout_s,
                progress=lambda: self._source.num_taken,
                alarm=client.alarm,
                device=self.place.device,
            )
        except Exception as error:  # noqa: BLE001 - vLLM, NCCL and CUDA raise what they like; it is named below
            failure = error
        # An engine's error comes first: what failed here afterwards is its consequence.
        failure = client.failure or failure
        if failure is not None:
            named = self._named(failure, f"{phase}, trainer rank {self.place.rank} of {self.place.num_ranks}")
            self._broken = str(named)
            raise named from (None if named is failure else failure)

    def _named(self, failure: BaseException, where: str) -> PenstockError:
        if isinstance(failure, PenstockError):
            return failure
        if isinstance(failure, ImportError):
            return ResourceError(f"weights.transport={self.name} needs what is not installed: {failure}")
        if isinstance(failure, TimeoutError):
            return DeadlineExceeded(
                f"{where}, {self.name}: nothing moved for {self.place.timeout_s:g} s ({self._source.position}). An "
                "engine or another rank does not take part; see their errors, or raise weights.phase_timeout_s."
            )
        return WeightError(f"{where}, {self.name}: {type(failure).__name__}: {failure} ({self._source.position}).")


def watched(
    action: Callable[[], None],
    *,
    timeout_s: float,
    progress: Callable[[], int],
    alarm: threading.Event,
    device: torch.device,
) -> None:
    """Run `action` in a thread until it ends, or `alarm` is set elsewhere, or `progress()` has not changed for
    `timeout_s` (looked at in eighths of it).

    Raises what `action` raised; `TimeoutError` when it stands still. Returns early, `action` unfinished, on an alarm
    that was set elsewhere: the one that set it knows what happened. `device`: the thread's current one, if it is a GPU.
    """
    call = _Call(action, alarm, device)
    last, moved = progress(), time.monotonic()
    call.start()
    while not alarm.wait(timeout_s / 8):
        if progress() != last:
            last, moved = progress(), time.monotonic()
        elif time.monotonic() - moved > timeout_s:
            raise TimeoutError
    if call.error is not None:
        raise call.error


def _vllm_trainer_init() -> Callable[..., Any]:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    return cast(Callable[..., Any], WeightTransferTrainerFactory.trainer_init)


def portable(info: Info) -> Info:
    """The info in a form that reaches vLLM's engine process: handles of GPU memory contain classes
    (`vllm/backends.py`)."""
    handles = info.get("ipc_handles")
    if handles is None:
        return info
    return {key: value for key, value in info.items() if key != "ipc_handles"} | {PICKLED: pickle.dumps(handles)}


class _Call(threading.Thread):
    """A daemon thread for the action, so that a stuck one does not keep the process from ending."""

    def __init__(self, action: Callable[[], None], ended: threading.Event, device: torch.device) -> None:
        super().__init__(name="weights", daemon=True)
        self.error: Exception | None = None
        self._action, self._ended, self._device = action, ended, device

    def run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread starts on device 0
        try:
            self._action()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = error
        finally:
            self._ended.set()
