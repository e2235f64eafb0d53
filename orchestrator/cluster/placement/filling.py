"""Fills nodes with the actors of a run, kind by kind: one of the ways that `assignment.py` tries. Pure.

The room that is left on a node is counted in Ray's own units, so that sums of parts come out even.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.nodes import Node

UNIT = 10_000
"""Number of units in one CPU or GPU: Ray counts in these parts."""
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
        `tight`: the smallest nodes that suffice are taken, so that larger ones stay whole for others."""
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
