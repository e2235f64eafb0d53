"""The way of the weights in a run, as `penstock validate` tells it: the transport, what each publication takes, and
whether this machine has room for it. A cluster's nodes are asked when the run starts (`cluster/nodes/`).
"""

import os
import shutil

from penstock.conf.run import RunConfig
from penstock.conf.weights import choose_transport, replaces_members
from penstock.orchestrator.cluster.cluster import is_elsewhere
from penstock.orchestrator.cluster.nodes.shared_memory import too_small
from penstock.orchestrator.configuration.prerequisites import num_parameters, starting_model_config
from penstock.store.data.roots import SHARED_MEMORY
from penstock.workers.weights.publication.reading import MOST_THREADS
from penstock.workers.weights.publication.room import (
    TURNS,
    SharedMemory,
    how_to_enlarge,
    kept_bytes,
    publication_bytes,
    stored_elements,
)
from penstock.workers.weights.publication.timing import BUSES, Way


def describe_weights(config: RunConfig) -> str:
    """The transport, and what it takes. Raises `ResourceError` where this machine has to hold publications and
    cannot."""
    transport = choose_transport(config)
    if transport != "shm":
        return f"{transport}, as asked for: a death is a return to the checkpoint, and ranks keep no copies"
    if config.trainer.lora.publishes_adapter:
        return "shm: adapters alone, through shared memory, and from node to node by their agents"
    told = ["shm: through shared memory, and from node to node by their agents"]
    if (num_elements := elements_of(config)) is None:
        return f"{told[0]}; how much is known once the model is here"
    size = publication_bytes(num_elements, config.rollout.dtype)
    told.append(f"{_size(size)} a publication, {TURNS} of them on each node with engines")
    if config.trainer.num_gpus_per_rank and config.rollout.num_gpus_per_worker:
        told += [describe_times(way_of(config, size)), describe_wait(config, way_of(config, size))]
    if not is_elsewhere():
        usage = shutil.disk_usage(SHARED_MEMORY)
        told += look_at_room(config, num_elements, SharedMemory(usage.total, usage.free))
    return "; ".join(told)


def way_of(config: RunConfig, num_bytes: int) -> Way:
    """The way of a version. A cluster's nodes are taken to have as many cores as a version can use."""
    cores = MOST_THREADS if is_elsewhere() else len(os.sched_getaffinity(0))
    return Way(
        num_bytes, config.trainer.num_ranks, config.rollout.tensor_parallel_size,
        threads_per_rank=max(1, int(config.cluster.cpus_per_worker)), threads_per_node=min(cores, MOST_THREADS),
    )  # fmt: skip


def describe_times(way: Way) -> str:
    """The seconds that a version takes by each bus, by arithmetic."""
    told = [
        f"{bus}: {way.on_one_node_s(bus):.2g} s a publication, {way.between_nodes_s(bus):.2g} s to other nodes, then a "
        f"pause of {way.paused_s(bus):.2g} s an engine"
        for bus in BUSES
    ]
    return f"by arithmetic, {'; '.join(told)}"


def describe_wait(config: RunConfig, way: Way) -> str:
    """The part of it that the next step waits for."""
    if config.max_staleness == 0:
        return "the next step waits for all of it (max_staleness=0)"
    if config.trainer.offload:
        return "the next step waits until ranks have written it: weights are in the host's memory (trainer.offload)"
    return f"the next step waits for copies on the GPUs, {way.taken_s:.2g} s of it, and counts once all is written"


def look_at_room(config: RunConfig, num_elements: int, memory: SharedMemory) -> list[str]:
    """What a machine that all of the run is on has no room for, and the promise that lapses with it. Raises
    `ResourceError` if that is the publications."""
    publications = TURNS * publication_bytes(num_elements, config.rollout.dtype)
    if memory.total_bytes < publications:
        raise too_small("This machine", memory.total_bytes, publications)
    if not (config.faults.keep_state and replaces_members(config)) or config.trainer.lora.rank:
        return []
    kept = kept_bytes(num_elements)
    left = max(0, memory.free_bytes - publications)
    if kept <= left:
        return []
    return [
        f"the copies that ranks keep of their state ({_size(kept)}, faults.keep_state) do not fit into the "
        f"{_size(left)} beside: the death of a rank is a return to the newest checkpoint, as is that of a "
        f"trainer's node. To have ranks replaced, {how_to_enlarge(publications + kept)}"
    ]


def elements_of(config: RunConfig) -> int | None:
    """Number of elements of the policy's tensors; None for a model that is not here."""
    model = starting_model_config(config)
    return num_parameters(model.fresh) if model.path is None else stored_elements(model.path)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**8 else f"{num_bytes / 1e6:.1f} MB"
