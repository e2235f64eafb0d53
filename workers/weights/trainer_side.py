"""The transport of a rank, by its name: what it is made of, and the settings of vLLM's backend under each that
streams."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.conf.errors import ConfigError, suggest
from penstock.conf.weights import TRANSPORTS
from penstock.workers.protocols import Publication
from penstock.workers.weights.checkpoint_form import CheckpointForm
from penstock.workers.weights.piece import Piece
from penstock.workers.weights.streaming.senders import InitInfo, SenderPlace, StreamTransport
from penstock.workers.weights.streaming.weight_stream import WeightStream
from penstock.workers.weights.transport import Engines, ShmTransport, Transport

DEADLINES = 1.5
"""Number of an engine's deadlines for which a sender waits, so that it gets the engine's own error first."""


@dataclass(frozen=True)
class TrainerSide:
    """The parts of a rank that its transport needs."""

    rank: int
    num_ranks: int
    device: torch.device
    publish: Callable[[str, int], Publication]
    """The trainer's `publish`, collective."""
    pieces: Callable[[], Iterable[Piece]]
    """This rank's elements of every tensor that engines load, in the same order on every rank."""
    gather: Callable[[Any], list[Any]]
    """Gathers a small value of every rank, in order of rank; collective."""
    module: nn.Module
    """Module whose parameters are DTensors under HF names, for nccl_m2n."""
    dtype: str
    """Dtype of the engines."""

    @classmethod
    def of(cls, trainer: Any) -> "TrainerSide":
        """`trainer`: a rank, as `trainer.py` makes it."""
        ranks = trainer.ranks
        return cls(
            ranks.rank, ranks.num_ranks, ranks.device, trainer.publish, trainer.engine.pieces, ranks.gather_ranks,
            trainer.model.lm, trainer.engine_dtype,
        )  # fmt: skip


def make_transport(name: str, side: TrainerSide, *, directory: str, bucket_mib: int, timeout_s: float) -> Transport:
    """Make the transport. Collective. `directory`: root of publications in shared memory. `timeout_s`:
    `weights.phase_timeout_s`.

    Raises `ConfigError` for an unknown name, `WeightError` when the ranks' pieces do not make whole tensors.
    """
    if name == "shm":
        return ShmTransport(side.publish, directory)
    if name not in INIT_INFOS:
        raise ConfigError(f"weights.transport={name}: unknown{suggest(name, TRANSPORTS)}")
    place = SenderPlace(side.rank, side.num_ranks, side.device, DEADLINES * timeout_s, bucket_mib * 2**20)
    stream = WeightStream(side.pieces, side.dtype, side.device, side.gather)
    return StreamTransport(name, INIT_INFOS[name], stream, place, _source(name, side))


def ipc_init_info(place: SenderPlace, engines: Engines, address: str, bucket_bytes: int) -> Any:
    """Settings of `ipc`, packed: tensors are copied into one buffer that both processes see, a bucket at a time."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    return IPCTrainerInitInfo(rank=place.rank, packed=True, packed_buffer_size_bytes=bucket_bytes)


def _meeting(place: SenderPlace, address: str) -> dict[str, Any]:
    host, _, port = address.rpartition(":")
    return {"rank": place.rank, "master_address": host, "master_port": int(port)}


def nccl_init_info(place: SenderPlace, engines: Engines, address: str, bucket_bytes: int) -> Any:
    """Settings of `nccl`: rank 0 and all engines' workers connect; the trainer's other ranks only gather."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(
        **_meeting(place, address),
        world_size=1 + engines.num_engines * engines.workers_per_engine,
        packed=True,
        packed_buffer_size_bytes=bucket_bytes,
    )


def m2n_init_info(place: SenderPlace, engines: Engines, address: str, bucket_bytes: int) -> Any:
    """Settings of `nccl_m2n`: all ranks and all workers connect. An engine's workers shard, engines replicate."""
    from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo

    return M2NTrainerInitInfo(
        **_meeting(place, address),
        world_size=place.num_ranks + engines.num_engines * engines.workers_per_engine,
        num_trainer_ranks=place.num_ranks,
        dst_mesh_dims=(engines.num_engines, engines.workers_per_engine),
    )


INIT_INFOS: dict[str, InitInfo] = {"ipc": ipc_init_info, "nccl": nccl_init_info, "nccl_m2n": m2n_init_info}


def _source(name: str, side: TrainerSide) -> Any:
    """The source that vLLM's engine iterates; None: the stream itself."""
    if name != "nccl_m2n":
        return None
    form = CheckpointForm(side.module)
    for key, parameter in side.module.named_parameters():
        stored = form.parts(key, tuple(parameter.shape))[0].name
        if stored != key:
            raise ConfigError(
                f"weights.transport=nccl_m2n sends {key} as the trainer has it, and engines want {stored} (and others, "
                "where experts are stacked). Set weights.transport=nccl, ipc or shm."
            )
    from penstock.workers.weights.streaming.shards import ShardStream

    return ShardStream(side.module, side.num_ranks, side.dtype)
