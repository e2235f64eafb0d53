"""The owner of a run's actors is the process that has created them: this one, or an actor that outlives it.

Owner         this process, on a Ray that ends with it; for a session
RunOwner      on a cluster: actors live on for `faults.lease_s` when the command dies, for the next one (takeover)
OwnerActor    the actor behind a `RunOwner`, which has created all others of the run

Ray ends an actor with its creator. `OwnerActor` is detached: it ends by itself once no command has been heard of for
`faults.lease_s`, and all that it has created, reservations too, ends with it, however it ends. It needs no CPU and
decides nothing. What it keeps for the next command are bytes that it cannot read (`recovery/takeover.py`).

    take ─▶ epoch 1 ─ renew, renew, … silence ─▶ take ─▶ epoch 2 ─ …        an older epoch is refused
                                         └─ for longer than the lease ─▶ over: no process takes it any more
"""

import asyncio
import contextlib
import pickle
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.conf.errors import DeadlineExceeded, PenstockError, TakenOver, WorkerDied
from penstock.orchestrator.cluster.ray_calls import START, answer, get_all
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
class HandoverState:
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

    async def take(self) -> HandoverState | None:
        """Take the run from the command that drove it. None: it has kept no state, so there is nothing to take over."""
        if self._state is None:
            return None
        now = time.monotonic()
        silent_s = self._tenure.silent_s(now)
        return HandoverState(self._tenure.take(now), self._state, self._steps, silent_s)

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
        still ask for the handle of one that has ended, which is in the state that it read."""
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
        """Keep the actors of these names and return them. Other actors end, and so do other reservations: those of
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


OWNER = "Owner"
"""The owner's name, in the namespace of the run."""
ANSWER_S = 60.0
"""Deadline for an owner that has started to answer."""
RENEWALS = 10
"""Number of renewals within a lease."""
LONGEST_S = 10.0
"""Most seconds between two renewals."""
MANY_CALLS = 1_000


class Owner:
    """Creates actors and reservations that end with it. This base: the process itself, which no other can take over."""

    epoch = 0
    """Number of this command among those that have driven the run with the owner; 0: all ends with this process."""

    def make(self, cls: type, options: Mapping[str, Any], *arguments: Any) -> Any:
        """Make an actor. Returns its handle. `options`: Ray's, the actor's name among them. Blocks for moments."""
        return actor_class(cls).options(**options).remote(*arguments)

    def reserve(self, bundles: list[dict[str, float]], labels: list[dict[str, str]], name: str) -> PlacementGroup:
        """Reserve bundles. `labels`: those of the node that each bundle is to be on."""
        return reserved(bundles, labels, name)

    def end(self, handle: Any) -> None:
        """End an actor of the owner, unless another process has taken it: then it is that one's. Never raises, and
        waits for nothing."""
        with contextlib.suppress(RayError):
            ray.kill(handle)

    def close_all(self, handles: Sequence[Any], grace_s: float) -> None:
        """Have actors close, then end them, also those that did not answer in time. Never raises for dead ones."""
        refs = []
        for handle in handles:
            with contextlib.suppress(RayError):
                refs.append(handle.close.remote())
        with contextlib.suppress(RayError):
            ray.wait(refs, num_returns=len(refs), timeout=grace_s) if refs else None
        for handle in handles:
            self.end(handle)

    async def note(self, steps: Any) -> None:
        """Note steps that all ranks have made, for the next process, before their rows are completed. Raises
        `TakenOver`, `DeadlineExceeded`, `WorkerDied`."""

    async def renew(self) -> None:
        """Renew the lease at once, before what would harm another process that has taken the owner. Raises as `note`
        does."""

    def confirm(self) -> None:
        """Raise `TakenOver` if another process has taken the owner: asked before what would harm that process. An
        owner that is dead is nobody's."""

    def close(self) -> None:
        """End what the owner has made: it is not needed any more."""

    def detach(self) -> None:
        """Give the owner up: another process has taken it."""


