"""Transport of new weights from the trainer to the engines: what a run asks for, what suits its GPUs, and what cannot
be.
"""

from dataclasses import dataclass
from typing import Protocol

from penstock.conf.capabilities import ROLLOUT_ENGINES, names_with
from penstock.conf.checks import POSITIVE, check_bounds, one_of
from penstock.conf.errors import ConfigError
from penstock.conf.rollout import RolloutConfig
from penstock.conf.trainer import TrainerConfig

TRANSPORTS = ("shm", "ipc", "nccl", "nccl_m2n")
STREAMS = ("ipc", "nccl", "nccl_m2n")
"""Transports that stream from GPU to GPU, while engines wait; vLLM's own weight-transfer backends, by its names."""
SYNC_PHASES = 10
"""Most phases of one side of a weight sync, each with weights.phase_timeout_s."""


@dataclass
class WeightsConfig:
    transport: str = "auto"
    """Transport of the weights: auto, which is shm, or one of:
    shm: a file in the node's shared memory, written by all ranks at once and mapped by every engine; between nodes it
    goes from one to the next in chunks. It works for every engine and every placement, with and without GPUs, and
    engines and ranks may die, join and leave while it goes on.
    ipc: handles to GPU memory that trainer and engine share, where both run on the same GPU.
    nccl: broadcast from rank 0 to engines on GPUs of their own, also on other nodes.
    nccl_m2n: each FSDP2 rank's shard straight to where an engine wants it, without a whole tensor anywhere; needs
    NVIDIA's `nccl-extensions` and NCCL 2.30.5, which vLLM does not install.
    With the last three engines and ranks meet at the start, so the death of one is a return to the checkpoint: take
    them by name, where shared memory is short or the time of a weight sync counts for more."""
    bucket_mib: int = 256
    """Bytes that ipc and nccl gather and have under way at a time, in MiB; at least the largest tensor. Larger buckets
    mean fewer calls and more GPU memory beside the weights: once it for ipc, up to four times for nccl."""
    phase_timeout_s: float = 120.0
    """Deadline of each phase of a weight sync, which is all that happens from the trainer's weights to engines that
    serve them; and of engines and trainers that make room for each other, with placement=colocated."""

    def __post_init__(self) -> None:
        one_of("weights.transport", self.transport, ("auto", *TRANSPORTS))
        check_bounds(self, "weights", bucket_mib=1, phase_timeout_s=POSITIVE)


class TransportSettings(Protocol):
    """Settings that the choice depends on. A `RunConfig` has them."""

    placement: str
    weights: WeightsConfig
    trainer: TrainerConfig
    rollout: RolloutConfig


def choose_transport(config: TransportSettings) -> str:
    """Choose one of `TRANSPORTS`. Raises `ConfigError` for a choice that the rest of the run makes impossible."""
    wanted = config.weights.transport
    if config.trainer.lora.publishes_adapter:
        _check_adapter(wanted, config)
        return "shm"
    if wanted in STREAMS:
        _check_stream(wanted, config)
    return "shm" if wanted == "auto" else wanted


def replaces_members(config: TransportSettings) -> bool:
    """Return whether engines and ranks can be replaced during the run: they form no group at the start, as they do
    where weights are streamed."""
    return choose_transport(config) not in STREAMS


def takes_newcomers(config: TransportSettings) -> bool:
    """Return whether their number may change, and another command may take them over: none shares the device of
    another."""
    return config.placement != "colocated" and replaces_members(config)


def shares_gpus(config: TransportSettings) -> bool:
    """Return whether a trainer rank and an engine live on the same GPU: each reserves a part of one, together at most
    all of it."""
    trainer, engine = config.trainer.num_gpus_per_rank, config.rollout.num_gpus_per_worker
    return 0 < trainer < 1 and 0 < engine < 1 and trainer + engine <= 1


def scorers_share_gpus(config: TransportSettings) -> bool:
    """Return whether the ranks of scorers live on the GPUs of the trainer's ranks, as their engines do."""
    return shares_gpus(config) and (config.placement == "colocated" or config.weights.transport == "ipc")


