"""Assigns each actor of a run to a node, and one that joins later. Pure: from the plan, the cluster's nodes and the
configuration.

    Store, Prompts     on the driver's node (the controller is the driver)
    ranks              of the trainer, then of each scorer: on few nodes, filled one after the other in rank order
    engines            each on one node, spread: the next goes where the most room is
    Reward-i, Environment-i, Compute
                       on the engines' nodes in turn, where the rows are that they read

Ranks and engines share a node only where they must, or share devices (`pairs`: rank i and engine i are on one node).
`cluster.nodes` and `cluster.labels` say which nodes may be taken. Several ways to fill the nodes are tried, preferred
ones first, since what one kind takes may be all that another could have. If none works, the refusal is that of the
simplest. `reservation.py` makes Ray keep to the assignment.

An actor that joins, or has lost its node, gets one by what is free then:

    engines            a node without ranks, if one has room; of these one with the fewest engines, then with most room
    ranks              a node with ranks: those of a node that has left stay together
    others             a node with engines, whose rows they read; of these one with the fewest of them
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from penstock.conf.cluster import ClusterConfig
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import ActorPlan, check_fits, pairs
from penstock.orchestrator.cluster.placement.filling import Filling, Need, NoRoom, Room
from penstock.orchestrator.cluster.placement.nodes import Node, in_order, titles
from penstock.orchestrator.cluster.placement.refusals import check_labels, check_widths, chosen_nodes, refusal

RANKS, ENGINES, REWARDS, COMPUTE = "ranks", "engines", "rewards", "compute"
ORDERS = ((RANKS, ENGINES, REWARDS), (ENGINES, RANKS, REWARDS), (REWARDS, RANKS, ENGINES))
"""Orders in which the kinds are placed."""
OF_RANKS = ("trainer", "scorer")
"""Roles of ranks."""


@dataclass(frozen=True)
class Assignment:
    """An assignment: every actor of a plan on its node."""

    nodes: tuple[Node, ...]
    """Nodes that take part: the driver's first, then the others that have an actor, by address."""
    node_of: Mapping[str, Node]
    """Node of each actor, by the actor's name, in the plan's order."""

    @property
    def titles(self) -> dict[str, str]:
        """The name that people read of each actor's node, by the actor's name."""
        known = titles(self.nodes)
        return {name: known[node.id] for name, node in self.node_of.items()}

    def with_one(self, name: str, node: Node) -> "Assignment":
        """The assignment with one more actor."""
        is_known = any(other.id == node.id for other in self.nodes)
        return Assignment(self.nodes if is_known else (*self.nodes, node), {**self.node_of, name: node})

    def without(self, name: str) -> "Assignment":
        """The assignment with one actor less. Its node still takes part."""
        return Assignment(self.nodes, {other: node for other, node in self.node_of.items() if other != name})

    def names_on(self, node: Node) -> list[str]:
        """Names of the actors on a node, in the plan's order."""
        return [name for name, its in self.node_of.items() if its.id == node.id]


def assign(actors: Sequence[ActorPlan], nodes: Sequence[Node], config: RunConfig) -> Assignment:
    """Assign actors to nodes. `nodes`: the driver's first; the order of the others changes nothing.

    Raises `ResourceError` naming what does not fit, and the key to change.
    """
    nodes = in_order(nodes, nodes[0].id)
    chosen = chosen_nodes(nodes, config.cluster)
    check_labels(actors, chosen, config.cluster)
    if len(chosen) > 1:
        check_widths(actors, chosen, config)
    where = "what cluster.nodes names has" if config.cluster.nodes else "the cluster has"
    check_fits(actors, sum(node.cpus for node in chosen), sum(node.gpus for node in chosen), where)
    plainest = None
    for apart, order, tight in product((True, False), ORDERS, (False, True)):
        filling = Filling(chosen, config.cluster.labels, apart=apart, tight=tight)
        try:
            _fill(filling, order, actors, nodes[0], config)
        except NoRoom as error:
            if not apart and plainest is None:
                plainest = error
        else:
            return _assignment(actors, nodes, filling)
    assert plainest is not None
    raise refusal(plainest, chosen, config)


