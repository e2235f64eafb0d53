"""Transfer of weights between nodes: which relays there are, and what they are told of each version.

    ranks are new  every rank: plan_chunks ─▶ plan ─▶ every relay; a node that joins is told the plan later
    each version   begin on every relay ─▶ ranks publish ─▶ wait on those of nodes with engines ─▶ engines load
    a node joins   bring: its relay alone begins the newest version, which the others still have

A node's relay is in its agent (`workers/weights/chain/relay.py`). Where all ranks and engines see the same shared
memory none is needed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import WeightError, WorkerDied
from penstock.network.connection import Address
from penstock.orchestrator.cluster.failures import Kind, kind_of
from penstock.orchestrator.cluster.ray_calls import Handles, answers, translate
from penstock.workers.weights.chain.plan import Broadcast, ChunkPlan

LOOK_S = 0.2
"""Seconds between two looks for nodes that a version comes from."""
EPOCH_BITS = 32
"""Number of low bits in a broadcast's number that count; those above say which process has begun it."""
PASSED_ON_S = 3.0
"""Seconds within which all others get what a node had sent before it was gone."""


@dataclass(frozen=True)
class RelayNodes:
    """Nodes that may have weights. Where several share their memory, one stands for all."""

    node_of: Mapping[str, str]
    """Node of each actor, by its name; actors whose node has left are not in it."""
    agents: Mapping[str, tuple[str, Any]]
    """Name and handle of each node's agent, by node."""
    addresses: Mapping[str, Address]
    """Address of each node's listener, by node."""
    engines: Sequence[str] = ()
    """Names of the engines that there are to be: also of those that are lost or join, and have no handle yet."""
    epoch: int = 0
    """Epoch of the process that tells relays of versions: its calls count as later than those of all before it."""

    def agents_of(self, nodes: Iterable[str]) -> dict[str, Any]:
        """Handles of the agents that are there, by node."""
        return {node: self.agents[node][1] for node in nodes if node in self.agents}


