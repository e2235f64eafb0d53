"""The store of a run: its actor is made, and made again where it is lost."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.nodes.agents import NodeAgents
from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.cluster.placement.actors import origin_of
from penstock.orchestrator.cluster.ray_calls import answer, outcomes
from penstock.store.service.store_actor import STORE, create_store_actor, end_store_actor
from penstock.store.spec import StoreSpec

DEAD_S = 1.0
"""Seconds for a store that seems lost to answer all the same, before it is killed."""


@dataclass(frozen=True)
class StoreState:
    """The facts that another process needs to go on with a store."""

    name: str
    """The store's name in Ray."""
    num_made: int


class StoreProcess:
    """Lifecycle: `start`, or `adopt` one; `replace` any number of times; `end`."""

    def __init__(
        self,
        config: RunConfig,
        flow: Dataflow,
        namespace: str,
        agents: NodeAgents,
        node: str,
        options: Callable[[], Mapping[str, Any]],
        crosses_nodes: bool,
        owner: Owner,
    ) -> None:
        """`node`: Ray's id of the store's node. `options`: those for Ray, at each start. `crosses_nodes`: large batches
        may lie on several nodes."""
        self.handle: Any = None
        self._owner = owner
        self._config, self._flow, self._namespace = config, flow, namespace
        self._agents, self._node, self._options = agents, node, options
        self._crosses_nodes = crosses_nodes
        self._num_made = 0
        self._scratch = ""

    def start(self, snapshot: str | None) -> None:
        """Start the store. `snapshot`: what it goes on from; None: nothing."""
        self._num_made += 1
        timeout_s = self._config.rollout.start_timeout_s
        self.handle = create_store_actor(
            StoreSpec.of(self._flow, self._config),
            self._namespace,
            self._name,
            restore=snapshot,
            ports=self._config.cluster.ports,
            nodes=self._agents.rows_nodes(timeout_s) if self._crosses_nodes else None,
            options=self._options(),
            make=self._owner.make,
            origin=origin_of(self._config, self._namespace, "store", STORE),
        )

    @property
    def state(self) -> StoreState:
        """The present state."""
        return StoreState(self._name, self._num_made)

    def adopt(self, state: StoreState, handles: Mapping[str, Any]) -> None:
        """Go on with a store that is there. `handles`: by the actors' names in Ray."""
        self.handle, self._num_made = handles[state.name], state.num_made

    @property
    def _name(self) -> str:
        """The store's name in Ray. Names of dead actors are free late, so later stores have a number."""
        return STORE if self._num_made == 1 else f"{STORE}.{self._num_made}"

    async def replace(self, snapshot: str | None, timeout_s: float) -> None:
        """End the store, with all rows that lie on nodes, and start another. Raises what that raises,
        `DeadlineExceeded`, `TakenOver`."""
        await asyncio.to_thread(self._owner.confirm)
        await asyncio.to_thread(self._end, DEAD_S)
        calls = [(name, handle.clear_rows.remote()) for name, handle in self._agents.members.values()]
        await outcomes(calls, phase="clear rows", timeout_s=timeout_s)  # of a node that is gone, all are
        await asyncio.to_thread(self.start, snapshot)
        await answer(self.handle.endpoint.remote(), name=STORE, phase="start", timeout_s=timeout_s)

    async def scratch(self, timeout_s: float) -> str:
        """A directory on the store's node that stays until the run ends. Raises `ResourceError`, `DeadlineExceeded`."""
        if not self._scratch:
            name, agent = self._agents.members[self._node]
            self._scratch = await answer(agent.scratch.remote(), name=name, phase="scratch", timeout_s=timeout_s)
        return self._scratch

    def end(self, grace_s: float) -> None:
        """End the store, once no process reads its files any more."""
        if self.handle is not None:
            self._end(grace_s)
        self.handle = None

    def _end(self, timeout_s: float) -> None:
        end_store_actor(self.handle, self._config.store.spill_dir, timeout_s, self._owner.end)
