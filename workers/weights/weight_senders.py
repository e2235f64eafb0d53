"""The trainer's side of a stream from GPU to GPU, by `ipc`, `nccl` or `nccl_m2n`, over vLLM's own trainer engines.

    connect   WeightTransferTrainerFactory.trainer_init(init_info, client, source)     all ranks
    send      engine.send_weights()                                                    all ranks
                ├─ iterates the source: whole tensors, gathered by all ranks, a bucket at a time
                └─ on rank 0 calls the client: update_weights(info) … finish_weight_update()
                                                 └─ StreamPart ─▶ every engine's `deliver`

vLLM's engines expect a client that calls the other side for every step of a transfer. Here an engine's own `load` does
that, with its pauses, deadlines and assertions (`rollout/engine_vllm.py`); so the client only carries parts. vLLM is
imported in `connect`.

The source is a `WeightStream`: whole tensors, one at a time, on each rank, in the engines' dtype or, where they keep
it, in their own.

    for piece in pieces():  this rank's elements ─▶ cast ─▶ every owner broadcasts its elements into its place ─▶ whole

A tensor is whole only while the iterating caller holds it, so at most a bucket of them is ever gathered. `nccl_m2n`
gathers nothing: its source is each rank's shards as they lie.

Both calls are watched, since they may never return: a collective that lost its partner blocks in a library that knows
no deadline. So it runs in a thread of its own, and when it has made no progress for too long it is abandoned with an
error. The stuck thread remains until its process ends, which is what the error leads to.
"""

import math
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.conf.checks import one_of
from penstock.conf.errors import ConfigError, DeadlineExceeded, PenstockError, ResourceError, WeightError
from penstock.conf.weights import STREAMS
from penstock.workers.weights.checkpoint_form import CheckpointForm, keeps_float32
from penstock.workers.weights.engine_calls import Info, ReceivingEngines, StreamedVersion, StreamPart
from penstock.workers.weights.piece import Piece, Span, gather_spans
from penstock.workers.weights.vllm.plugin import PICKLED

DEADLINES = 1.5
"""Number of an engine's deadlines for which a sender waits, so that it gets the engine's own error first."""


@dataclass(frozen=True)
class SendingRank:
    """The parts of a trainer's rank that its stream needs."""

    rank: int
    num_ranks: int
    device: torch.device
    pieces: Callable[[], Iterable[Piece]]
    """This rank's elements of every tensor that engines load, in the same order on every rank."""
    gather: Callable[[Any], list[Any]]
    """Gathers a small value of every rank, in order of rank; collective."""
    module: nn.Module
    """Module whose parameters are DTensors under HF names, for nccl_m2n."""
    dtype: str
    """Dtype of the engines."""

    @classmethod
    def of(cls, trainer: Any) -> "SendingRank":
        """`trainer`: a rank, as `trainer.py` makes it."""
        ranks = trainer.ranks
        return cls(
            ranks.rank, ranks.num_ranks, ranks.device, trainer.engine.pieces, ranks.gather_ranks, trainer.model.lm,
            trainer.engine_dtype,
        )  # fmt: skip


@dataclass(frozen=True)
class TensorMeta:
    """The description of a tensor of the stream; the fields of vLLM's `ParamMeta`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightStream:
    """A stream that can be iterated again: each pass gathers anew. Every rank makes the same passes, since gathering is
    collective."""

    def __init__(self, rank: SendingRank) -> None:
        """Collective. Raises `WeightError` when the ranks' pieces do not make whole tensors."""
        self._pieces, self._device = rank.pieces, rank.device
        tensors = gather_spans(rank.pieces(), rank.dtype, rank.gather)
        self._spans = [tensor.spans for tensor in tensors]
        self._metadata = [TensorMeta(each.name, getattr(torch, each.dtype), each.shape) for each in tensors]
        self.num_taken = 0
        """Tensors of the current pass, or the last one, that were taken."""

    def metadata(self) -> list[TensorMeta]:
        """Description of every tensor, in the order of iteration. Costs nothing."""
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over `(name, whole tensor)`, contiguous. Collective. A rank alone gets views where no cast is
        needed."""
        self.num_taken = 0
        for piece, meta, spans in zip(self._pieces(), self._metadata, self._spans, strict=True):
            if piece.name != meta.name:
                raise WeightError(
                    f"the trainer's weights changed their order: {piece.name!r} instead of {meta.name!r}."
                )
            yield meta.name, self._whole(piece, meta, spans)
            self.num_taken += 1

    @property
    def position(self) -> str:
        """The position of the current pass, for error messages."""
        names = [meta.name for meta in self._metadata]
        where = f"at {names[self.num_taken]!r}" if self.num_taken < len(names) else "past the last"
        return f"{self.num_taken} of {len(names)} tensors taken, {where}"

    def _whole(self, piece: Piece, meta: TensorMeta, spans: list[Span]) -> Tensor:
        """Gather the whole tensor. The cast comes first, so that the data sent between ranks has the engines' size."""
        values = piece.values.detach().to(device=self._device, dtype=meta.dtype)
        if len(spans) == 1:
            return values.reshape(meta.shape)
        whole = torch.empty(math.prod(meta.shape), dtype=meta.dtype, device=self._device)
        whole[piece.first : piece.first + values.numel()] = values
        for rank, (first, count) in enumerate(spans):
            if count:
                dist.broadcast(whole[first : first + count], src=rank)
        return whole.reshape(meta.shape)


