"""The agents of a run: a light actor on every node that takes part.

Agents start first and end last: what ranks, engines and the store write into a node's shared memory lies in the
directory that its agent owns. What an agent does is in `workers/node/agent.py`.
"""

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.conf.cluster import ClusterConfig
from penstock.conf.errors import WorkerDied
from penstock.network.handshake import new_token
from penstock.orchestrator.cluster.nodes.memory_checkpoints import StateNodes
from penstock.orchestrator.cluster.nodes.weight_relays import RelayNodes
from penstock.orchestrator.cluster.owners import Owner, ThisProcess
from penstock.orchestrator.cluster.ray_calls import get_all
from penstock.store.data.remote.nodes import RowsNode, RowsNodes
from penstock.store.data.roots import PREFIX, SHARED_MEMORY
from penstock.workers.node.agent import NodeFacts
from penstock.workers.node.node_actor import NodeAgent as Agent

MANY_CALLS = 1_000


@dataclass(frozen=True)
class AgentsState:
    """The facts that another process needs to go on with agents."""

    root: str
    token: bytes
    members: dict[str, str]
    """Agents' names by node, the driver's first."""
    names: set[str]
    facts: dict[str, NodeFacts]


@dataclass(frozen=True)
class StartedAgent:
    """An agent that has started on a node that joins."""

    name: str
    handle: Any
    facts: NodeFacts


