"""The agents of a run, a light actor on every node that takes part, and the driver's files on these nodes.

Agents start first and end last: what ranks, engines and the store write into a node's shared memory lies in the
directory that its agent owns. What an agent does is in `workers/node/node_agent.py`.

`NodeFiles` brings models, checkpoints and a user's code to the nodes that read them. A path stands for its content. A
node where the same path has the same content (a shared file system) uses it; another gets a copy from the agents, each
of which passes it on. A model of the hub is fetched by each node itself. In the other direction, what actors of other
nodes write to the driver's disk is collected there.
"""

import concurrent.futures
import contextlib
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.conf.cluster import ClusterConfig
from penstock.conf.errors import DeadlineExceeded, WorkerDied
from penstock.network.connection import Address, new_token
from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.cluster.placement.nodes import this_node
from penstock.orchestrator.cluster.ray_calls import answers, get_all, get_from_all
from penstock.store.data.remote_rows import RowsNode, RowsNodes
from penstock.store.data.roots import PREFIX, SHARED_MEMORY
from penstock.workers.node.hub_models import Fetched, cached_revision, may_be_hub_id
from penstock.workers.node.node_actor import NodeAgentActor as Agent
from penstock.workers.node.node_agent import NodeFacts
from penstock.workers.node.node_transfers import FileSet
from penstock.workers.runtime.url_files import is_url


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


POLICY = "policy"
"""Name by which agents call the trainer whose states are kept."""


@dataclass(frozen=True)
class StateNodes:
    """Nodes that may have copies, each with shared memory of its own."""

    node_of_rank: Mapping[int, str]
    """Node of each rank, also where the node has left."""
    agents: Mapping[str, tuple[str, Any]]
    """Name and handle of each agent, by node."""
    addresses: Mapping[str, Address]
    """Address of each node's listener, by node."""


MANY_CALLS = 1_000


@dataclass(frozen=True)
class AgentsState:
    """The facts that another process needs to take agents over."""

    root: str
    token: bytes
    members: dict[str, str]
    """Agents' names by node, the driver's first."""
    names: set[str]
    facts: dict[str, NodeFacts]


@dataclass(frozen=True)
class NewAgent:
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
        self.owner = owner or Owner()
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

    def started(self, node: str, address: str, timeout_s: float) -> NewAgent:
        """Start an agent on a node that joins, in any thread: it is one of these once it has `enter`ed, so nobody waits
        for its facts. Blocks. Raises what the agent raised, and `DeadlineExceeded`; then it is ended."""
        name, handle = self._made(node, address)
        try:
            (found,) = get_from_all([(name, handle)], "facts", phase="start", timeout_s=timeout_s)
            if self.is_closed:
                raise WorkerDied(f"{name} has come too late: the run has ended.")
        except BaseException:
            self.owner.end(handle)
            raise
        return NewAgent(name, handle, found)

    def enter(self, node: str, agent: NewAgent) -> None:
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
            answers = get_from_all(list(new.values()), "facts", phase="start", timeout_s=timeout_s)
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
        self.is_closed = True
        self.owner.close_all([handle for _, handle in self.members.values()], grace_s)
        self.members.clear()


def waves(has: Collection[str], wants: Collection[str]) -> list[list[tuple[str, str]]]:
    """Transfers in waves, each a list of `(source, target)`. Each node that has the files is a source of the next wave,
    so the number of sources doubles."""
    sources, left = list(has), [node for node in wants if node not in has]
    planned = []
    while left:
        wave = list(zip(sources, left, strict=False))
        planned.append(wave)
        left = left[len(wave) :]
        sources += [target for _, target in wave]
    return planned


LOOK_S = 5.0
"""Seconds between two lines about a model that nodes fetch."""