def shard_stream(rank: SendingRank) -> Any:
    """The source of `nccl_m2n`: the DTensors of FSDP2 with their placements, in the engines' dtype. The cast makes one
    shard's copy at a time, and nothing is gathered. Imports vLLM, which reads `metadata` once, when trainer and engines
    connect, and checks there what its library can express: shards of equal size, at most three dimensions. Raises
    `ConfigError` for tensors that engines want otherwise than the trainer has them."""
    from vllm.distributed.weight_transfer.m2n_source import DTensorModuleSource

    form, dtype, keeps = CheckpointForm(rank.module), getattr(torch, rank.dtype), keeps_float32(rank.module)
    for key, parameter in rank.module.named_parameters():
        stored = form.parts(key, tuple(parameter.shape))[0].name
        if stored != key:
            raise ConfigError(
                f"weights.transport=nccl_m2n sends {key} as the trainer has it, and engines want {stored} (and others, "
                "where experts are stacked). Set weights.transport=nccl, ipc or shm."
            )

    class ShardStream(DTensorModuleSource):
        num_taken = 0
        """Shards of the current pass, or the last one, that were taken."""

        def metadata(self) -> list[Any]:
            return [meta if keeps(meta.name) else replace(meta, dtype=dtype) for meta in super().metadata()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            self.num_taken = 0
            for name, shard in super().__iter__():
                yield name, shard.detach() if keeps(name) else shard.detach().to(dtype)
                self.num_taken += 1

        @property
        def position(self) -> str:
            """The position of the current pass, for error messages."""
            return f"{self.num_taken} of {len(self.metadata())} shards taken"

    return ShardStream(rank.module, rank.num_ranks)


class StreamClient:
    """vLLM's `VLLMWeightSyncClient`, which rank 0 calls: hands parts to the engines of the run.

    Engines start and finish by themselves, so `start_weight_update` has nothing to do and
    `finish_weight_update` says that all has been sent.
    """

    def __init__(self, engines: ReceivingEngines) -> None:
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
        self._forward_call(lambda: self._engines.connect(infos))

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Info) -> None:
        self._forward_call(lambda: self._engines.deliver(StreamPart(self.version, pickle_handles(update_info))))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._forward_call(lambda: self._engines.deliver(StreamPart(self.version, None)))

    def _forward_call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except PenstockError as error:
            self.failure = self.failure or error
            self.alarm.set()
            raise


class StreamTransport:
    """A rank of the sending side. Lifecycle: `connect`, then `prepare` and `send` for each version, `close`. Every rank
    makes the same calls; all but `close` are collective.

    After a failure in `connect` or `send` it is broken, and its process should end: a thread may be stuck in a
    collective.
    """

    def __init__(
        self,
        name: str,
        rank: SendingRank,
        *,
        bucket_mib: int,
        timeout_s: float,
        trainer_init: Callable[..., Any] | None = None,
    ) -> None:
        """`name`: of the transport. `bucket_mib`, `timeout_s`: weights.bucket_mib, weights.phase_timeout_s.
        `trainer_init`: makes vLLM's trainer engine; default its factory. Collective. Raises `ConfigError` for an
        unknown name, and for a model that nccl_m2n cannot send, `WeightError` when the ranks' pieces do not make whole
        tensors."""
        one_of("weights.transport", name, STREAMS)
        self.name, self.rank, self.trainer_init = name, rank, trainer_init
        self.engine: Any = None
        """vLLM's trainer engine, once the engines have met."""
        stream = WeightStream(rank)
        largest = max((meta.num_bytes for meta in stream.metadata()), default=0)
        self._bucket_bytes = max(bucket_mib * 2**20, largest)
        self._source: Any = shard_stream(rank) if name == "nccl_m2n" else stream
        self._timeout_s = DEADLINES * timeout_s
        """Longest silence, in seconds: no tensor taken, no engine connected."""
        self._client: StreamClient | None = None
        self._broken: str | None = None

    def connect(self, engines: ReceivingEngines, address: str) -> None:
        """Meet the engines, once, before the first version. `address`: host:port on rank 0's node, where they can meet.
        Raises `DeadlineExceeded`, `ResourceError` for a package that is missing, or what an engine raised."""
        client = self._client = StreamClient(engines)

        def meet() -> None:
            start = self.trainer_init
            if start is None:
                from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

                start = cast(Callable[..., Any], WeightTransferTrainerFactory.trainer_init)
            info = INIT_INFOS[self.name](self.rank, engines, address, self._bucket_bytes)
            self.engine = start(info, client=client, source=self._source)

        self._run(meet, "connecting trainer and engines", client)

    def prepare(self, version: int) -> StreamedVersion:
        """The announcement of a version to the engines, for their `load`."""
        return StreamedVersion(version, len(self._source.metadata()))

    def send(self, version: int) -> None:
        """Send the version. Returns when the weights may change again. Raises `WeightError`, `DeadlineExceeded`, or
        what an engine raised."""
        client = self._client
        if self._broken is not None or client is None:
            raise WeightError(f"weights.transport={self.name} is not connected: {self._broken or 'never was'}.")
        client.version = version
        if self.rank.device.type == "cuda":
            torch.cuda.synchronize(self.rank.device)  # vLLM packs in streams that do not wait for the optimizer's
        self._run(self.engine.send_weights, f"weight sync to version {version}, phase send", client)

    def close(self) -> None:
        """Close connections. Not collective; safe after a failure."""
        engine, self.engine = self.engine, None
        if engine is not None and self._broken is None:
            engine.shutdown()
        self._broken = self._broken or "it was closed"

    def _run(self, action: Callable[[], None], phase: str, client: StreamClient) -> None:
        """Run an action under the watch. Every way in which it can fail gives one named error, and breaks the
        transport."""
        client.alarm = threading.Event()
        failure: BaseException | None = None
        try:
            run_watched(
                action,
                timeout_s=self._timeout_s,
                progress=lambda: self._source.num_taken,
                alarm=client.alarm,
                device=self.rank.device,
            )
        except Exception as error:  # noqa: BLE001 - vLLM, NCCL and CUDA raise what they like; it is named below
            failure = error
        # An engine's error comes first: what failed here afterwards is its consequence.
        failure = client.failure or failure
        if failure is not None:
            named = self._to_penstock_error(failure, f"{phase}, trainer rank {self.rank.rank} of {self.rank.num_ranks}")
            self._broken = str(named)
            raise named from (None if named is failure else failure)

    def _to_penstock_error(self, failure: BaseException, where: str) -> PenstockError:
        if isinstance(failure, PenstockError):
            return failure
        if isinstance(failure, ImportError):
            return ResourceError(f"weights.transport={self.name} needs what is not installed: {failure}")
        if isinstance(failure, TimeoutError):
            return DeadlineExceeded(
                f"{where}, {self.name}: nothing moved for {self._timeout_s:g} s ({self._source.position}). An "
                "engine or another rank does not take part; see their errors, or raise weights.phase_timeout_s."
            )
        return WeightError(f"{where}, {self.name}: {type(failure).__name__}: {failure} ({self._source.position}).")


