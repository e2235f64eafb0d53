"""Who makes the actors of a run, and so owns them: this process, or an actor that outlives it (`owner_actor.py`).

    ThisProcess   on a Ray that ends with this process; of a session
    RunOwner      on a cluster: actors live on for `faults.lease_s` when the command dies, for the next one

Made by `training.py`; used by whatever makes actors and reservations.
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

from penstock.conf.errors import PenstockError, TakenOver
from penstock.orchestrator.ownership.owner_actor import Kept, OwnerActor, actor_class, reserved
from penstock.orchestrator.ray_calls import answer, get_all

OWNER = "Owner"
"""Its name, in the namespace of the run."""
ANSWER_S = 60.0
"""For it to answer, also where its process is only starting."""
RENEWALS = 10
"""Within a lease."""
LONGEST_S = 10.0
"""Between two of them."""
MANY_CALLS = 1_000


class Owner(Protocol):
    """Makes what ends with it."""

    epoch: int
    """Of the commands that have driven the run with it, which one this is; 0: with this process all of it ends."""

    def make(self, cls: type, options: Mapping[str, Any], *arguments: Any) -> Any:
        """An actor; its handle. `options`: Ray's, its name among them. Blocks for moments."""
        ...

    def reserve(self, bundles: list[dict[str, float]], labels: list[dict[str, str]], name: str) -> PlacementGroup:
        """`labels`: of the node that each bundle is to be on."""
        ...

    def close(self) -> None:
        """Nobody needs what it has made."""
        ...

    def let_go(self) -> None:
        """Another process has taken it."""
        ...


class ThisProcess:
    """Actors end with it."""

    epoch = 0

    def make(self, cls: type, options: Mapping[str, Any], *arguments: Any) -> Any:
        return actor_class(cls).options(**options).remote(*arguments)

    def reserve(self, bundles: list[dict[str, float]], labels: list[dict[str, str]], name: str) -> PlacementGroup:
        return reserved(bundles, labels, name)

    def close(self) -> None:
        """They are ended one by one."""

    def let_go(self) -> None:
        """Nobody can take them."""


class RunOwner:
    """This process's end of an `Owner`. From when it is made until `close` or `let_go` its lease is renewed by a
    thread, whatever else this process does.

    Lifecycle: `start` one, or `take` that of a command that has died; then `keep` and `note`; `leave`, `close`.
    """

    def __init__(self, handle: Any, epoch: int, lease_s: float) -> None:
        self._handle, self.epoch = handle, epoch
        self._names: dict[Any, str] = {}
        """By handle: the names that Ray knows actors by."""
        self._refusal: TakenOver | None = None
        self._stopped = threading.Event()
        pause_s = min(LONGEST_S, lease_s / RENEWALS)
        threading.Thread(target=self._renew, args=(pause_s,), name="run-lease", daemon=True).start()

    @classmethod
    def start(cls, namespace: str, lease_s: float) -> "RunOwner":
        """On this node. Raises `DeadlineExceeded`, `WorkerDied`."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options: dict[str, Any] = {
            "name": OWNER, "namespace": namespace, "lifetime": "detached", "num_cpus": 0,
            "max_concurrency": MANY_CALLS, "scheduling_strategy": here,
        }  # fmt: skip
        handle = actor_class(OwnerActor).options(**options).remote(lease_s)
        return cls(handle, _asked(handle.begin.remote()), lease_s)

    @classmethod
    def take(cls, namespace: str, lease_s: float) -> "tuple[RunOwner, Kept] | None":
        """That of a run whose command has died, with what it has left. None: there is none, or nothing to go on with;
        then what there is of it ends. Raises `WorkerDied`, and `DeadlineExceeded` for one that does not answer: that
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

    def name_of(self, handle: Any) -> str:
        """That Ray knows one of its actors by."""
        return self._names[handle]

    def keep_only(self, names: Collection[str], groups: Collection[PlacementGroup]) -> dict[str, Any]:
        """Handles of these actors, by name, as far as they were ever made. Other actors and reservations end."""
        with self._heeding():
            found: dict[str, Any] = _asked(self._handle.keep_only.remote(self.epoch, list(names), list(groups)))
        self._names = {handle: name for name, handle in found.items()}
        return found

    async def keep(self, state: bytes) -> None:
        """What the next command is to know. Raises `TakenOver`, `DeadlineExceeded`, `WorkerDied`."""
        await self._told(self._handle.keep.remote(self.epoch, state))

    async def note(self, step: Any) -> None:
        """A step that all ranks have made, before its rows are completed. Raises as `keep` does."""
        await self._told(self._handle.note.remote(self.epoch, pickle.dumps(step)))

    async def leave(self) -> None:
        """Nobody can take the run over from now on. Raises as `keep` does."""
        await self._told(self._handle.leave.remote(self.epoch))

    def close(self) -> None:
        """End it, with all that it has made. Never raises for one that is dead."""
        self._stopped.set()
        if self._refusal is None:
            with contextlib.suppress(RayError):
                ray.kill(self._handle)

    def let_go(self) -> None:
        """Another process drives the run: leave everything as it is."""
        self._stopped.set()

    async def _told(self, ref: Any) -> None:
        with self._heeding():
            await answer(ref, name=OWNER, phase="keep", timeout_s=ANSWER_S)

    def _renew(self, pause_s: float) -> None:
        """One that fails is tried again: of its death, all hear whose actors it has made."""
        while not self._stopped.wait(pause_s) and ray.is_initialized():
            with contextlib.suppress(PenstockError), self._heeding():
                _asked(self._handle.renew.remote(self.epoch))

    @contextlib.contextmanager
    def _heeding(self) -> Iterator[None]:
        """Another process has taken it: nothing is renewed, and nothing ended, from then on."""
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
