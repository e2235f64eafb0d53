"""Makers, and so owners, of a run's actors: this process, or an actor that outlives it (`owner_actor.py`).

ThisProcess   on a Ray that ends with this process; for a session
RunOwner      on a cluster: actors live on for `faults.lease_s` when the command dies, for the next one
"""

import contextlib
import pickle
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.conf.errors import DeadlineExceeded, PenstockError, TakenOver, WorkerDied
from penstock.orchestrator.cluster.owner_actor import Kept, OwnerActor, actor_class, reserved
from penstock.orchestrator.cluster.ray_calls import START, answer, get_all

OWNER = "Owner"
"""The owner's name, in the namespace of the run."""
ANSWER_S = 60.0
"""Deadline for an owner that has started to answer."""
RENEWALS = 10
"""Number of renewals within a lease."""
LONGEST_S = 10.0
"""Most seconds between two renewals."""
MANY_CALLS = 1_000


class Owner(Protocol):
    """Makes actors and reservations that end with the owner."""

    epoch: int
    """Number of this command among those that have driven the run with the owner; 0: all ends with this process."""

    def make(self, cls: type, options: Mapping[str, Any], *arguments: Any) -> Any:
        """Make an actor. Returns its handle. `options`: Ray's, the actor's name among them. Blocks for moments."""
        ...

    def reserve(self, bundles: list[dict[str, float]], labels: list[dict[str, str]], name: str) -> PlacementGroup:
        """Reserve bundles. `labels`: those of the node that each bundle is to be on."""
        ...

    def end(self, handle: Any) -> None:
        """End an actor of the owner, unless another process has taken it: then it is that one's. Never raises, and
        waits for nothing."""
        ...

    async def note(self, steps: Any) -> None:
        """Note steps that all ranks have made, for the next process, before their rows are completed. Raises
        `TakenOver`, `DeadlineExceeded`, `WorkerDied`."""
        ...

    async def renew(self) -> None:
        """Renew the lease at once, before what would harm another process that has taken the owner. Raises as `note`
        does."""
        ...

    def confirm(self) -> None:
        """Raise `TakenOver` if another process has taken the owner: asked before what would harm that process. An
        owner that is dead is nobody's."""
        ...

    def close(self) -> None:
        """End what the owner has made: it is not needed any more."""
        ...

    def let_go(self) -> None:
        """Give the owner up: another process has taken it."""
        ...


class ThisProcess:
    """This process as the owner: actors end with it."""

    epoch = 0

    def make(self, cls: type, options: Mapping[str, Any], *arguments: Any) -> Any:
        return actor_class(cls).options(**options).remote(*arguments)

    def reserve(self, bundles: list[dict[str, float]], labels: list[dict[str, str]], name: str) -> PlacementGroup:
        return reserved(bundles, labels, name)

    def end(self, handle: Any) -> None:
        with contextlib.suppress(RayError):
            ray.kill(handle)

    async def note(self, steps: Any) -> None:
        """Do nothing: no other process can take the actors."""

    async def renew(self) -> None:
        """Do nothing: no other process can take the actors."""

    def confirm(self) -> None:
        """Do nothing: no other process can take the actors."""

    def close(self) -> None:
        """Do nothing: actors are ended one by one."""

    def let_go(self) -> None:
        """Do nothing: no other process can take the actors."""


class RunOwner:
    """This process's side of an `Owner`. Until `close` or `let_go` a thread renews its lease, whatever else this
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
    def take(cls, namespace: str, lease_s: float) -> "tuple[RunOwner, Kept] | None":
        """Take the owner of a run whose command has died, with what that has left. None: there is none, or nothing to
        go on with; then the owner ends. Raises `WorkerDied`, and `DeadlineExceeded` for one that does not answer: that
        ends too, or it would keep what the run has reserved."""
        try:
            handle = ray.get_actor(OWNER, namespace=namespace)
        except ValueError:
            return None
        kept: Kept | None = None
        try:
            kept = _asked(handle.take.remote())
        finally:
            if kept is None:
                with contextlib.suppress(RayError):
                    ray.kill(handle)
        return (cls(handle, kept.epoch, lease_s), kept) if kept is not None else None

    def make(self, cls: type, options: Mapping[str, Any], *arguments: Any) -> Any:
        refs = [ray.put(argument) for argument in arguments]
        with self._heeding():
            handle = _asked(self._handle.make.remote(self.epoch, cls, dict(options), refs))
        self._names[handle] = options["name"]
        return handle

    def reserve(self, bundles: list[dict[str, float]], labels: list[dict[str, str]], name: str) -> PlacementGroup:
        with self._heeding():
            group: PlacementGroup = _asked(self._handle.reserve.remote(self.epoch, bundles, labels, name))
        return group

    def end(self, handle: Any) -> None:
        if self._refusal is None:
            with contextlib.suppress(RayError):
                self._handle.end.remote(self.epoch, self._names[handle])

    def confirm(self) -> None:
        with contextlib.suppress(DeadlineExceeded, WorkerDied), self._heeding():
            _asked(self._handle.renew.remote(self.epoch))

    def name_of(self, handle: Any) -> str:
        """The name of one of its actors in Ray."""
        return self._names[handle]

    def keep_only(self, names: Collection[str], groups: Collection[PlacementGroup]) -> dict[str, Any]:
        """Handles of the named actors, by name, as far as they were ever made. Other actors and reservations end."""
        with self._heeding():
            found: dict[str, Any] = _asked(self._handle.keep_only.remote(self.epoch, list(names), list(groups)))
        self._names = {handle: name for name, handle in found.items()}
        return found

    async def keep(self, state: bytes) -> None:
        """Keep the state for the next command. Raises `TakenOver`, `DeadlineExceeded`, `WorkerDied`."""
        await self._told(self._handle.keep.remote(self.epoch, state))

    async def note(self, steps: Any) -> None:
        await self._told(self._handle.note.remote(self.epoch, pickle.dumps(steps)))

    async def renew(self) -> None:
        await self._told(self._handle.renew.remote(self.epoch))

    async def leave(self) -> None:
        """Drop the state, so that no command can take the run over from now on. Raises as `keep` does."""
        await self._told(self._handle.leave.remote(self.epoch))

    def close(self) -> None:
        """End the owner, with all that it has made. Never raises for one that is dead."""
        self._stopped.set()
        if self._refusal is None:
            with contextlib.suppress(RayError):
                ray.kill(self._handle)

    def let_go(self) -> None:
        """Leave everything as it is: another process drives the run."""
        self._stopped.set()

    async def _told(self, ref: Any) -> None:
        with self._heeding():
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
