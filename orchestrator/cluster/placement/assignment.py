"""Assigns each actor of a run to a node, and one that joins later, or refuses, naming the key to change. Pure: from the
plan, the cluster's nodes and the configuration.

    Store, Prompts     on the driver's node (the controller is the driver)
    ranks              of the trainer, then of each scorer: on few nodes, filled one after the other in rank order
    engines            each on one node, spread: the next goes where the most room is
    Reward-i, Environment-i, Compute
                       on the engines' nodes in turn, where the rows are that they read

Ranks and engines share a node only where they must, or share devices (`pairs`: rank i and engine i are on one node).
`cluster.nodes` and `cluster.labels` say which nodes may be taken. Several ways to fill the nodes are tried (`Filling`),
preferred ones first, since what one kind takes may be all that another could have. If none works, the refusal is that
of the simplest. `reservation.py` makes Ray keep to the assignment.

An actor that joins, or has lost its node, gets one by what is free then:

    engines            a node without ranks, if one has room; of these one with the fewest engines, then with most room
    ranks              a node with ranks: those of a lost node stay together
    all other roles    a node with engines, whose rows they read; of these one with the fewest of the role

A node whose shared memory cannot hold the publications of the weights is refused before any model is loaded, or before
it joins (`check_room`). Room on a node is counted in Ray's own units, so that sums of parts come out even.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from penstock.conf.cluster import ClusterConfig
from penstock.conf.errors import ResourceError, suggest
from penstock.conf.run import RunConfig
from penstock.conf.weights import choose_transport
from penstock.orchestrator.cluster.placement.actors import UNIT, ActorPlan, check_fits, pairs
from penstock.orchestrator.cluster.placement.nodes import NODE_ID, Node, in_order, titles
from penstock.workers.node.node_agent import NodeFacts
from penstock.workers.weights.publication.costs import (
    TURNS,
    how_to_enlarge,
    node_bytes,
    publication_bytes,
    stored_elements,
)

UNLIMITED = 1 << 40
Unit = Sequence[ActorPlan]
"""Actors that go to one node, on one device if they have part of one."""
COMPUTING = {"trainer": "rank", "scorer": "rank", "rollout": "engine"}
"""Kinds of actors that compute for long, by role: two kinds are on one node only where they must."""


class Need(NamedTuple):
    """The need of one actor, or of those that go together, in units. GPUs are whole ones, or a part of a single one."""

    cpus: int
    gpus: int

    @classmethod
    def of(cls, actors: Iterable[ActorPlan]) -> "Need":
        """The need of actors together: a GPU that they share is one."""
        actors = list(actors)
        return cls(round(UNIT * sum(a.num_cpus for a in actors)), round(UNIT * sum(a.num_gpus for a in actors)))


@dataclass
class Room:
    """Lifecycle: `of` a node, `take` as long as it `fits`."""

    node: Node
    cpus: int
    devices: list[int]
    """Units that are left of each GPU."""

    @classmethod
    def of(cls, node: Node) -> "Room":
        whole, part = divmod(round(UNIT * node.gpus), UNIT)
        return cls(node, round(UNIT * node.cpus), [UNIT] * whole + [part] * bool(part))

    def fits(self, need: Need) -> bool:
        return self.times(need) > 0

    def times(self, need: Need) -> int:
        """Number of such needs that fit."""
        by_cpus = self.cpus // need.cpus if need.cpus else UNLIMITED
        return min(by_cpus, self._times_on_devices(need.gpus))

    def with_all(self, needs: Iterable[Need]) -> "Room | None":
        """The room that would be left with all needs taken; None if not all of them fit."""
        left = Room(self.node, self.cpus, list(self.devices))
        for need in needs:
            if not left.fits(need):
                return None
            left.take(need)
        return left

    def take(self, need: Need) -> None:
        assert self.fits(need)
        self.cpus -= need.cpus
        whole = math.ceil(need.gpus / UNIT) if need.gpus >= UNIT else 0
        for _ in range(whole):
            self.devices.remove(UNIT)
        if need.gpus and not whole:  # the fullest one that has it, as Ray does
            smallest = min(left for left in self.devices if left >= need.gpus)
            self.devices[self.devices.index(smallest)] -= need.gpus

    def _times_on_devices(self, gpus: int) -> int:
        if not gpus:
            return UNLIMITED
        if gpus >= UNIT:
            return self.devices.count(UNIT) // math.ceil(gpus / UNIT)
        return sum(left // gpus for left in self.devices)


class NoRoom(Exception):
    """The error of a way that does not work: `units` are not placed, and `rooms` are as they were before these."""

    def __init__(self, units: Sequence[Unit], rooms: Sequence[Room]) -> None:
        super().__init__(units, rooms)
        self.units, self.rooms = units, rooms


class Filling:
    """Lifecycle: made over empty nodes, in the order of preference; `gang`, `spread` and `near` for each kind of
    actors; then `room_of` has all of them. Each raises `NoRoom`."""

    def __init__(self, nodes: Sequence[Node], labels: Mapping[str, Mapping[str, str]], *, apart: bool, tight: bool):
        """`labels`: what the nodes of a role must have. `apart`: no engine beside a rank, unless they share a device.
        `tight`: the smallest nodes that suffice are taken, so that larger ones stay whole for later actors."""
        self.room_of: dict[str, Room] = {}
        """Room of each placed actor, by the actor's name."""
        self._rooms = [Room.of(node) for node in nodes]
        self._room_of_node = {room.node.id: room for room in self._rooms}
        self._labels, self._apart, self._tight = labels, apart, tight
        self._kinds: dict[str, set[str]] = {node.id: set() for node in nodes}
        """Kinds of actors that compute on each node, by node id."""

    def gang(self, units: Sequence[Unit], blocks: Sequence[int] = ()) -> None:
        """Place units in their order, node by node, on few nodes. `blocks`: so many in a row stay together if that is
        possible, or else as many as the next number says."""
        if not units:
            return
        rooms = self._open_to(units[0])
        for size in dict.fromkeys((*filter(None, blocks), 1)):
            chunks = [units[start : start + size] for start in range(0, len(units), size)]
            for choice in self._choices(chunks, rooms):
                if (places := _in_sequence(chunks, choice)) is not None:
                    for unit, room in zip(units, places, strict=True):
                        self._take(unit, room)
                    return
        raise NoRoom(units, rooms)

    def spread(self, actors: Sequence[ActorPlan]) -> None:
        """Place like actors: each where the most room is; where that is the same, where the fewest of them are."""
        if not actors:
            return
        need, kind, rooms = Need.of(actors[:1]), self._kind(actors[:1]), self._open_to(actors[:1])
        counts: Counter[str] = Counter()

        def preference(room: Room) -> tuple[int, ...]:
            shared, count, times = self._is_shared(room, kind), counts[room.node.id], room.times(need)
            return (not times, shared, not count, times) if self._tight else (not times, shared, -times, count)

        preferences = [preference(room) for room in rooms]
        for actor in actors:
            place = min(range(len(rooms)), key=preferences.__getitem__, default=None)
            if place is None or not rooms[place].fits(need):
                raise NoRoom([[actor]], rooms)
            self._take([actor], rooms[place])
            counts[rooms[place].node.id] += 1
            preferences[place] = preference(rooms[place])

    def near(self, actor: ActorPlan, nodes: Sequence[Node]) -> None:
        """Place an actor on the first of `nodes` that has room, or else where the most room is."""
        need, labels = Need.of([actor]), self._labels.get(actor.role, {})
        rooms = (self._room_of_node[node.id] for node in nodes if node.id in self._room_of_node and node.has(labels))
        room = next((room for room in rooms if room.fits(need)), None)
        if room is None:
            open_to = self._open_to([actor])
            room = max(open_to, key=lambda room: room.times(need), default=None)
            if room is None or not room.fits(need):
                raise NoRoom([[actor]], open_to)
        self._take([actor], room)

    def nodes_of(self, names: Sequence[str]) -> list[Node]:
        """Nodes of the named actors that have been placed, in the order of the actors, each node once."""
        nodes = [self.room_of[name].node for name in names if name in self.room_of]
        return list({node.id: node for node in nodes}.values())

    def _open_to(self, unit: Unit) -> list[Room]:
        """Rooms that these actors may have, also full ones. Those without the other kind come first."""
        wanted = [self._labels.get(actor.role, {}) for actor in unit]
        rooms = [room for room in self._rooms if all(room.node.has(labels) for labels in wanted)]
        kind = self._kind(unit)
        if self._apart:
            return [room for room in rooms if not self._is_shared(room, kind)]
        return sorted(rooms, key=lambda room: self._is_shared(room, kind))

    def _choices(self, chunks: Sequence[Sequence[Unit]], rooms: Sequence[Room]) -> Iterator[Sequence[Room]]:
        """Sequences of rooms to try, those of the fewest rooms first."""
        need, size = Need.of(chunks[0][0]), len(chunks[0])
        times = {room.node.id: room.times(need) // size for room in rooms}
        if self._tight:
            rooms = sorted(rooms, key=lambda room: times[room.node.id])
        yield from ([room] for room in rooms)
        yield _fewest(rooms, times, len(chunks))
        yield sorted(rooms, key=lambda room: -times[room.node.id])
        yield rooms

    def _take(self, unit: Unit, room: Room) -> None:
        room.take(Need.of(unit))
        for actor in unit:
            self.room_of[actor.name] = room
        self._kinds[room.node.id] |= {self._kind([actor]) for actor in unit} - {""}

    def _kind(self, unit: Unit) -> str:
        """The kind of a unit; empty for actors that share a device."""
        kinds = {COMPUTING.get(actor.role, "") for actor in unit}
        return kinds.pop() if len(kinds) == 1 else ""

    def _is_shared(self, room: Room, kind: str) -> bool:
        return bool(kind and self._kinds[room.node.id] - {kind})


def _fewest(rooms: Sequence[Room], times: Mapping[str, int], wanted: int) -> list[Room]:
    """The fewest rooms that hold `wanted`; of such choices, the first in order."""
    sizes = sorted(times[room.node.id] for room in rooms)
    most = next((count for count in range(1, len(sizes) + 1) if sum(sizes[-count:]) >= wanted), 0)
    taken: list[Room] = []
    for room in rooms:
        size = times[room.node.id]
        del sizes[bisect_left(sizes, size)]
        left = most - len(taken) - 1
        if left >= 0 and size and size + sum(sizes[len(sizes) - left :]) >= wanted:
            taken.append(room)
            wanted -= size
    return taken


def _in_sequence(chunks: Sequence[Sequence[Unit]], rooms: Sequence[Room]) -> list[Room] | None:
    """A room for each unit: one room is filled, then the next. None if they do not hold all."""
    places: list[Room] = []
    index, trial = -1, None
    for chunk in chunks:
        while trial is None or (filled := trial.with_all(Need.of(unit) for unit in chunk)) is None:
            index += 1
            if index == len(rooms):
                return None
            trial = rooms[index]
        trial = filled
        places += [rooms[index]] * len(chunk)
    return places


RANKS, ENGINES, REWARDS, COMPUTE = "ranks", "engines", "rewards", "compute"
ORDERS = ((RANKS, ENGINES, REWARDS), (ENGINES, RANKS, REWARDS), (REWARDS, RANKS, ENGINES))
"""Orders in which the kinds are placed."""
OF_RANKS = ("trainer", "scorer")
"""Roles of ranks."""


@dataclass(frozen=True)
class Assignment:
    """An assignment: every actor of a plan on its node."""

    nodes: tuple[Node, ...]
    """Nodes that take part: the driver's first, then those that have an actor, by address."""
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
    """Assign actors to nodes. `nodes`: the driver's first; the order of the rest changes nothing.

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
    """Place the ranks, and the engines and scorers that share their devices."""
    blocks = (config.trainer.shard_size, config.trainer.ranks_per_row)
    together = pairs(actors, config)
    size = max((sum(actor.role == "trainer" for actor in unit) for unit in together), default=1)
    own = [actor for actor in actors if actor.role == "trainer"]
    filling.gang(together or [[actor] for actor in own], [block // (size or 1) for block in blocks])
    apart = [actor for actor in actors if actor.role == "scorer" and actor.name not in filling.room_of]
    for stage in dict.fromkeys(actor.stage for actor in apart):
        filling.gang([[actor] for actor in apart if actor.stage == stage], blocks)


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


KEYS = {
    "rollout": "rollout.num_workers, rollout.num_gpus_per_worker, rollout.tensor_parallel_size or "
    "cluster.cpus_per_worker",
    "trainer": "trainer.num_ranks, trainer.num_gpus_per_rank or cluster.cpus_per_worker",
    "scorer": "trainer.scorer_ranks, trainer.num_scorer_ranks, trainer.num_gpus_per_rank or cluster.cpus_per_worker",
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


def bytes_published(config: RunConfig, model_path: str) -> int:
    """Bytes of each publication of the whole model, or models, in shared memory; 0 for none, and where it is not known
    yet."""
    if config.trainer.lora.publishes_adapter or choose_transport(config) != "shm":
        return 0
    paths = config.own_models(model_path).values() or [model_path]
    return publication_bytes(sum(stored_elements(path) or 0 for path in paths), config.rollout.dtype)


def check_room(
    facts: Mapping[str, NodeFacts],
    node_of: Mapping[str, str],
    plan: Sequence[ActorPlan],
    num_bytes: int,
    num_publications: int = TURNS,
) -> None:
    """Raise `ResourceError` for the first node that is too small for publications of `num_bytes`. `node_of`: node of
    each actor. `num_publications`: those on a node with engines. Nodes that share their memory have the same file; the
    size of the file system counts, since what others use of it now may be free when it is needed."""
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
            count = num_publications if "rollout" in here else 0
            needed = node_bytes(num_bytes, here.count("trainer"), num_ranks, count)
            if (fact := facts[nodes[0]]).shared_memory.total_bytes < needed:
                where = f"Node {fact.host} ({fact.address.host})"
                raise too_small(where, fact.shared_memory.total_bytes, needed, count or TURNS)


def too_small(where: str, total_bytes: int, needed_bytes: int, num_publications: int) -> ResourceError:
    """The refusal of a node. `where`: which one, for people."""
    return ResourceError(
        f"{where} has {total_bytes:,} bytes of shared memory (/dev/shm), and {num_publications} publications of "
        f"the weights need {needed_bytes:,} there: {how_to_enlarge(needed_bytes)}. Or set weights.transport=nccl, with "
        "a GPU for each engine and rank, which needs none, but has every death return to the checkpoint."
    )