class WeightRelays:
    """Lifecycle: `plan` whenever the trainer's ranks are new; then `begin`, `wait` and `reclaim` for each version.
    While all ranks and engines see the same shared memory, all but the last do nothing.

    Engines may come and go: a version goes to the nodes that have engines, or are to have, when it begins, and is
    brought to those that come later. A node is known by its agent: what lay there is gone with it.
    """

    def __init__(self, look: Callable[[], RelayNodes], timeout_s: float) -> None:
        """`look`: the present nodes. `timeout_s`: deadline of each phase."""
        self._look, self._timeout_s = look, timeout_s
        self._nodes = look()
        """Nodes as they were when the newest version began."""
        self._sources: list[str] = []
        self._receivers: list[str] = []
        """Receivers of the newest version that has begun."""
        self._reached: dict[str, Any] = {}
        """Agent of each node that has the newest version that was waited for."""
        self._plan: ChunkPlan | None = None
        self._crosses_nodes = False
        """True once ranks and engines were on several nodes: then there is a plan; it stays so."""
        self._told: dict[str, Any] = {}
        """Agent of each node that knows the plan."""
        self._number = 0
        self._begun: Broadcast | None = None
        """The newest broadcast."""
        self._whole: Broadcast | None = None
        """The newest broadcast that was waited for, and that nodes still send."""
        self._is_outdated = False
        """True if the newest version was cut by another plan than the present one."""
        self._bringing = asyncio.Lock()
        self._sending: dict[str, Any] = {}
        """Agent of each node that the newest version comes from."""

    async def plan(self, trainers: Handles, engines: Handles) -> None:
        """Have new ranks plan their chunks, if several nodes take part. Raises `WeightError`, `DeadlineExceeded`.

        The version that nodes still send stays theirs, unless these ranks plan otherwise: an engine whose node was away
        may need it before there can be another."""
        whole, planned = self._whole, self._plan
        self._crosses_nodes, self._whole = False, None
        self._look_around(trainers, engines)
        await self._plan_if_needed(trainers)
        if self._plan == planned:
            self._whole = whole
        self._is_outdated = whole is not None and self._whole is None

    async def begin(self, version: int, trainers: Handles, engines: Handles) -> None:
        """Begin a version, before the ranks publish it. Raises `WeightError`, e.g. where a node has no room."""
        self._look_around(trainers, engines)
        await self._plan_if_needed(trainers)
        self._whole, self._is_outdated = None, False
        if not self._crosses_nodes:
            return
        self._number = max(self._number, self._nodes.epoch << EPOCH_BITS) + 1
        self._begun = self._broadcast(self._nodes, version, self._receivers)
        self._sending = self._nodes.agents_of(self._sources)
        await self._tell(self._nodes, self._used, "begin_version", self._begun, phase=f"begin version {version}")

    async def wait(self, version: int) -> None:
        """Wait until every node with engines has all of a version. Raises `WeightError`, `DeadlineExceeded`, and
        `WorkerDied` where that cannot be, as a node that it comes from is gone."""
        if self._crosses_nodes:
            phase = f"bring version {version} to nodes"
            await self._while_sources_stay(
                self._tell(self._nodes, self._receivers, "wait_for_version", version, self._timeout_s, phase=phase)
            )
            self._whole = self._begun
        self._reached = self._nodes.agents_of(self._receivers if self._crosses_nodes else self._used)

    @property
    def is_cut_off(self) -> bool:
        """True if the newest version cannot be brought to where it is not yet: a node that it comes from has left, or
        the ranks that are there now have another plan."""
        return self._is_outdated or bool(self.lost_sources)

    @property
    def lost_sources(self) -> list[str]:
        """Nodes that the newest version has come from, or was to come from, and that are gone."""
        now = self._look()
        there = now.agents_of(self._sending)
        return [node for node, agent in self._sending.items() if there.get(node) is not agent]

    async def _while_sources_stay(self, telling: Awaitable[None]) -> None:
        """Wait while the sources are there. Once one is gone, others pass on what it had sent; what it had not is
        lost."""
        waiting, lost_at = asyncio.ensure_future(telling), None
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=LOOK_S)
                if not (lost := self.lost_sources):
                    lost_at = None
                    continue
                lost_at = lost_at or time.monotonic()
                if time.monotonic() > lost_at + PASSED_ON_S and not waiting.done():
                    raise WorkerDied(f"{', '.join(lost)}: gone before the others had the weights from there.")
            await waiting
        finally:
            waiting.cancel()

    async def reclaim(self) -> None:
        """Remove old publications once engines have loaded a newer one."""
        await self._tell(self._nodes, self._used, "reclaim_versions", phase="reclaim publications", needed=())

    async def bring(self, engines: Handles) -> bool:
        """Bring the newest version to the nodes of engines that have come since it began. False: it cannot be brought
        there, as a newer one is under way, none has been between nodes so far, or part of it is lost with a node; the
        next one will be there by itself. Raises `WeightError`, `DeadlineExceeded`."""
        async with self._bringing:
            now, whole = self._look(), self._whole
            late = sorted({now.node_of[name] for name, _ in self._late(now, engines)})
            if not late or whole is None or self.lost_sources:
                return not late
            broadcast = self._broadcast(now, whole.version, sorted({*whole.receivers, *late}))
            phase = f"bring version {whole.version} to nodes"
            try:
                await self._tell_plan(now, late)
                await self._tell(now, late, "begin_version", broadcast, phase=phase)
                await self._tell(now, late, "wait_for_version", whole.version, self._timeout_s, phase=phase)
            except WeightError:
                if self._whole is whole:
                    raise
            if self._whole is not whole:
                return False
            self._reached |= now.agents_of(late)
            return True

    def late(self, engines: Handles) -> Handles:
        """Those of the engines on whose nodes the newest version that was waited for is not."""
        return self._late(self._look(), engines)

    def _late(self, now: RelayNodes, engines: Handles) -> Handles:
        """As `late`, without engines whose node has left."""
        there = now.agents_of(now.node_of[name] for name, _ in engines if name in now.node_of)
        nodes = {node for node, agent in there.items() if self._reached.get(node) is not agent}
        return [(name, handle) for name, handle in engines if now.node_of.get(name) in nodes]

    @property
    def _used(self) -> list[str]:
        return list(dict.fromkeys([*self._sources, *self._receivers]))

    def _look_around(self, trainers: Handles, engines: Handles) -> None:
        self._nodes = self._look()
        node_of = self._nodes.node_of
        if gone := [name for name, _ in trainers if name not in node_of]:
            raise WorkerDied(f"{', '.join(gone)}: gone with the node.")
        self._sources = [node_of[name] for name, _ in trainers]
        names = {*(name for name, _ in engines), *self._nodes.engines}
        self._receivers = sorted({node_of[name] for name in names if name in node_of})

    async def _plan_if_needed(self, trainers: Handles) -> None:
        """Have the ranks plan once, and tell the plan to nodes that do not know it."""
        if not self._crosses_nodes:
            if len(self._used) == 1:
                return
            num_receivers = len(self._receivers)
            calls = [
                (name, handle.plan_chunks.remote(node, num_receivers))
                for (name, handle), node in zip(trainers, self._sources, strict=True)
            ]
            self._plan = (await answers(calls, phase="plan publications", timeout_s=self._timeout_s))[0]
            self._crosses_nodes, self._told = True, {}
        await self._tell_plan(self._nodes, self._used)

    async def _tell_plan(self, now: RelayNodes, nodes: Sequence[str]) -> None:
        """Tell the plan to those of the nodes that do not know it."""
        if new := [node for node, agent in now.agents_of(nodes).items() if self._told.get(node) is not agent]:
            await self._tell(now, new, "plan_chunks", self._plan, phase="plan publications")
            self._told |= now.agents_of(new)

    def _broadcast(self, now: RelayNodes, version: int, receivers: Sequence[str]) -> Broadcast:
        """A broadcast of the newest number, between nodes that are there."""
        used = [node for node in dict.fromkeys([*self._sources, *receivers]) if node in now.addresses]
        there = [node for node in receivers if node in used]
        return Broadcast(self._number, version, there, {node: now.addresses[node] for node in used})

    async def _tell(
        self,
        now: RelayNodes,
        nodes: Sequence[str],
        method: str,
        *arguments: Any,
        phase: str,
        needed: Collection[str] | None = None,
    ) -> None:
        """Call a method on the relays of nodes. The failure of a node that is gone is ignored unless it is `needed`:
        its engines are gone with it, and others do without. `needed` None: nodes with ranks."""
        needed = self._sources if needed is None else needed
        calls = []
        for node in nodes:
            name, handle = now.agents[node]
            call = getattr(handle, method).remote(*arguments)
            calls.append((name, call if node in needed else _unless_gone(name, call)))
        # A relay's own deadline comes first: it can say what is missing.
        await answers(calls, phase=phase, timeout_s=2 * self._timeout_s)


async def _unless_gone(name: str, call: Awaitable[Any]) -> None:
    try:
        await call
    except Exception as error:
        if kind_of(translate(error, name)) is not Kind.DEATH:
            raise