def _check_adapter(wanted: str, config: TransportSettings) -> None:
    """Refuse what an adapter by itself cannot go through."""
    if wanted in STREAMS:
        raise ConfigError(
            f"weights.transport={wanted}: it streams whole models, and trainer.lora.publish=adapter. Use "
            "weights.transport=shm, or trainer.lora.publish=merged."
        )
    rank, ranks = config.trainer.lora.rank, config.rollout.capabilities.lora_ranks
    if ranks and rank > max(ranks):
        raise ConfigError(
            f"trainer.lora.rank={rank}: rollout.engine={config.rollout.engine} serves adapters of rank {max(ranks)} at "
            "most. Lower it, or set trainer.lora.publish=merged."
        )


def _every_engine_has_a_rank(config: TransportSettings) -> bool:
    return config.rollout.tensor_parallel_size == 1 and config.rollout.least_workers <= config.trainer.num_ranks


def _check_stream(wanted: str, config: TransportSettings) -> None:
    key = f"weights.transport={wanted}"
    if config.rollout.follows_cluster:
        raise ConfigError(
            f"{key}: trainers and engines meet at the start, and rollout.num_workers=auto lets engines come later. Use "
            "weights.transport=shm, or a number of engines."
        )
    if not config.rollout.capabilities.receives_streams:
        names = names_with("receives_streams", ROLLOUT_ENGINES)
        raise ConfigError(
            f"{key}: only {names} engines receive it, and rollout.engine={config.rollout.engine}. Use "
            f"weights.transport=shm or rollout.engine={names}."
        )
    for section, count in (
        ("trainer.num_gpus_per_rank", config.trainer.num_gpus_per_rank),
        ("rollout.num_gpus_per_worker", config.rollout.num_gpus_per_worker),
    ):
        if not count:
            raise ConfigError(
                f"{key}: it moves weights from GPU to GPU, and {section}=0. Use weights.transport=shm, or give it GPUs."
            )
    _check_place(wanted, key, config)
    if wanted == "nccl_m2n" and not config.trainer.capabilities.streams_shards:
        raise ConfigError(
            f"{key}: it reads the shards of FSDP2, and trainer.engine={config.trainer.engine}. Use "
            "weights.transport=nccl or trainer.engine=fsdp."
        )
    if wanted == "nccl_m2n" and config.trainer.lora.rank:
        raise ConfigError(
            f"{key}: it sends parameters as they lie, and trainer.lora.rank={config.trainer.lora.rank} has them merged "
            "first. Use weights.transport=nccl."
        )


def _check_place(wanted: str, key: str, config: TransportSettings) -> None:
    """Refuse a placement that does not suit: ipc wants one GPU for both, NCCL one for each."""
    gpus = (
        f"trainer.num_gpus_per_rank={config.trainer.num_gpus_per_rank:g} and "
        f"rollout.num_gpus_per_worker={config.rollout.num_gpus_per_worker:g}"
    )
    if wanted == "ipc" and not shares_gpus(config):
        raise ConfigError(
            f"{key}: a rank and an engine must share a GPU, and {gpus} give them one each. Give each a part, such as "
            "0.5 and 0.5, or use weights.transport=nccl."
        )
    if wanted == "ipc" and not _every_engine_has_a_rank(config):
        raise ConfigError(
            f"{key}: every engine needs a rank on its GPU, but rollout.num_workers={config.rollout.num_workers} "
            f"engines of rollout.tensor_parallel_size={config.rollout.tensor_parallel_size} meet "
            f"trainer.num_ranks={config.trainer.num_ranks}. Use as many ranks as engines, of one GPU each, or "
            "weights.transport=shm."
        )
    if wanted != "ipc" and shares_gpus(config):
        raise ConfigError(
            f"{key}: NCCL cannot connect two processes on one GPU, and {gpus} let a rank and an engine share one. Use "
            "weights.transport=ipc, or whole GPUs for each."
        )
