"""A cluster without processes: the real fleet, with its placement, agents, files, relays of weights and copies of the
state, over scripted members on nodes that may lose their power. On a virtual clock (`tests/virtual_time.py`) a run
through many deaths takes a second.

What lies in a node's shared memory is its agent's: versions of the weights, and copies of ranks' states. It is gone
with the agent.
"""

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import DeadlineExceeded, MemoryCheckpointError, WeightError
from penstock.conf.run import RunConfig
from penstock.network.connection import Address
from penstock.orchestrator.cluster import node_agents as agents_module
from penstock.orchestrator.cluster.fleet import capacity as capacity_module
from penstock.orchestrator.cluster.fleet.actor_maker import ActorMaker
from penstock.orchestrator.cluster.fleet.fleet import Fleet
from penstock.orchestrator.cluster.node_agents import NodeAgents
from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.cluster.placement import reservation as reservation_module
from penstock.orchestrator.cluster.placement.actors import plan_actors
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.workers.compute import Compute
from penstock.workers.node.node_actor import NodeAgentActor
from penstock.workers.node.node_agent import NodeFacts
from penstock.workers.prompts.prompts_actor import Prompts as RealPrompts
from penstock.workers.protocols import Publication
from penstock.workers.reward.reward_actor import Reward
from penstock.workers.rollout.rollout_actor import Rollout as RealRollout
from penstock.workers.trainer.step_report import StepReport
from penstock.workers.trainer.trainer_actor import Trainer as RealTrainer
from penstock.workers.weights.chain.plan import Broadcast
from penstock.workers.weights.publication.costs import SharedMemory
from tests.fakes.actors import FakeHandle
from tests.orchestrator import scripted_fleet as scripted
from tests.orchestrator.scripted_store import ScriptedStoreProcess

Pause = Callable[[float], Any]
LOOK_S = 0.2
"""Seconds between two looks at what others have."""


class Cluster:
    """The nodes, and who is on them. The first is the driver's."""

    def __init__(self, num_nodes: int) -> None:
        self._numbers = itertools.count()
        self.nodes: list[Node] = []
        self.agents: dict[str, Agent] = {}
        """The agent on each node that has one, also a dead one."""
        self.handles: dict[str, list[FakeHandle]] = {}
        """Actors on each node."""
        for _ in range(num_nodes):
            self.power_on()

    def power_on(self) -> None:
        number = next(self._numbers)
        self.nodes.append(Node(f"{number + 1:056x}", f"machine{number}", f"10.0.0.{number}", cpus=8.0))

    def power_off(self, node: str) -> None:
        """End all that is on a node, and the node itself."""
        self.nodes = [one for one in self.nodes if one.id != node]
        for handle in self.handles.pop(node, []):
            handle.kill()

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Answer in Ray's place what nodes there are."""
        for module in (reservation_module, capacity_module):
            for name in ("cluster_nodes", "free_nodes"):
                monkeypatch.setattr(module, name, lambda: list(self.nodes), raising=False)

        monkeypatch.setattr(agents_module, "this_node", lambda: f"{1:056x}")


class Agent(scripted.Agent):
    """A node's agent, with what lies in its shared memory."""

    def __init__(self, node: Node, cluster: Cluster, pause: Pause) -> None:
        self.node, self._cluster, self._pause = node, cluster, pause
        self.plan: Any = None
        self.broadcast: Broadcast | None = None
        self.cut_by: Any = None
        """Plan of the broadcast."""
        self.versions: set[int] = set()
        self._kept: int | None = None
        self.states: dict[int, set[int]] = {}
        """Steps of the copies, by rank."""

    def facts(self) -> NodeFacts:
        place = Address(self.node.address, 1)
        return NodeFacts(self.node.name, place, 8, self.node.id, ("rows", "spill"), SharedMemory(2**40, 2**40))

    async def take_question(self) -> Any:
        await asyncio.Event().wait()

    async def measure_link(self, address: Address) -> float:
        await self._pause(0.5)
        return 1e9

    async def clear_rows(self) -> None: ...

    def scratch(self) -> str:
        return "/none"

    def sees(self, path: str) -> bool:
        return True

    async def plan_chunks(self, plan: Any) -> None:
        self.plan = plan

    async def begin_version(self, broadcast: Broadcast) -> None:
        await self._pause(0.2)
        if self.broadcast is not None and broadcast.number <= self.broadcast.number:
            raise WeightError("an older broadcast")
        self.broadcast, self.cut_by = broadcast, self.plan

    async def wait_for_version(self, version: int, timeout_s: float) -> Publication:
        broadcast, deadline = self.broadcast, asyncio.get_running_loop().time() + timeout_s
        while self.broadcast is broadcast and asyncio.get_running_loop().time() < deadline:
            assert broadcast is not None
            sources = [self._cluster.agents[node] for node in self.cut_by]
            if any(one.broadcast is not None and one.broadcast.number > broadcast.number for one in sources):
                raise WeightError("a newer broadcast")
            if all(version in one.versions and one.cut_by == self.cut_by for one in sources):
                await self._pause(1.0)
                self.versions.add(version)
                return Publication("v", version)
            await asyncio.sleep(LOOK_S)
        raise DeadlineExceeded(f"version {version} did not come")

    async def keep_version(self, version: int | None) -> bool:
        self._kept = version if version in self.versions else None
        return self._kept is not None

    async def reclaim_versions(self) -> None:
        newest = sorted(self.versions)[-2:]
        self.versions = {version for version in self.versions if version in (*newest, self._kept)}

    async def fetch_states(self, name: str, copies: Mapping[int, int], source: Address) -> None:
        await self._pause(0.5)
        found = [agent for agent in self._cluster.agents.values() if agent.node.address == source.host]
        for rank, step in copies.items():
            if not any(step in agent.states.get(rank, set()) for agent in found if is_there(agent, self._cluster)):
                raise MemoryCheckpointError(f"no copy of rank {rank} after step {step}")
            self.keep(rank, step)

    async def memory_checkpoints(self, name: str) -> dict[int, list[int]]:
        return {rank: sorted(steps) for rank, steps in self.states.items()}

    async def keep_only_states(self, name: str, ranks: Collection[int], step: int) -> None:
        self.states = {
            rank: {one for one in steps if one <= step} for rank, steps in self.states.items() if rank in ranks
        }

    def keep(self, rank: int, step: int) -> None:
        """Keep a rank's copy, and the one before."""
        self.states[rank] = set(sorted({*self.states.get(rank, set()), step})[-2:])


