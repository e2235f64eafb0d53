"""A run's nodes and the publications of its weights: a node whose shared memory cannot hold them is refused before any
model is loaded, or before it joins. Pure.
"""

from collections.abc import Mapping, Sequence

from penstock.conf.errors import ResourceError
from penstock.conf.run import RunConfig
from penstock.conf.weights import choose_transport
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.workers.node.agent import NodeFacts
from penstock.workers.weights.publication.room import (
    how_to_enlarge,
    needed_on_node,
    publication_bytes,
    stored_elements,
)


def bytes_published(config: RunConfig, model_path: str) -> int:
    """Bytes of each publication of the whole model in shared memory; 0 for none, and where it is not known yet."""
    if config.trainer.lora.publishes_adapter or choose_transport(config) != "shm":
        return 0
    return publication_bytes(stored_elements(model_path) or 0, config.rollout.dtype)


def check_room(
    facts: Mapping[str, NodeFacts], node_of: Mapping[str, str], plan: Sequence[ActorPlan], num_bytes: int
) -> None:
    """Raise `ResourceError` for the first node that is too small for publications of `num_bytes`. `node_of`: node of
    each actor. Nodes that share their memory have the same file; the size of the file system counts, since what others
    use of it now may be free when it is needed."""
    has_engines = any(actor.role == "rollout" for actor in plan)
    if not num_bytes or not has_engines:
        return
    of_memory: dict[str, list[str]] = {}
    for node, fact in facts.items():
        of_memory.setdefault(fact.memory, []).append(node)
    num_ranks = sum(actor.role == "trainer" for actor in plan)
    for nodes in of_memory.values():
        here = [actor.role for actor in plan if node_of.get(actor.name) in nodes]
        if {"rollout", "trainer"} & set(here):
            needed = needed_on_node(num_bytes, here.count("trainer"), num_ranks, has_engines="rollout" in here)
            if (fact := facts[nodes[0]]).shared_memory.total_bytes < needed:
                where = f"Node {fact.host} ({fact.address.host})"
                raise too_small(where, fact.shared_memory.total_bytes, needed)


def too_small(where: str, total_bytes: int, needed_bytes: int) -> ResourceError:
    """The refusal of a node. `where`: which one, for people."""
    return ResourceError(
        f"{where} has {total_bytes:,} bytes of shared memory (/dev/shm), and two publications of the weights need "
        f"{needed_bytes:,} there: {how_to_enlarge(needed_bytes)}. Or set weights.transport=nccl, with a GPU for each "
        "engine and rank, which needs none, but has every death return to the checkpoint."
    )