class NodeFiles:
    """Lifecycle: `provide` for each path before the actors that read it are made, then `local`."""

    tell: Callable[[str], None] = staticmethod(lambda line: None)
    """Called with how far nodes are with a model of the hub."""

    def __init__(self, agents: NodeAgents, timeout_s: float) -> None:
        """`timeout_s`: deadline for one set of files to be everywhere."""
        self._agents, self._timeout_s = agents, timeout_s
        self._places: dict[tuple[str, str], str] = {}
        """Place of a path on a node, by node and the driver's path."""

    def provide(
        self, path: str, nodes: Collection[str], files_of: Callable[[Path], FileSet] = FileSet.of_model
    ) -> None:
        """Bring a model, or what else `files_of` finds by its path, to nodes. A model that is no path of this machine
        is the hub's: each node fetches it. Raises `ResourceError`, `DeadlineExceeded`."""
        source = Path(path).expanduser().resolve()
        if not source.exists():
            if files_of == FileSet.of_model and may_be_hub_id(path):
                self._fetch(path, [node for node in nodes if (node, path) not in self._places])
            return
        others = [node for node in nodes if self._is_elsewhere(node) and (node, path) not in self._places]
        if not others:
            return
        folder = source if source.is_dir() else source.parent
        files = files_of(source)
        here = this_node()
        self._wait("offer", {here: (files, str(folder))})
        for wave in waves([here], others):
            wanted = {target: (files, str(folder), self._facts_of(origin).address) for origin, target in wave}
            for target, place in self._wait("obtain", wanted).items():
                self._places[target, path] = place if source.is_dir() else f"{place}/{source.name}"

    def _fetch(self, name: str, nodes: Sequence[str]) -> None:
        """Have nodes fetch a model of the hub at the same time, and tell how far they are."""
        deadline, revision = time.monotonic() + self._timeout_s, cached_revision(name)
        calls = self._calls("fetch_model", dict.fromkeys(nodes, (name, revision)))
        under_way = [ref.future() for _, ref in calls]
        while (left_s := deadline - time.monotonic()) > 0:
            ended, pending = concurrent.futures.wait(under_way, min(LOOK_S, left_s), return_when="FIRST_EXCEPTION")
            if not pending or any(call.exception() is not None for call in ended):
                break
            with contextlib.suppress(DeadlineExceeded):
                asked = self._calls("fetched", dict.fromkeys(nodes, ()))
                self.tell(fetched_text(name, get_all(asked, phase="ask for progress", timeout_s=LOOK_S)))
        try:
            places = get_all(calls, phase=f"fetch {name}", timeout_s=max(0.0, deadline - time.monotonic()))
        except DeadlineExceeded:
            late = ", ".join(call for (call, _), future in zip(calls, under_way, strict=True) if not future.done())
            raise DeadlineExceeded(
                f"{name} was not whole on every node within cluster.files_timeout_s={self._timeout_s:g} s: {late} "
                "still fetches it. What has come stays in the node's cache: start again, or raise the key."
            ) from None
        self._places |= {(node, name): place for node, place in zip(nodes, places, strict=True)}

    @property
    def state(self) -> dict[tuple[str, str], str]:
        """The present state, for another process."""
        return dict(self._places)

    def adopt(self, places: Mapping[tuple[str, str], str]) -> None:
        """Go on with what another process has brought to nodes."""
        self._places = dict(places)

    def local(self, node: str, path: str) -> str:
        """The path of the same content on a node."""
        return self._places.get((node, path), path)

    async def places(self, directory: str, nodes: Collection[str]) -> dict[str, str]:
        """Directory that actors on each node are to write to, for what belongs into one of the driver's: that one, if
        they see it, else one of their own, for `collect`. A URL is the same everywhere."""
        places = dict.fromkeys(nodes, directory)
        others = [node for node in nodes if not is_url(directory) and self._is_elsewhere(node)]
        if not others:
            return places
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".seen-by-all-nodes-") as probe:
            seen = await self._all("sees", dict.fromkeys(others, (probe.name,)))
        unseen: dict[str, tuple[Any, ...]] = {node: () for node in others if not seen[node]}
        return places | await self._all("scratch", unseen)

    async def collect(self, directory: str, places: Mapping[str, str]) -> None:
        """Bring what was written into `places` to the directory on the driver's machine. Raises `ResourceError`,
        `DeadlineExceeded`."""
        here = this_node()
        away: dict[str, tuple[Any, ...]] = {node: (place,) for node, place in places.items() if place != directory}
        for node, files in (await self._all("offer_all", away)).items():
            await self._all("collect", {here: (files, directory, self._facts_of(node).address)})
        await self.discard(directory, places)

    async def discard(self, directory: str, places: Mapping[str, str]) -> None:
        """Have nodes remove the places that they were given to write to instead of the directory."""
        await self._all("discard", {node: (place,) for node, place in places.items() if place != directory})

    def _is_elsewhere(self, node: str) -> bool:
        """Return whether the driver's paths may mean something else on a node."""
        if {node} == self._agents.members.keys():  # the driver's, which has one as long as the run lives
            return False
        memory = self._facts_of(node).memory
        return memory != self._facts_of(this_node()).memory

    def _facts_of(self, node: str) -> NodeFacts:
        """The facts of a node. Raises `WorkerDied` for one that has left since its actors were looked up."""
        if (found := self._agents.facts(self._timeout_s).get(node)) is None:
            raise _gone(node)
        return found

    def _wait(self, method: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Call a method on nodes at the same time. Returns the answers by node."""
        results = get_all(self._calls(method, arguments), phase="bring files to nodes", timeout_s=self._timeout_s)
        return dict(zip(arguments, results, strict=True))

    async def _all(self, method: str, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        """Do the same as `_wait` without blocking the event loop."""
        calls = self._calls(method, arguments)
        results = await answers(calls, phase="collect files", timeout_s=self._timeout_s) if calls else []
        return dict(zip(arguments, results, strict=True))

    def _calls(self, method: str, arguments: Mapping[str, tuple[Any, ...]]) -> list[tuple[str, Any]]:
        calls = []
        for node, some in arguments.items():
            if node not in self._agents.members:
                raise _gone(node)
            name, handle = self._agents.members[node]
            calls.append((name, getattr(handle, method).remote(*some)))
        return calls


def fetched_text(name: str, nodes: Sequence[Fetched]) -> str:
    """A line on how far nodes are with a model.

    >>> fetched_text("Qwen/Qwen2.5-7B", [(3_000_000_000, 15_000_000_000), (0, 15_000_000_000), (0, 0)])
    'fetching Qwen/Qwen2.5-7B: 3.0 of 30.0 GB'
    """
    come, missing = (sum(numbers) / 1e9 for numbers in zip(*nodes, strict=True))
    return f"fetching {name}: {come:.1f} of {missing:.1f} GB"


def _gone(node: str) -> WorkerDied:
    return WorkerDied(f"Node {node[:8]} has left, with what was to be read or written there.")