def is_there(agent: Agent, cluster: Cluster) -> bool:
    return cluster.agents.get(agent.node.id) is agent


class OnNode:
    """A member on a node, whose agent it depends on."""

    agent: Agent

    async def start(self, *told: Any) -> None:
        await asyncio.sleep(1.0)

    async def address(self) -> str:
        return "somewhere"

    def close(self) -> None: ...


class Rollout(OnNode, scripted.Rollout):
    async def load(self, publication: Publication, epoch: int) -> None:
        if publication.version not in self.agent.versions:
            raise WeightError(f"version {publication.version} is not here")
        await super().load(publication, epoch)


class Trainer(OnNode, scripted.Trainer):
    async def step(self, step: int, records_tokens: bool, epoch: int) -> StepReport | None:
        report = await super().step(step, records_tokens, epoch)
        self.agent.keep(self._rank, step)
        return report

    async def restore(self, step: int, epoch: int) -> None:
        if step not in self.agent.states.get(self._rank, set()):
            raise MemoryCheckpointError(f"no copy of rank {self._rank} after step {step} is here")
        await super().restore(step, epoch)

    async def plan_chunks(self, node: str, num_receivers: int) -> tuple[str, ...]:
        """The nodes of the ranks: on one node here, as ranks are placed together."""
        return (node,)

    async def finish_publishing(self, version: int, epoch: int) -> Publication:
        publication: Publication = await super().finish_publishing(version, epoch)
        self.agent.versions.add(version)
        return publication


class Stage(OnNode, scripted.Stage):
    pass


class Prompts(OnNode, scripted.Prompts):
    pass


class ScriptedOwner(Owner):
    """Makes scripted actors in the place of real ones, where Ray was told to put them."""

    def __init__(self, cluster: Cluster, config: RunConfig, flow: Dataflow, random: Random, pause: Pause) -> None:
        self._cluster, self._config, self._flow, self._random, self._pause = cluster, config, flow, random, pause
        self.fleet: Any = None

    def make(self, cls: type, options: Mapping[str, Any], *arguments: Any) -> FakeHandle:
        node = next((one for one in self._cluster.nodes if one.id == options["scheduling_strategy"].node_id), None)
        name = str(options["name"])
        if node is None:  # Ray makes none on a node that is gone
            handle = FakeHandle(None, name)
            handle.kill()
            return handle
        if cls is NodeAgentActor:
            member: Any = Agent(node, self._cluster, self._pause)
            self._cluster.agents[node.id] = member
        else:
            member = self._member(cls, arguments)
            member.agent = self._cluster.agents[node.id]
        handle = FakeHandle(member, name)
        self._cluster.handles.setdefault(node.id, []).append(handle)
        return handle

    def end(self, handle: FakeHandle) -> None:
        handle.kill()

    def _member(self, cls: type, arguments: Sequence[Any]) -> Any:
        config, size = self._config, self._flow.samples_per_prompt
        if cls is RealPrompts:
            return Prompts(config.trainer.groups_per_step)
        if cls is RealRollout:
            return Rollout(arguments[0].name, config, size, self._random, self._pause, config.rollout.least_workers)
        if cls is RealTrainer:
            return Trainer(self.fleet.store, arguments[0].rank, config.trainer.num_ranks, self._pause)
        if cls is Reward:
            return Stage(arguments[0].name, "reward", scripted.rewards_of, self._pause)
        assert cls is Compute
        return Stage(arguments[0], arguments[1].name, scripted.column_of(arguments[1].writes[0].name), self._pause)


class ScriptedNodesFleet(Fleet):
    """The real fleet over a cluster of scripted members, with a store in this process."""

    def __init__(self, cluster: Cluster, config: RunConfig, flow: Dataflow, random: Random) -> None:
        async def pause(longest_s: float) -> None:
            await asyncio.sleep(random.uniform(0.0, longest_s))

        def told(store: Any) -> None:
            self._scripted.handle = store

        owner = ScriptedOwner(cluster, config, flow, random, pause)
        owner.fleet = self
        agents = NodeAgents("run", "run", config.cluster, owner=owner)
        super().__init__(plan_actors(flow, config), config, flow, "/none", agents)
        make = lambda restore=None: scripted.store_of(config, flow, restore)  # noqa: E731
        self._scripted = ScriptedStoreProcess(config, make, told, pause)
        self._scripted.handle = make()  # type: ignore[attr-defined]

    def _make_parts(self) -> ActorMaker:
        maker = super()._make_parts()
        self.store_process = self._scripted  # type: ignore[assignment]
        return maker

    def create(self) -> None:
        """As the real one, but for the store, which is there."""
        self._scripted.start = lambda snapshot: None  # type: ignore[attr-defined]
        super().create()

    @property
    def watched(self) -> list[tuple[str, str, Any]]:
        """All but the store, which is no actor here."""
        return [one for one in super().watched if one[0] != "store"]

    @property
    def weights_root(self) -> Path:
        return Path(self.config.output_dir) / "weights"
