"""`Owner`: the actor that has made all others of a run, so that they outlive the command that drives it.

Ray ends an actor with the process that has made it. This one is detached: it ends by itself once no command has been
heard of for `faults.lease_s`, and all that it has made, reservations too, ends with it, however it ends. It needs no
CPU, and does nothing by itself. What it keeps for the next command are bytes that it cannot read. The command's side is
in `owners.py`; what is kept is decided in `membership/`.

take ─▶ epoch 1 ─ renew, renew, … silence ─▶ take ─▶ epoch 2 ─ …        an older epoch is refused
                                     └─ for longer than the lease ─▶ over: no process takes it any more
"""

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from penstock.store.epoch import taken_over

LOOK_S = 0.5
"""Seconds between two looks whether the lease is over."""


class Tenure:
    """The processes that drive a run, one after the other, each with an epoch of its own. Pure: time is an argument.

    Lifecycle: `take` by each process that drives the run; it may then `renew`, until the next one takes it.

    >>> tenure = Tenure(lease_s=60.0)
    >>> first = tenure.take(now=0.0)
    >>> tenure.renew(first, now=50.0)
    >>> tenure.is_over(now=100.0), tenure.is_over(now=120.0)
    (False, True)
    """

    def __init__(self, lease_s: float) -> None:
        """`lease_s`: how long the process that drives the run may be silent."""
        self._lease_s = lease_s
        self.epoch = 0
        """Epoch of the process that drives the run now; 0: none has yet."""
        self._heard = 0.0

    def take(self, now: float) -> int:
        """Give a process that drives the run from now on its epoch."""
        self.epoch += 1
        self._heard = now
        return self.epoch

    def check(self, epoch: int) -> None:
        """Raise `TakenOver` unless the process of that epoch still drives the run."""
        if epoch != self.epoch:
            raise taken_over()

    def renew(self, epoch: int, now: float) -> None:
        """Note that the process is alive. Raises `TakenOver`."""
        self.check(epoch)
        self._heard = now

    def silent_s(self, now: float) -> float:
        """Seconds since the process that drives the run was heard of."""
        return now - self._heard

    def is_over(self, now: float) -> bool:
        return self.silent_s(now) >= self._lease_s


@dataclass(frozen=True)
class Kept:
    """The state that a command has left for the next one."""

    epoch: int
    """Epoch of the next command."""
    state: bytes
    steps: bytes | None
    """The steps that were noted last, if any were."""
    silent_s: float
    """Seconds since the command before was heard of last."""


class OwnerActor:
    """Lifecycle: `begin` by the first command, `take` by each later one; `make`, `reserve`, `keep`, `note` and `renew`
    by the one that drives the run; `leave` when it is over. Ended by being killed."""

    def __init__(self, lease_s: float) -> None:
        self._tenure = Tenure(lease_s)
        self._actors: dict[str, Any] = {}
        self._groups: list[PlacementGroup] = []
        self._state: bytes | None = None
        self._steps: bytes | None = None
        self._ending: asyncio.Task[None] | None = None

    async def begin(self) -> int:
        """Begin the lease. Returns the epoch of the command that has started the owner."""
        self._ending = asyncio.create_task(self._end_with_lease())
        return self._tenure.take(time.monotonic())

    async def take(self) -> Kept | None:
        """Take the run from the command that drove it. None: that has left nothing to go on with."""
        if self._state is None:
            return None
        now = time.monotonic()
        silent_s = self._tenure.silent_s(now)
        return Kept(self._tenure.take(now), self._state, self._steps, silent_s)

    async def renew(self, epoch: int) -> None:
        """Renew the lease: the command is alive. Raises `TakenOver`, as everything below does."""
        self._tenure.renew(epoch, time.monotonic())

    async def make(self, epoch: int, cls: type, options: Mapping[str, Any], arguments: Sequence[Any]) -> Any:
        """Make an actor. Returns its handle. `arguments`: references, which this process does not look into."""
        self._tenure.check(epoch)
        handle = actor_class(cls).options(**options).remote(*arguments)
        self._actors[options["name"]] = handle
        return handle

    async def end(self, epoch: int, name: str) -> None:
        """End an actor, for the command that drives the run: what an older one wants is not done. The next command may
        still ask for the handle of one that has ended: it was told of it before."""
        self._tenure.check(epoch)
        if name in self._actors:
            ray.kill(self._actors[name])

    async def reserve(
        self, epoch: int, bundles: list[dict[str, float]], labels: list[dict[str, str]], name: str
    ) -> PlacementGroup:
        self._tenure.check(epoch)
        group = reserved(bundles, labels, name)
        self._groups.append(group)
        return group

    async def keep(self, epoch: int, state: bytes) -> None:
        """Keep the state for a command that takes the run over."""
        self._tenure.check(epoch)
        self._state = state

    async def note(self, epoch: int, steps: bytes) -> None:
        """Note steps that all ranks have made, in place of those before. A command that was not refused may complete
        their rows."""
        self._tenure.check(epoch)
        self._steps = steps

    async def keep_only(self, epoch: int, names: Collection[str], groups: Collection[PlacementGroup]) -> dict[str, Any]:
        """Keep the actors of these names and return them. All others end, and so do other reservations: those of
        members that came or went as the command before died."""
        self._tenure.check(epoch)
        for name in self._actors.keys() - set(names):
            ray.kill(self._actors.pop(name))
        for group in self._groups:
            if group not in groups:
                remove_placement_group(group)
        self._groups = [group for group in self._groups if group in groups]
        return {name: handle for name, handle in self._actors.items() if name in names}

    async def leave(self, epoch: int) -> None:
        """Drop the state: the run is over, or its actors are, and there is nothing to take over any more."""
        self._tenure.check(epoch)
        self._state = None

    async def _end_with_lease(self) -> None:
        while not self._tenure.is_over(time.monotonic()):
            await asyncio.sleep(LOOK_S)
        ray.kill(ray.get_runtime_context().current_actor)


def reserved(bundles: list[dict[str, float]], labels: list[dict[str, str]], name: str) -> PlacementGroup:
    """A placement group that ends with this process, each bundle on a node with its labels."""
    group: PlacementGroup = placement_group(bundles, strategy="PACK", name=name, bundle_label_selector=labels)
    return group


@cache
def actor_class(cls: type) -> Any:
    """The class as Ray's actor class, made once: Ray sends each of these to the cluster once."""
    return ray.remote(cls)
