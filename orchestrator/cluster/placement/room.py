"""The room that is left on a node while it is filled, in Ray's own units, so that sums of parts come out even."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.nodes import Node

UNIT = 10_000
"""Number of units in one CPU or GPU: Ray counts in these parts."""
UNLIMITED = 1 << 40


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
