"""Host memory of a node at its peak, part by part, and where each lies. Pure: no torch.

/dev/shm     publications, copies of the state after each step, the store's large batches, Ray's object store
pinned       buffers on the way from GPUs, what is offloaded, weights of engines that keep them asleep
memory       the copy that a checkpoint is written from, what ranks and engines keep there, the processes themselves
page cache   the model's files, which the kernel drops where memory is short
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.conf.trainer import REMEMBERED_BYTES
from penstock.conf.weights import STREAMS, choose_transport, replaces_members
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.configuration.memory.run_memory import GIB, RunMemory
from penstock.workers.weights.publication.room import COPIES, STATE_BYTES, TURNS

SHARED, PINNED, MEMORY, CACHE = "/dev/shm", "pinned", "memory", "page cache"
BUFFERS = 2 * 64 * 2**20
"""Bytes of a rank's two buffers, through which weights come from its GPU."""
PROCESS = GIB
"""Estimate of a process that has imported torch or vLLM."""
PINNED_ROUNDING = 2
"""Largest factor by which torch rounds page-locked memory up: each piece to a power of two."""
WITH_TORCH = ("trainer", "scorer", "rollout")


@dataclass(frozen=True)
class HostPart:
    """Something that lies in host memory."""

    name: str
    place: str
    num_bytes: float
    key: str = ""
    """Key that makes it less."""
    is_optional: bool = False
    """True if the run goes on without, or if it is an estimate or a bound: nothing is refused because of it."""


def host_parts(
    memory: RunMemory, actors: Sequence[ActorPlan], num_nodes: int = 1, is_own: bool = True
) -> list[HostPart]:
    """The parts of one node, largest first. `actors`: those on it; `num_nodes`: of the run; `is_own`: the run starts
    Ray there."""
    config = memory.config
    counts = {role: sum(actor.role == role for actor in actors) for role in (*WITH_TORCH, "store")}
    parts = [*_of_ranks(memory, counts["trainer"], num_nodes), *_of_engines(memory, counts["rollout"])]
    if choose_transport(config) == "shm" and counts["trainer"] + counts["rollout"]:
        parts.append(HostPart("publications of the weights", SHARED, TURNS * memory.publication_bytes))
    if not config.trainer.num_gpus_per_rank:
        for name, one in memory.ranks.items():
            scorers = sum(actor.role == "scorer" and f"Scorer-{actor.stage}" == name for actor in actors)
            number = scorers if name.startswith("Scorer") else counts["trainer"]
            parts.append(HostPart(f"{name}: all of its ranks", MEMORY, number * one.total, "trainer.num_ranks"))
    parts += [
        HostPart("the store's large batches, at most", SHARED, config.store.shared_memory_mib * 2**20,
                 "store.shared_memory_mib", True),
        HostPart("pictures that ranks have read, at most", MEMORY,
                 bool(config.rollout.max_pictures) * REMEMBERED_BYTES * (counts["trainer"] + counts["scorer"]),
                 is_optional=True),
        HostPart("the store's columns, at most", MEMORY, bool(counts["store"]) * config.store.max_bytes,
                 "store.max_bytes", True),
        HostPart("Ray's object store", SHARED, is_own * config.cluster.object_store_mib * 2**20,
                 "cluster.object_store_mib"),
        HostPart("processes of ranks and engines", MEMORY, PROCESS * sum(counts[role] for role in WITH_TORCH),
                 is_optional=True),
        HostPart("the model's files, while they are read", CACHE, 2 * memory.shapes["policy"].num_parameters),
    ]  # fmt: skip
    return sorted((part for part in parts if part.num_bytes), key=lambda part: -part.num_bytes)


def reserved_bytes(memory: RunMemory, actor: ActorPlan) -> float:
    """Bytes of host memory that an actor holds at its peak for sure, and shares with no other."""
    parts = host_parts(memory, [actor], is_own=False)
    return sum(part.num_bytes for part in parts if part.place in (PINNED, MEMORY) and not part.is_optional)


def _of_ranks(memory: RunMemory, num_ranks: int, num_nodes: int) -> list[HostPart]:
    config = memory.config
    state = STATE_BYTES * sum(_trained(memory)) / config.trainer.num_ranks * num_ranks
    on_gpus = config.trainer.num_gpus_per_rank > 0
    parts = []
    if config.faults.keep_state and replaces_members(config):
        parts.append(HostPart("copies of the state", SHARED, COPIES * state, "faults.keep_state=false", True))
        if num_nodes > 1 and config.faults.partner_share:
            other = "copies of another node's state"
            parts.append(HostPart(other, SHARED, COPIES * state, "faults.partner_share=0", True))
    if on_gpus and choose_transport(config) == "shm":
        parts.append(HostPart("buffers for weights from GPUs", PINNED, num_ranks * BUFFERS))
    if config.checkpoint.every_steps:
        parts.append(HostPart("copy that a checkpoint is written from", MEMORY, state, "checkpoint.every_steps=0"))
    offloaded = num_ranks * sum(one.on_host for one in memory.trained)
    parts.append(HostPart("weights and optimizer (trainer.offload)", PINNED, offloaded))
    waiting = num_ranks * max((one.activations_on_host for one in memory.trained), default=0.0)
    name, key = "activations (trainer.activation_offload), at most", "trainer.activation_offload=false"
    parts.append(HostPart(name, PINNED, PINNED_ROUNDING * waiting, key, True))
    if config.placement == "colocated" and on_gpus:
        left = num_ranks * memory.resident_bytes
        parts.append(HostPart("ranks, while engines have the GPUs", MEMORY, left, "placement=disaggregated"))
    return parts


def _of_engines(memory: RunMemory, num_engines: int) -> list[HostPart]:
    config, engine = memory.config, memory.engine
    if engine is None:
        return []
    if not config.rollout.num_gpus_per_worker:
        total = num_engines * config.rollout.tensor_parallel_size * engine.total
        return [HostPart("engines: weights, cache and step", MEMORY, total, "rollout.kv_cache_gib")]
    keeps_weights = config.trainer.lora.publishes_adapter or choose_transport(config) in STREAMS
    if config.placement != "colocated" or (config.rollout.engine == "vllm" and not keeps_weights):
        return []
    asleep = num_engines * config.rollout.tensor_parallel_size * engine.weights
    return [HostPart("weights of engines that sleep", PINNED, asleep, "placement=disaggregated")]


def _trained(memory: RunMemory) -> list[float]:
    """Trained parameters of each model of a trainer, over all ranks."""
    shape, lora = memory.shapes["policy"], memory.config.trainer.lora
    frozen = shape.tower_parameters if memory.config.trainer.freezes_tower else 0
    whole = shape.adapter_parameters(lora.rank, lora.target_modules) if lora.rank else shape.num_parameters - frozen
    return [float(whole)] * len(memory.trained)
