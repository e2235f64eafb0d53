"""Transport of new weights from the trainer to the engines. `transports.py` says what a run can have."""

from dataclasses import dataclass

from penstock.conf.checks import above, at_least, one_of

TRANSPORTS = ("shm", "ipc", "nccl", "nccl_m2n")
STREAMS = ("ipc", "nccl", "nccl_m2n")
"""Transports that stream from GPU to GPU, while engines wait; vLLM's own weight-transfer backends, by its names."""
SYNC_PHASES = 10
"""Most phases of one side of a weight sync, each with weights.phase_timeout_s."""
VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can make room for; an adapter gets the next larger one."""


@dataclass
class WeightsConfig:
    transport: str = "auto"
    """Transport of the weights: auto, or one of:
    shm: a file in the node's shared memory, written by all ranks at once and mapped by every engine; between nodes it
    goes from one to the next in chunks. Without GPUs the only way, and with them the one that works for every engine
    and every placement.
    ipc: handles to GPU memory that trainer and engine share, where both run on the same GPU.
    nccl: broadcast from rank 0 to engines on GPUs of their own, also on other nodes.
    nccl_m2n: each FSDP2 rank's shard straight to where an engine wants it, without a whole tensor anywhere; needs
    NVIDIA's `nccl-extensions` and NCCL 2.30.5, which vLLM does not bring, so it is never chosen by itself.
    auto takes ipc where trainer ranks and vLLM engines share GPUs, nccl where each has its own, and shm otherwise, as
    well as for trainer.lora.publish=adapter."""
    bucket_mib: int = 256
    """Bytes that ipc and nccl gather and have under way at a time, in MiB; at least the largest tensor. Larger buckets
    mean fewer calls and more GPU memory beside the weights: once it for ipc, up to four times for nccl."""
    phase_timeout_s: float = 120.0
    """Deadline of each phase of a weight sync, which is all that happens from the trainer's weights to engines that
    serve them; and of engines and trainers that make room for each other, with placement=colocated."""

    def __post_init__(self) -> None:
        one_of("weights.transport", self.transport, ("auto", *TRANSPORTS))
        at_least("weights.bucket_mib", self.bucket_mib, 1)
        above("weights.phase_timeout_s", self.phase_timeout_s, 0)