def run_watched(
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
    failures: list[Exception] = []

    def run() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a thread starts on device 0
            action()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits
            failures.append(error)
        finally:
            alarm.set()

    last, moved = progress(), time.monotonic()
    # A daemon thread, so that a stuck one does not keep the process from ending.
    threading.Thread(target=run, name="weights", daemon=True).start()
    while not alarm.wait(timeout_s / 8):
        if progress() != last:
            last, moved = progress(), time.monotonic()
        elif time.monotonic() - moved > timeout_s:
            raise TimeoutError
    if failures:
        raise failures[0]


def pickle_handles(info: Info) -> Info:
    """The info in a form that reaches vLLM's engine process: handles of GPU memory contain classes
    (`vllm/backends.py`)."""
    handles = info.get("ipc_handles")
    if handles is None:
        return info
    return {key: value for key, value in info.items() if key != "ipc_handles"} | {PICKLED: pickle.dumps(handles)}


def ipc_init_info(rank: SendingRank, engines: ReceivingEngines, address: str, bucket_bytes: int) -> Any:
    """Settings of `ipc`, packed: tensors are copied into one buffer that both processes see, a bucket at a time."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    return IPCTrainerInitInfo(rank=rank.rank, packed=True, packed_buffer_size_bytes=bucket_bytes)


def _meeting(rank: SendingRank, address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"rank": rank.rank, "master_address": host, "master_port": int(port)}


def nccl_init_info(rank: SendingRank, engines: ReceivingEngines, address: str, bucket_bytes: int) -> Any:
    """Settings of `nccl`: rank 0 and all engines' workers connect; the trainer's other ranks only gather."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(
        **_meeting(rank, address),
        world_size=1 + engines.num_engines * engines.workers_per_engine,
        packed=True,
        packed_buffer_size_bytes=bucket_bytes,
    )


def m2n_init_info(rank: SendingRank, engines: ReceivingEngines, address: str, bucket_bytes: int) -> Any:
    """Settings of `nccl_m2n`: all ranks and all workers connect. An engine's workers shard, engines replicate."""
    from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo

    return M2NTrainerInitInfo(
        **_meeting(rank, address),
        world_size=rank.num_ranks + engines.num_engines * engines.workers_per_engine,
        num_trainer_ranks=rank.num_ranks,
        dst_mesh_dims=(engines.num_engines, engines.workers_per_engine),
    )


INIT_INFOS: dict[str, Callable[[SendingRank, ReceivingEngines, str, int], Any]] = {
    "ipc": ipc_init_info, "nccl": nccl_init_info, "nccl_m2n": m2n_init_info,
}  # fmt: skip
"""Functions `(rank, engines, address, bucket_bytes)` that return vLLM's `TrainerInitInfo` of a transport."""
