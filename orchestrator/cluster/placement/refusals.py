"""Errors for actors that cannot be placed on the present nodes, with the key to change."""

from collections.abc import Sequence

from penstock.conf.cluster import ClusterConfig
from penstock.conf.errors import ResourceError, suggest
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.filling import UNIT, Need, NoRoom, Room, Unit
from penstock.orchestrator.cluster.placement.nodes import NODE_ID, Node, titles

KEYS = {
    "rollout": "rollout.num_workers, rollout.num_gpus_per_worker, rollout.tensor_parallel_size or "
    "cluster.cpus_per_worker",
    "trainer": "trainer.num_ranks, trainer.num_gpus_per_rank or cluster.cpus_per_worker",
    "scorer": "trainer.num_ranks, trainer.num_gpus_per_rank or cluster.cpus_per_worker",
    "reward": "reward.num_workers, reward.judge.num_gpus or reward.cpus_per_worker (0 reserves none)",
    "environment": "environment.num_workers or environment.cpus_per_worker (0 reserves none)",
}
"""Keys that an actor's reservation depends on, by role. Other roles reserve nothing."""


def chosen_nodes(nodes: Sequence[Node], config: ClusterConfig) -> list[Node]:
    """The nodes of `cluster.nodes`; all nodes where it is empty."""
    for name in config.nodes:
        if not any(node.is_called(name) for node in nodes):
            known = sorted({name for node in nodes for name in (node.name, node.address)})
            raise ResourceError(f"cluster.nodes: the cluster has no node {name!r}{suggest(name, known)}")
    return [node for node in nodes if not config.nodes or any(node.is_called(name) for name in config.nodes)]


def check_labels(actors: Sequence[ActorPlan], nodes: Sequence[Node], config: ClusterConfig) -> None:
    """Refuse a label that none of the nodes has, and labels that none has together."""
    for role in dict.fromkeys(actor.role for actor in actors):
        wanted = config.labels.get(role, {})
        what = f"cluster.labels.{role}={_labels(wanted)}"
        known = {f"{key}={value}" for node in nodes for key, value in node.labels.items() if key != NODE_ID}
        for label in (f"{key}={value}" for key, value in wanted.items()):
            if label not in known:
                hint = suggest(label, known) if known else ". No node has any."
                raise ResourceError(
                    f"{what}: no node has {label}{hint} A node gets labels when it is started: `ray start --labels "
                    f"{label} …`."
                )
        if not any(node.has(wanted) for node in nodes):
            raise ResourceError(f"{what}: no node has all of them together. {_labels_of(nodes)}.")


def check_widths(actors: Sequence[ActorPlan], nodes: Sequence[Node], config: RunConfig) -> None:
    """Refuse an actor that none of its nodes could hold, even if it were empty."""
    alike = {(actor.role, Need.of([actor])): actor for actor in reversed(actors)}
    for actor in reversed(alike.values()):
        rooms = [Room.of(node) for node in nodes if node.has(config.cluster.labels.get(actor.role, {}))]
        need, whose = Need.of([actor]), _whose(actor, config)
        if not any(room.fits(need) for room in rooms):
            raise ResourceError(
                f"{actor.name} wants {_amount(need)} on one node, and the largest of {whose} has "
                f"{_left(_freest(rooms, [actor]), need)}. Lower {KEYS[actor.role]}, or use larger nodes."
            )


def refusal(error: NoRoom, nodes: Sequence[Node], config: RunConfig) -> ResourceError:
    """The error for what fits in sum, but not node by node."""
    unit, names, rooms = error.units[0], titles(nodes), error.rooms
    need, whose = Need.of(unit), _whose(unit[0], config)
    keys = " or ".join(dict.fromkeys(KEYS[actor.role] for actor in unit if actor.role in KEYS))
    who = " and ".join(actor.name for actor in unit)
    if not rooms:
        return ResourceError(
            f"{who} share a device, and no node has the labels of both. Mend "
            f"{' or '.join(f'cluster.labels.{actor.role}' for actor in unit)}."
        )
    if len(error.units) == 1:
        freest = _freest(rooms, unit)
        return ResourceError(
            f"{who} wants {_amount(need)} on one node; the freest of {whose} has {_left(freest, need)} left "
            f"({names[freest.node.id]}), beside others of the run. Lower {keys}, or use more nodes."
        )
    last = " and ".join(actor.name for actor in error.units[-1])
    places = ", ".join(f"{names[room.node.id]} {room.times(need)}" for room in rooms)
    total = sum(room.times(need) for room in rooms)
    return ResourceError(
        f"{who} to {last}: {len(error.units)} times {_amount(need)}, each on one node, and {whose} have room for "
        f"{total} ({places}). Lower {keys}, or use more nodes."
    )


def _whose(actor: ActorPlan, config: RunConfig) -> str:
    """The nodes that an actor may have, in words."""
    labels = config.cluster.labels.get(actor.role)
    if labels:
        return f"the nodes with {_labels(labels)} (cluster.labels.{actor.role})"
    return f"{', '.join(config.cluster.nodes)} (cluster.nodes)" if config.cluster.nodes else "the cluster's nodes"


def _freest(rooms: Sequence[Room], unit: Unit) -> Room:
    """The room with most left of what the unit needs: GPUs if it needs any, else CPUs."""
    by_gpus = any(actor.num_gpus for actor in unit)
    return max(rooms, key=lambda room: (sum(room.devices), room.cpus) if by_gpus else (room.cpus, 0))


def _amount(need: Need) -> str:
    parts = [f"{units / UNIT:g} {kind}(s)" for units, kind in ((need.gpus, "GPU"), (need.cpus, "CPU")) if units]
    return " and ".join(parts) or "nothing"


def _left(room: Room, need: Need) -> str:
    """The amount that is left in a room of what is needed, in words."""
    kinds = ((need.gpus, sum(room.devices), "GPU"), (need.cpus, room.cpus, "CPU"))
    return " and ".join(f"{left / UNIT:g} {kind}(s)" for wanted, left, kind in kinds if wanted)


def _labels(labels: object) -> str:
    return str(labels).replace("'", "")


def _labels_of(nodes: Sequence[Node]) -> str:
    names = titles(nodes)
    own = {
        names[node.id]: ", ".join(f"{key}={value}" for key, value in node.labels.items() if key != NODE_ID)
        for node in nodes
    }
    return "; ".join(f"{name} has {labels or 'none'}" for name, labels in own.items())