class NodeAgents:
    """Lifecycle: `create` on the run's nodes, or `adopt` those of a process that has died; `facts` once they are
    needed, `started` and `enter` for a node that joins, `close` after every other actor."""

    def __init__(
        self,
        run_id: str,
        namespace: str,
        config: ClusterConfig,
        spill_dir: str | None = None,
        owner: Owner | None = None,
    ) -> None:
        """`spill_dir`: `store.spill_dir`. `owner`: the process that the agents end with; None: this one."""
        self.owner = owner or ThisProcess()
        self.root = f"{SHARED_MEMORY}/{PREFIX}{run_id}-{uuid.uuid4().hex[:12]}"
        """The run's directory in the shared memory of each of its nodes."""
        self.namespace, self._config, self._spill_dir = namespace, config, spill_dir
        self._token = new_token()
        self.members: dict[str, tuple[str, Any]] = {}
        """Name and handle of each agent, by Ray's id of the node."""
        self._names: set[str] = set()
        """Names that agents ever had."""
        self._facts: dict[str, NodeFacts] = {}
        self.is_closed = False

    def create(self, nodes: Sequence[tuple[str, str]]) -> None:
        """Create an agent on each node. `nodes`: Ray's id and the address of each."""
        for node, address in nodes:
            self.members[node] = self._made(node, address)

    def started(self, node: str, address: str, timeout_s: float) -> StartedAgent:
        """Start an agent on a node that joins, in any thread: it is one of these once it has `enter`ed, so nobody waits
        for its facts. Blocks. Raises what the agent raised, and `DeadlineExceeded`; then it is ended."""
        name, handle = self._made(node, address)
        try:
            (found,) = get_all([(name, handle.facts.remote())], phase="start", timeout_s=timeout_s)
            if self.is_closed:
                raise WorkerDied(f"{name} has come too late: the run has ended.")
        except BaseException:
            self.owner.end(handle)
            raise
        return StartedAgent(name, handle, found)

    def enter(self, node: str, agent: StartedAgent) -> None:
        """Count an agent that has started among these."""
        self._facts = self._facts | {node: agent.facts}
        self.members = self.members | {node: (agent.name, agent.handle)}

    def _made(self, node: str, address: str) -> tuple[str, Any]:
        name = f"Agent-{address}"
        if name in self._names:  # nodes that share a machine, or one that was lost there: its name is free late
            name = f"{name}-{len(self._names)}"
        self._names.add(name)
        options = {
            "name": name,
            "namespace": self.namespace,
            "num_cpus": 0,
            "max_concurrency": MANY_CALLS,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        arguments = self.root, self._token, self._config.ports, self._config.files_dir, self._spill_dir
        return name, self.owner.make(Agent, options, *arguments)

    @property
    def state(self) -> AgentsState:
        """The present state."""
        members = {node: name for node, (name, _) in self.members.items()}
        return AgentsState(self.root, self._token, members, set(self._names), dict(self._facts))

    def adopt(self, state: AgentsState, handles: Mapping[str, Any]) -> None:
        """Go on with the agents of another process. `handles`: by name."""
        self.root, self._token = state.root, state.token
        self.members = {node: (name, handles[name]) for node, name in state.members.items()}
        self._names, self._facts = set(state.names), dict(state.facts)

    def facts(self, timeout_s: float) -> dict[str, NodeFacts]:
        """Facts of each node, by node. Raises what an agent raised, and `DeadlineExceeded` naming those that did not
        start."""
        if new := {node: member for node, member in self.members.items() if node not in self._facts}:
            calls = [(name, handle.facts.remote()) for name, handle in new.values()]
            answers = get_all(calls, phase="start", timeout_s=timeout_s)
            self._facts = self._facts | dict(zip(new, answers, strict=True))
        return self._facts

    def forget(self, node: str) -> None:
        """Forget a node that has left, or cannot be made ready."""
        self._facts = {other: fact for other, fact in self._facts.items() if other != node}
        _, handle = self.members[node]
        self.members = {other: member for other, member in self.members.items() if other != node}
        self.owner.end(handle)

    def relay_nodes(self, node_of: Mapping[str, str], engines: Sequence[str], timeout_s: float) -> RelayNodes:
        """The nodes that may have weights. `node_of`: the node of each actor. `engines`: all that there are to be.
        Nodes that share their memory have one relay. Actors on nodes that have left are left out."""
        facts, speaker = self.facts(timeout_s), self._speakers(timeout_s)
        places = {name: speaker[node] for name, node in node_of.items() if node in speaker}
        return RelayNodes(
            places,
            dict(self.members),
            {node: fact.address for node, fact in facts.items()},
            [name for name in engines if name in places],
            self.owner.epoch,
        )

    def state_nodes(self, node_of_rank: Mapping[int, str], timeout_s: float) -> StateNodes:
        """The nodes that copies of the trainer's state may lie on. Nodes that share their memory are one."""
        facts, speaker = self.facts(timeout_s), self._speakers(timeout_s)
        there = dict.fromkeys(speaker.values())
        return StateNodes(
            {rank: speaker.get(node, node) for rank, node in node_of_rank.items()},
            {node: self.members[node] for node in there},
            {node: facts[node].address for node in there},
        )

    def rows_nodes(self, timeout_s: float) -> RowsNodes:
        """The nodes that the store's large batches may lie on: those that are there now. Nodes that share their memory
        have one server."""
        facts, speaker = self.facts(timeout_s), self._speakers(timeout_s)
        servers = {node: RowsNode(node, facts[node].rows, facts[node].address) for node in speaker.values()}
        return RowsNodes({node: servers[other] for node, other in speaker.items()}, self._token)

    def _speakers(self, timeout_s: float) -> dict[str, str]:
        """The node whose agent speaks for the shared memory of each node: several may have the same."""
        facts = self.facts(timeout_s)
        of_memory = {fact.memory: node for node, fact in facts.items() if fact.owns_root}
        return {node: of_memory[fact.memory] for node, fact in facts.items()}

    def close(self, grace_s: float) -> None:
        """Have agents remove the run's directories. Never raises for a dead agent: its directory goes with it."""
        refs, self.is_closed = [], True
        for _, handle in self.members.values():
            with contextlib.suppress(RayError):
                refs.append(handle.close.remote())
        with contextlib.suppress(RayError):
            ray.wait(refs, num_returns=len(refs), timeout=grace_s) if refs else None
        for _, handle in self.members.values():
            self.owner.end(handle)
        self.members.clear()