def _assignment(actors: Sequence[ActorPlan], nodes: Sequence[Node], filling: Filling) -> Assignment:
    rooms = filling.room_of
    node_of = {actor.name: rooms[actor.name].node if actor.name in rooms else nodes[0] for actor in actors}
    taken = {node.id for node in node_of.values()}
    return Assignment(tuple(node for node in nodes if node is nodes[0] or node.id in taken), node_of)


def _fill(filling: Filling, order: Sequence[str], actors: Sequence[ActorPlan], driver: Node, config: RunConfig) -> None:
    """Place all kinds of actors, in an order. Raises `NoRoom`."""
    of_kind: dict[str, Callable[[], None]] = {
        RANKS: lambda: _place_ranks(filling, actors, config),
        ENGINES: lambda: _place_engines(filling, actors, config),
        REWARDS: lambda: _place_near_rows(filling, ("reward", "environment"), actors, driver),
        COMPUTE: lambda: _place_near_rows(filling, ("compute",), actors, driver),
    }
    for kind in (*order, COMPUTE):
        of_kind[kind]()


def _place_ranks(filling: Filling, actors: Sequence[ActorPlan], config: RunConfig) -> None:
    """Place the ranks, and the engines that share their devices."""
    blocks = (config.trainer.shard_size, config.trainer.ranks_per_row)
    together = pairs(actors, config)
    size = max((sum(actor.role == "trainer" for actor in unit) for unit in together), default=1)
    own = [actor for actor in actors if actor.role == "trainer"]
    filling.gang(together or [[actor] for actor in own], [block // (size or 1) for block in blocks])
    for stage in dict.fromkeys(actor.stage for actor in actors if actor.role == "scorer"):
        filling.gang([[actor] for actor in actors if actor.role == "scorer" and actor.stage == stage], blocks)


def _place_engines(filling: Filling, actors: Sequence[ActorPlan], config: RunConfig) -> None:
    if not pairs(actors, config):
        filling.spread([actor for actor in actors if actor.role == "rollout"])


def _place_near_rows(filling: Filling, roles: Sequence[str], actors: Sequence[ActorPlan], driver: Node) -> None:
    """Place actors near the rows that they read, which come from the engines; those of a dataset, from the prompts.
    Each role begins with the first node."""
    engines = [actor.name for actor in actors if actor.role == "rollout"]
    near = filling.nodes_of(engines) or [driver]
    for role in roles:
        for index, actor in enumerate(actor for actor in actors if actor.role == role):
            start = index % len(near)
            filling.near(actor, near[start:] + near[:start])


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
        has_ranks, has_engines = any(role in OF_RANKS for role in roles), "rollout" in roles
        is_second = has_ranks if actor.role == "rollout" else not (has_ranks if actor.role in OF_RANKS else has_engines)
        return is_second, roles.count(actor.role), -room.times(need)

    best = min(rooms, key=preference, default=None)
    return best.node if best is not None else None


def num_more(actor: ActorPlan, free: Sequence[Node]) -> int:
    """Number of such actors that fit at the same time. One that reserves nothing fits any number of times."""
    need = Need.of([actor])
    return sum(Room.of(node).times(need) for node in free)


def engines_to_add(plan: Sequence[ActorPlan], free: Sequence[Node], config: RunConfig, received: int = 0) -> int:
    """Number of engines to add for `rollout.num_workers=auto`: as many as there is room for, up to
    `config.max_engines`. `free`: the cluster's nodes, with what is not reserved. `received`: engines that the run has
    reserved room for already."""
    engines = [actor for actor in plan if actor.role == "rollout"]
    if not engines:
        return 0
    room = received + num_more(engines[0], open_nodes("rollout", free, config.cluster))
    return max(0, min(room, config.max_engines - len(engines)))
