"""The way of weights between nodes: which relays there are, and what they are told of each version.

    ranks are new  every rank: plan_chunks ─▶ plan ─▶ every relay; a node that joins is told the plan later
    each version   begin on every relay ─▶ ranks publish ─▶ wait on those of nodes with engines ─▶ engines load

A node's relay is in its agent (`workers/weights/chain/relay.py`). Where all ranks and engines see the same shared
memory none is needed. Used by `weight_sync.py`; what is where is the fleet's to say.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.network.connection import Address
from penstock.orchestrator.failures import Kind, kind_of
from penstock.orchestrator.ray_calls import answers, translate
from penstock.workers.weights.chain.plan import ChunkPlan
from penstock.workers.weights.chain.routes import Broadcast

Members = Sequence[tuple[str, Any]]
"""Names and handles of actors."""


@dataclass(frozen=True)
class RelayNodes:
    """Nodes that may have weights. Of several that share their memory one is there for all."""

    node_of: Mapping[str, str]
    """By the actor's name."""
    agents: Mapping[str, tuple[str, Any]]
    """Name and handle of each node's agent."""
    addresses: Mapping[str, Address]
    """Of each node's listener."""
    engines: Sequence[str] = ()
    """Names of those that there are to be: also of one that is lost or joins, and has no handle yet."""


class WeightRelays:
    """Lifecycle: `plan` whenever the trainer's ranks are new; then `begin`, `wait` and `reclaim` for each version.
    While all ranks and engines see the same shared memory, all but the last do nothing.

    Engines may come and go: a version goes to the nodes that have engines, or are to have, when it begins.
    """

    def __init__(self, look: Callable[[], RelayNodes], timeout_s: float) -> None:
        """`look`: what is where now. `timeout_s`: of each phase."""
        self._look, self._timeout_s = look, timeout_s
        self._nodes = look()
        self._sources: list[str] = []
        self._receivers: list[str] = []
        """Of the newest version that has begun."""
        self._reached: set[str] = set()
        """Nodes that have the newest version that was waited for."""
        self._plan: ChunkPlan | None = None
        self._crosses_nodes = False
        """Then there is a plan; it stays so."""
        self._told: set[str] = set()
        """Nodes that know the plan."""
        self._number = 0

    async def plan(self, trainers: Members, engines: Members) -> None:
        """The ranks are new. Raises `WeightError`, `DeadlineExceeded`."""
        self._crosses_nodes = False
        self._look_around(trainers, engines)
        await self._plan_if_needed(trainers)

    async def begin(self, version: int, trainers: Members, engines: Members) -> None:
        """Before the ranks publish it. Raises `WeightError`, e.g. where a node has no room."""
        self._look_around(trainers, engines)
        await self._plan_if_needed(trainers)
        if not self._crosses_nodes:
            return
        self._number += 1
        addresses = {node: self._nodes.addresses[node] for node in self._used}
        broadcast = Broadcast(self._number, version, self._receivers, addresses)
        await self._tell(self._used, "begin_version", broadcast, phase=f"begin version {version}")

    async def wait(self, version: int) -> None:
        """Until every node with engines has all of it. Raises `WeightError`, `DeadlineExceeded`."""
        if self._crosses_nodes:
            phase = f"bring version {version} to nodes"
            await self._tell(self._receivers, "wait_for_version", version, self._timeout_s, phase=phase)
        self._reached = set(self._receivers if self._crosses_nodes else self._used)

    async def reclaim(self) -> None:
        """Remove old publications once engines have loaded a newer one."""
        await self._tell(self._used, "reclaim_versions", phase="reclaim publications")

    def have_reached(self, engines: Members) -> bool:
        """Whether the newest version lies where these are."""
        node_of = self._look().node_of
        return all(node_of[name] in self._reached for name, _ in engines)

    @property
    def _used(self) -> list[str]:
        return list(dict.fromkeys([*self._sources, *self._receivers]))

    def _look_around(self, trainers: Members, engines: Members) -> None:
        self._nodes = self._look()
        self._sources = [self._nodes.node_of[name] for name, _ in trainers]
        names = {*(name for name, _ in engines), *self._nodes.engines}
        self._receivers = sorted({self._nodes.node_of[name] for name in names})

    async def _plan_if_needed(self, trainers: Members) -> None:
        """The ranks plan once; a node that is new is told what they have planned."""
        if not self._crosses_nodes:
            if len(self._used) == 1:
                return
            num_receivers = len(self._receivers)
            calls = [
                (name, handle.plan_chunks.remote(node, num_receivers))
                for (name, handle), node in zip(trainers, self._sources, strict=True)
            ]
            self._plan = (await answers(calls, phase="plan publications", timeout_s=self._timeout_s))[0]
            self._crosses_nodes, self._told = True, set()
        if new := [node for node in self._used if node not in self._told]:
            await self._tell(new, "plan_chunks", self._plan, phase="plan publications")
            self._told |= set(new)

    async def _tell(self, nodes: Sequence[str], method: str, *arguments: Any, phase: str) -> None:
        agents = [(node, *self._nodes.agents[node]) for node in nodes]
        calls = [
            (name, self._unless_gone(node, name, getattr(handle, method).remote(*arguments)))
            for node, name, handle in agents
        ]
        # A relay's own deadline comes first: it can say what is missing.
        await answers(calls, phase=phase, timeout_s=2 * self._timeout_s)

    async def _unless_gone(self, node: str, name: str, call: Awaitable[Any]) -> None:
        """A node without ranks that is gone is told nothing: its engines are gone with it, and others do without."""
        try:
            await call
        except Exception as error:
            if node in self._sources or kind_of(translate(error, name)) is not Kind.DEATH:
                raise
