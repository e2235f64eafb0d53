"""Assigns each actor of a run to a node. Pure: from the plan, the cluster's nodes and the configuration.

    Store, Prompts     on the driver's node (the controller is the driver)
    ranks              of the trainer, then of each scorer: on few nodes, filled one after the other in rank order
    engines            each on one node, spread: the next goes where the most room is
    Reward-i, Environment-i, Compute
                       on the engines' nodes in turn, where the rows are that they read

Ranks and engines share a node only where they must, or share devices (`sharing.py`: rank i and engine i are on one
node). `cluster.nodes` and `cluster.labels` say which nodes may be taken. Several ways to fill the nodes are tried,
preferred ones first, since what one kind takes may be all that another could have. If none works, the refusal is that
of the simplest. `reservation.py` makes Ray keep to the assignment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import ActorPlan, check_fits
from penstock.orchestrator.cluster.placement.filling import Filling, NoRoom
from penstock.orchestrator.cluster.placement.nodes import Node, in_order, titles
from penstock.orchestrator.cluster.placement.refusals import check_labels, check_widths, chosen_nodes, refusal
from penstock.orchestrator.cluster.placement.sharing import pairs

RANKS, ENGINES, REWARDS, COMPUTE = "ranks", "engines", "rewards", "compute"
ORDERS = ((RANKS, ENGINES, REWARDS), (ENGINES, RANKS, REWARDS), (REWARDS, RANKS, ENGINES))
"""Orders in which the kinds are placed."""


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
    filling.gang(together or [[actor] for actor in actors if actor.role == "trainer"], blocks)
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
