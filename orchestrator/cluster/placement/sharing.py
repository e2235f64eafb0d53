"""Actors that share a device: rank i and engine i, where they take turns (`placement=colocated`) or weights are handed
over in the memory of one GPU (`weights.transport=ipc`).

`assignment.py` keeps them on one node, and `reservation.py` reserves one GPU for both. `colocation.py` decides when
each has it.
"""

from collections.abc import Sequence

from penstock.conf.run import RunConfig
from penstock.conf.weights import choose_transport
from penstock.orchestrator.cluster.placement.actors import ActorPlan

ROLES = ("trainer", "rollout")


def pairs(plan: Sequence[ActorPlan], config: RunConfig) -> list[list[ActorPlan]]:
    """Actors that belong together, by rank; empty where none do. The last ones may be alone, where there are more
    engines than ranks or fewer."""
    members = [actor for actor in plan if actor.role in ROLES]
    if not members or (config.placement != "colocated" and choose_transport(config) != "ipc"):
        return []
    together: list[list[ActorPlan]] = [[] for _ in range(1 + max(actor.rank for actor in members))]
    for actor in members:
        together[actor.rank].append(actor)
    return together


def plan_sharing(plan: Sequence[ActorPlan], config: RunConfig) -> list[list[ActorPlan]]:
    """Actors that share a GPU, one list a GPU; empty where none has one."""
    return pairs([actor for actor in plan if actor.num_gpus], config)
