"""The way of weights between nodes: which relays there are, and what they are told of each version.

    ranks are new  every rank: plan_chunks ─▶ plan ─▶ every relay
    each version   begin on every relay ─▶ ranks publish ─▶ wait on those of nodes with engines ─▶ engines load

A node's relay is in its agent (`workers/weights/chain/relay.py`). Where all ranks and engines see the same shared
memory none is needed. Used by `weight_sync.py`; what is where is the fleet's to say.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.network.connection import Address
from penstock.orchestrator.ray_calls import answers
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


class WeightRelays:
    """Lifecycle: `plan`; then `begin`, `wait` and `reclaim` for each version. Where all ranks and engines see the
    same shared memory, all but the last do nothing."""

    def __init__(self, nodes: RelayNodes, trainers: Members, engines: Members, timeout_s: float) -> None:
        """`timeout_s`: of each phase."""
        self._nodes, self._timeout_s = nodes, timeout_s
        self._sources = [nodes.node_of[name] for name, _ in trainers]
        self._receivers = sorted({nodes.node_of[name] for name, _ in engines})
        self._used = list(dict.fromkeys([*self._sources, *self._receivers]))
        self._crosses_nodes = len(self._used) > 1
        self._number = 0

    async def plan(self, trainers: Members) -> None:
        """Whenever these are new. Raises `WeightError`, `DeadlineExceeded`."""
        if not self._crosses_nodes:
            return
        num_receivers = len(self._receivers)
        calls = [
            (name, handle.plan_chunks.remote(node, num_receivers))
            for (name, handle), node in zip(trainers, self._sources, strict=True)
        ]
        plan: ChunkPlan = (await answers(calls, phase="plan publications", timeout_s=self._timeout_s))[0]
        await self._tell(self._used, "plan_chunks", plan, phase="plan publications")

    async def begin(self, version: int) -> None:
        """Before the ranks publish it. Raises `WeightError`, e.g. where a node has no room."""
        if not self._crosses_nodes:
            return
        self._number += 1
        addresses = {node: self._nodes.addresses[node] for node in self._used}
        broadcast = Broadcast(self._number, version, self._receivers, addresses)
        await self._tell(self._used, "begin_version", broadcast, phase=f"begin version {version}")

    async def wait(self, version: int) -> None:
        """Until every node with engines has all of it. Raises `WeightError`, `DeadlineExceeded`."""
        if not self._crosses_nodes:
            return
        phase = f"bring version {version} to nodes"
        await self._tell(self._receivers, "wait_for_version", version, self._timeout_s, phase=phase)

    async def reclaim(self) -> None:
        """Remove old publications once engines have loaded a newer one."""
        await self._tell(self._used, "reclaim_versions", phase="reclaim publications")

    async def _tell(self, nodes: Sequence[str], method: str, *arguments: Any, phase: str) -> None:
        agents = [self._nodes.agents[node] for node in nodes]
        calls = [(name, getattr(handle, method).remote(*arguments)) for name, handle in agents]
        # A relay's own deadline comes first: it can say what is missing.
        await answers(calls, phase=phase, timeout_s=2 * self._timeout_s)
