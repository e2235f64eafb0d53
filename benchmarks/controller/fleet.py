"""The fleet of the benchmark: the real one, as if it had been adopted from another process, with handles of simulated
actors. So members are looked up by role, node or name as in every run."""

import asyncio
import concurrent.futures
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.controller.calls import Caller, Handle, Method
from benchmarks.controller.scale import Scale
from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.run import RunConfig
from penstock.network.connection import Address
from penstock.orchestrator.cluster.fleet.fleet import Fleet, FleetState, StoreState
from penstock.orchestrator.cluster.fleet.member_table import Member
from penstock.orchestrator.cluster.node_agents import AgentsState, NodeAgents
from penstock.orchestrator.cluster.owners import OWNER, RunOwner
from penstock.orchestrator.cluster.placement.actors import ActorPlan, plan_actors
from penstock.orchestrator.cluster.placement.assignment import Assignment, assign
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.cluster.placement.reservation import Reservation
from penstock.orchestrator.cluster.ray_calls import answers
from penstock.store.service.store_actor import STORE
from penstock.store.service.store_server import Endpoint
from penstock.workers.node.node_agent import NodeFacts
from penstock.workers.weights.publication.costs import SharedMemory

LEASE_S = 300.0
NAMESPACE = "penstock-controller"


@dataclass(frozen=True)
class StoreHandle(Endpoint):
    """The address at which the store is called, and the handle of its actor: clients take the one, the watch the
    other."""

    actor: Handle | None = None

    @property
    def progress(self) -> Method:
        assert self.actor is not None
        return self.actor.progress

    @property
    def process(self) -> Method:
        assert self.actor is not None
        return self.actor.process

    def __reduce__(self) -> tuple[Any, ...]:
        """Give members what clients need."""
        return Endpoint, (self.node, self.path, self.segments, self.address, self.token, self.nodes)


class OwnerHandle(Handle):
    """A handle of the actor that keeps what the next command is told. `keep_only` is asked for from where no event loop
    runs."""

    def __init__(self, caller: Caller, handles: Mapping[str, Any]) -> None:
        super().__init__(caller, OWNER)
        self._handles = dict(handles)

    @property
    def keep_only(self) -> "Kept":
        return Kept(self._handles)


class Kept:
    """A call that has its answer."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def remote(self, *arguments: Any) -> "Kept":
        return self

    def future(self) -> "concurrent.futures.Future[Any]":
        found: concurrent.futures.Future[Any] = concurrent.futures.Future()
        found.set_result(self._value)
        return found


def plan_of(config: RunConfig, flow: Dataflow, scale: Scale) -> tuple[list[ActorPlan], Assignment]:
    """Plan which members there are, and on which nodes: the driver's has no devices, each of the others has
    `scale.devices`."""
    plan = plan_actors(flow, config)
    count = -(-scale.num_ranks // scale.devices) - (-scale.num_engines // scale.devices)
    nodes = [_node(0, 0.0), *(_node(number, float(scale.devices)) for number in range(1, count + 1))]
    return plan, assign(plan, nodes, config)


def agents_of(assignment: Assignment) -> dict[str, str]:
    """Names of the agents, by node."""
    return {node.id: f"Agent-{node.address}" for node in assignment.nodes}


def make_fleet(
    config: RunConfig, flow: Dataflow, plan: list[ActorPlan], assignment: Assignment, caller: Caller, store: Endpoint
) -> Fleet:
    agents, names = agents_of(assignment), [actor.name for actor in plan if actor.role != "store"]
    handles: dict[str, Any] = {name: Handle(caller, name) for name in [*names, *agents.values()]}
    owner = RunOwner(OwnerHandle(caller, handles), 1, LEASE_S)
    owner.keep_only(handles, ())
    handles[STORE] = StoreHandle(
        store.node, store.path, store.segments, store.address, store.token, store.nodes, Handle(caller, STORE)
    )
    of_run = NodeAgents("run", NAMESPACE, config.cluster, owner=owner)
    fleet = Fleet(plan, config, flow, "/model", of_run)
    facts = {node.id: _facts(node) for node in assignment.nodes}
    state = FleetState(
        [Member(actor, int(actor.name in names)) for actor in plan], {name: name for name in names},
        Reservation(assignment, {}, None, owner),
        AgentsState(of_run.root, b"", agents, set(agents.values()), facts), {}, StoreState(STORE, 1),
        {node.id: int(node.cpus) for node in assignment.nodes},
    )  # fmt: skip
    fleet.take_over(state, handles)
    return fleet


async def attach(fleet: Fleet, timeout_s: float) -> None:
    """Attach the ranks to the store, as `Fleet.start` does."""
    calls: Sequence[tuple[str, asyncio.Future[Any]]] = [
        (name, handle.attach.remote(fleet.store, fleet.owner.epoch)) for name, handle in fleet.role("trainer")
    ]
    await answers(calls, phase="start", timeout_s=timeout_s)


def _node(number: int, cpus: float) -> Node:
    address = f"10.0.{number // 256}.{number % 256}"
    return Node(f"{number:056x}", f"node-{number}", address, cpus)


def _facts(node: Node) -> NodeFacts:
    rows, memory = ("/dev/shm/rows", "/tmp/rows"), SharedMemory(2**40, 2**40)
    return NodeFacts(node.name, Address(node.address, 1), int(node.cpus), node.id, rows, memory)
