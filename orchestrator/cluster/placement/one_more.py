"""The place of an actor that joins a run, or has lost its node. Pure: from what is free on the cluster's nodes now.

engines   a node without ranks, if one has room; of these one with the fewest engines, then with the most room
ranks     a node with ranks: those of a node that has left stay together
others    a node with engines, whose rows they read; of these one with the fewest of them
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.conf.cluster import ClusterConfig
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.cluster.placement.room import Need, Room

RANKS = ("trainer", "scorer")


def next_of(plan: Sequence[ActorPlan], role: str, stage: str | None, names: Sequence[str]) -> ActorPlan:
    """The plan of one more actor like those of a role and stage. `names`: all ever used: none is used again."""
    like = next(actor for actor in plan if actor.role == role and actor.stage == stage)
    kind = like.name.rpartition("-")[0]
    taken = {*names, *(actor.name for actor in plan)}
    numbers = [int(name.rpartition("-")[2]) for name in taken if name.rpartition("-")[0] == kind]
    number = 1 + max(numbers)
    return replace(like, name=f"{kind}-{number}", rank=number, joins=True)


def open_nodes(role: str, nodes: Sequence[Node], config: ClusterConfig) -> list[Node]:
    """Nodes that the role may be on. A node that `cluster.nodes` names and that has left is not among them."""
    chosen = [node for node in nodes if not config.nodes or any(node.is_called(name) for name in config.nodes)]
    return [node for node in chosen if node.has(config.labels.get(role, {}))]


def place_one(actor: ActorPlan, free: Sequence[Node], roles_on: Mapping[str, Sequence[str]]) -> Node | None:
    """The node for an actor; None where it fits nowhere. `free`: nodes that it may be on, with what is not reserved.
    `roles_on`: roles of the run's actors on each node, by its id."""
    need = Need.of([actor])
    rooms = [room for room in map(Room.of, free) if room.fits(need)]

    def preference(room: Room) -> tuple[bool, int, int]:
        roles = roles_on.get(room.node.id, ())
        has_ranks, has_engines = any(role in RANKS for role in roles), "rollout" in roles
        is_second = has_ranks if actor.role == "rollout" else not (has_ranks if actor.role in RANKS else has_engines)
        return is_second, roles.count(actor.role), -room.times(need)

    best = min(rooms, key=preference, default=None)
    return best.node if best is not None else None


def num_more(actor: ActorPlan, free: Sequence[Node]) -> int:
    """Number of such actors that fit at the same time. One that reserves nothing fits any number of times."""
    need = Need.of([actor])
    return sum(Room.of(node).times(need) for node in free)


def engines_to_add(plan: Sequence[ActorPlan], free: Sequence[Node], config: RunConfig) -> int:
    """Number of engines to add for `rollout.num_workers=auto`: as many as there is room for, but no more than there are
    groups under way at a time: one more would have nothing to do. `free`: the cluster's nodes, with what is not
    reserved."""
    engines = [actor for actor in plan if actor.role == "rollout"]
    if not engines:
        return 0
    room = num_more(engines[0], open_nodes("rollout", free, config.cluster))
    return max(0, min(room, config.max_active_groups - len(engines)))