class RunOwner(Owner):
    """This process's side of an `Owner`. Until `close` or `detach` a thread renews its lease, whatever else this
    process does.

    Lifecycle: `start` one, or `take` that of a command that has died; then `keep` and `note`; `leave`, `close`.
    """

    def __init__(self, handle: Any, epoch: int, lease_s: float) -> None:
        self._handle, self.epoch = handle, epoch
        self._names: dict[Any, str] = {}
        """Names of the actors in Ray, by handle."""
        self._refusal: TakenOver | None = None
        self._stopped = threading.Event()
        pause_s = min(LONGEST_S, lease_s / RENEWALS)
        threading.Thread(target=self._renew, args=(pause_s,), name="run-lease", daemon=True).start()

    @classmethod
    def start(cls, namespace: str, lease_s: float, timeout_s: float) -> "RunOwner":
        """Start an owner on this node. `timeout_s`: deadline of its process, which is the first of the run. Raises
        `DeadlineExceeded`, `WorkerDied`."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options: dict[str, Any] = {
            "name": OWNER, "namespace": namespace, "lifetime": "detached", "num_cpus": 0,
            "max_concurrency": MANY_CALLS, "scheduling_strategy": here,
        }  # fmt: skip
        handle = actor_class(OwnerActor).options(**options).remote(lease_s)
        try:
            (epoch,) = get_all([(OWNER, handle.begin.remote())], phase=START, timeout_s=timeout_s)
        except BaseException:  # else a detached actor stays
            ray.kill(handle)
            raise
        return cls(handle, epoch, lease_s)

    @classmethod
    def take(cls, namespace: str, lease_s: float) -> "tuple[RunOwner, HandoverState] | None":
        """Take the owner of a run whose command has died, with what that has left. None: there is none, or it has
        kept no state; then the owner ends. Raises `WorkerDied`, and `DeadlineExceeded` for one that does not answer:
        that ends too, or it would keep what the run has reserved."""
        try:
            handle = ray.get_actor(OWNER, namespace=namespace)
        except ValueError:
            return None
        kept: HandoverState | None = None
        try:
            kept = _asked(handle.take.remote())
        finally:
            if kept is None:
                with contextlib.suppress(RayError):
                    ray.kill(handle)
        return (cls(handle, kept.epoch, lease_s), kept) if kept is not None else None

    def make(self, cls: type, options: Mapping[str, Any], *arguments: Any) -> Any:
        refs = [ray.put(argument) for argument in arguments]
        handle = self._ask("make", cls, dict(options), refs)
        self._names[handle] = options["name"]
        return handle

    def reserve(self, bundles: list[dict[str, float]], labels: list[dict[str, str]], name: str) -> PlacementGroup:
        group: PlacementGroup = self._ask("reserve", bundles, labels, name)
        return group

    def end(self, handle: Any) -> None:
        if self._refusal is None:
            with contextlib.suppress(RayError):
                self._handle.end.remote(self.epoch, self._names[handle])

    def confirm(self) -> None:
        with contextlib.suppress(DeadlineExceeded, WorkerDied):
            self._ask("renew")

    def name_of(self, handle: Any) -> str:
        """The name of one of its actors in Ray."""
        return self._names[handle]

    def keep_only(self, names: Collection[str], groups: Collection[PlacementGroup]) -> dict[str, Any]:
        """Handles of the named actors, by name, as far as they were ever made. Other actors and reservations end."""
        found: dict[str, Any] = self._ask("keep_only", list(names), list(groups))
        self._names = {handle: name for name, handle in found.items()}
        return found

    async def keep(self, state: bytes) -> None:
        """Keep the state for the next command. Raises `TakenOver`, `DeadlineExceeded`, `WorkerDied`."""
        await self._tell("keep", state)

    async def note(self, steps: Any) -> None:
        await self._tell("note", pickle.dumps(steps))

    async def renew(self) -> None:
        await self._tell("renew")

    async def leave(self) -> None:
        """Drop the state, so that no command can take the run over from now on. Raises as `keep` does."""
        await self._tell("leave")

    def close(self) -> None:
        """End the owner, with all that it has made. Never raises for one that is dead."""
        self._stopped.set()
        if self._refusal is None:
            with contextlib.suppress(RayError):
                ray.kill(self._handle)

    def detach(self) -> None:
        """Leave everything as it is: another process drives the run."""
        self._stopped.set()

    def _ask(self, method: str, *arguments: Any) -> Any:
        with self._heeding():
            return _asked(getattr(self._handle, method).remote(self.epoch, *arguments))

    async def _tell(self, method: str, *arguments: Any) -> None:
        with self._heeding():
            ref = getattr(self._handle, method).remote(self.epoch, *arguments)
            await answer(ref, name=OWNER, phase="keep", timeout_s=ANSWER_S)

    def _renew(self, pause_s: float) -> None:
        """Renew the lease until the end. A failed renewal is tried again: callers of the actors hear of the owner's
        death."""
        while not self._stopped.wait(pause_s) and ray.is_initialized():
            with contextlib.suppress(PenstockError):
                self.confirm()

    @contextlib.contextmanager
    def _heeding(self) -> Iterator[None]:
        """Remember if another process has taken the owner: from then on nothing is renewed, and nothing ended."""
        if self._refusal is not None:
            raise TakenOver(str(self._refusal))
        try:
            yield
        except TakenOver as refusal:
            self._refusal = refusal
            self._stopped.set()
            raise


def _asked(ref: Any) -> Any:
    return get_all([(OWNER, ref)], phase="ask", timeout_s=ANSWER_S)[0]
