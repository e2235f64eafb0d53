"""The actors of a run, with its store: started from the plan, named for the dashboard, replaced when they die, ended
without leaving a process behind.

`controller.py` drives a fleet over a store; `session.py` drives one without a store, for loops that people write.

`RollCall` asks many members the same question, by way of their nodes' agents:

    few members    controller ─▶ each of them
    many           controller ─▶ the agent of each node ─▶ its members: one call and one answer a node
                   controller ─▶ each member whose answer no agent has brought
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.algorithms.graph.dataflow import Dataflow
from penstock.conf.errors import NotStarted, WorkerDied
from penstock.conf.run import RunConfig
from penstock.orchestrator.cluster.fleet.actor_maker import ActorMaker, Sources, cores_here
from penstock.orchestrator.cluster.fleet.capacity import Capacity
from penstock.orchestrator.cluster.fleet.member_table import GANGS, Member, MemberTable
from penstock.orchestrator.cluster.node_agents import AgentsState, NodeAgents, NodeFiles, RelayNodes, StateNodes
from penstock.orchestrator.cluster.owners import Owner, RunOwner
from penstock.orchestrator.cluster.placement.actors import (
    ActorPlan,
    has_gpus_of_ranks,
    origin_of,
    ranks_of,
    start_rounds,
)
from penstock.orchestrator.cluster.placement.assignment import bytes_published, check_room
from penstock.orchestrator.cluster.placement.nodes import Node
from penstock.orchestrator.cluster.placement.reservation import Reservation
from penstock.orchestrator.cluster.placement.threads import SharedNode, Trial, threads_of
from penstock.orchestrator.cluster.ray_calls import (
    Handles,
    Kind,
    answer,
    answers,
    get_all,
    get_from_all,
    in_thread,
    kind_of,
    outcomes,
    try_all,
)
from penstock.orchestrator.run_directory.checkpoint import Checkpoint
from penstock.store.service.store_actor import STORE, create_store_actor, end_store_actor
from penstock.store.spec import StoreSpec
from penstock.workers.node.node_agent import STACKS, WEIGHTS
from penstock.workers.node.node_transfers import FileSet

DEAD_S = 1.0
"""Seconds for a store that seems lost to answer all the same, before it is killed."""


@dataclass(frozen=True)
class StoreState:
    """The facts that another process needs to take a store over."""

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
        """Start the store. `snapshot`: what it starts from; None: nothing."""
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
        agents = list(self._agents.members.values())
        await try_all(agents, "clear_rows", phase="clear rows", timeout_s=timeout_s)  # of a node that is gone, all are
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


@dataclass(frozen=True)
class FleetState:
    """The fleet at one moment: what a process needs to take over a fleet that another one has started, as plain data
    without handles. Members that start or join at that moment are not in it."""

    members: list[Member]
    """The table of members, without handles."""
    names: dict[str, str]
    """Names in Ray of the actors that serve, by the member's name."""
    reservation: Reservation
    agents: AgentsState
    places: dict[tuple[str, str], str]
    """Places of the driver's files on other nodes, by node and the driver's path."""
    store: StoreState | None
    cores: dict[str, int]
    """Number of cores, by node."""
    takes_turns: bool = False
    """Whether engines and ranks take turns on the CPUs."""

    @property
    def all_names(self) -> list[str]:
        """Names of all actors in Ray."""
        stores = [self.store.name] if self.store is not None else []
        return [*self.names.values(), *self.agents.members.values(), *stores]


MANY = 100
"""Least number of members for which agents are asked. Fewer are asked themselves."""
AGENT_S = 5.0
"""Deadline for an agent to answer, even if members have longer."""
SHARE = 0.25
"""Largest share of the members' time that is for agents: the rest is for members that are asked themselves."""
MEMBERS_SHARE = 0.5
"""Share of the agent's time that is for its members."""


class RollCall:
    """Asks many members the same, such as a heartbeat: by way of their nodes' agents where there are many.

    An agent brings answers and nothing else: a member's own call says whether it is silent, failed or dead. So an agent
    that is slow, cut off or dead makes no member seem so. The reason for the detour: a call of an actor costs its
    caller 0.3 ms of CPU, and a thousand engines are on a hundred nodes.

    Lifecycle: `ask` whenever something is to be known of many. Agents get their list of members whenever it changes.
    """

    def __init__(
        self,
        actors: Callable[[], Mapping[str, Any]],
        agents: NodeAgents,
        node_of: Callable[[str], str | None],
        many: int = MANY,
    ) -> None:
        """`actors`: returns the present handles by name. `node_of`: the node of an actor, by its name."""
        self._actors, self._agents, self._node_of, self._many = actors, agents, node_of, many
        self._seen: tuple[dict[str, Any], dict[str, tuple[str, Any]]] = {}, {}
        """Actors and agents, as they were when `_members_by_node` was made."""
        self._members_by_node: dict[str, dict[str, Any]] = {}
        """Handles of the actors on each node, by node and name."""
        self._told: dict[str, tuple[Any, dict[str, Any]]] = {}
        """Agent of each node, and the actors there that it knows, by node."""

    async def ask(self, members: Handles, method: str, *, phase: str, timeout_s: float) -> list[Any]:
        """Answers of the members to `method`, which takes no arguments, in order: the answer of each, or its error."""
        deadline = time.monotonic() + timeout_s
        found: dict[str, Any] = {}
        if len(members) >= self._many:
            found = await self._by_agents(members, method, phase, min(AGENT_S, SHARE * timeout_s))
        calls = [(name, getattr(handle, method).remote()) for name, handle in members if name not in found]
        left_s = max(0.0, deadline - time.monotonic())
        said = await outcomes(calls, phase=phase, timeout_s=left_s)
        found |= dict(zip((name for name, _ in calls), said, strict=True))
        return [found[name] for name, _ in members]

    async def _by_agents(self, members: Handles, method: str, phase: str, timeout_s: float) -> dict[str, Any]:
        """Answers that agents have brought, by the member's name."""
        self._update_members_by_node()
        wanted = dict(members)
        asked: dict[str, tuple[Any, dict[str, Any]]] = {}
        calls = []
        for node, handles in self._members_by_node.items():
            name, agent = self._agents.members[node]
            names = [one for one, handle in handles.items() if wanted.get(one) is handle]
            if not names:
                continue
            news = handles if self._told.get(node) != (agent, handles) else None
            asked[node] = agent, handles
            calls.append((name, agent.ask_members.remote(method, names, MEMBERS_SHARE * timeout_s, news)))
        found: dict[str, Any] = {}
        for node, said in zip(asked, await outcomes(calls, phase=phase, timeout_s=timeout_s), strict=True):
            if not isinstance(said, Exception):
                self._told[node] = asked[node]
                found |= said
        return found

    def _update_members_by_node(self) -> None:
        seen = dict(self._actors()), dict(self._agents.members)
        if seen == self._seen:
            return
        self._seen, self._members_by_node = seen, {}
        self._told = {node: told for node, told in self._told.items() if node in self._agents.members}
        for name, handle in seen[0].items():
            if (node := self._node_of(name)) in self._agents.members:
                self._members_by_node.setdefault(str(node), {})[name] = handle


LEAST_GRACE_S = 5.0
"""Seconds that the store and the agents have to end even if actors hang, unless cluster.shutdown_timeout_s is less:
large files take some to be removed."""


class Fleet(MemberTable):
    """Lifecycle: `create` makes the actors, `start` loads models and engines side by side, `close` ends them. Or it is
    taken over from a process that has died, with actors that live on.

    `actors` maps the plan's names to handles; `role(...)` picks those of one role, in rank order. Dead actors are
    `remove`d. `start_members` starts others in their place, which are there once they are `add`ed. `capacity` plans a
    further member; one that is to leave is `take_out`, then `end`ed.
    """

    def __init__(
        self,
        plan: list[ActorPlan],
        config: RunConfig,
        flow: Dataflow,
        model_path: str,
        agents: NodeAgents,
        *,
        with_store: bool = True,
        resumed: Checkpoint | None = None,
        trials: Mapping[SharedNode, Trial] | None = None,
    ) -> None:
        """`agents`: those of the run's nodes, whose owner and namespace are the other actors', too. `resumed`: what the
        run goes on from. `trials`: those of numbers of threads that the run has made before."""
        super().__init__(plan, config.rollout.start_timeout_s, agents.owner)
        self.config, self.flow, self.model_path, self.namespace = config, flow, model_path, agents.namespace
        self.agents, self.with_store, self.resumed = agents, with_store, resumed
        self._reservation: Reservation | None = None
        self._gpus_of: dict[str, tuple[str, ...]] = {}
        """GPUs of the engines that have those of ranks, by name."""
        self._files = NodeFiles(agents, config.cluster.files_timeout_s)
        self._maker: ActorMaker | None = None
        self._capacity: Capacity | None = None
        self.cores: dict[str, int] = {}
        """Number of cores that processes may use, by node."""
        self.trials: dict[SharedNode, Trial] = dict(trials or {})
        """Trials of numbers of threads: those of `try_threads` are added."""
        self.takes_turns = False
        """True while engines and ranks of one machine's CPUs take turns (`control/turns.py`)."""
        self.store_process: StoreProcess | None = None
        self.roll_call = RollCall(lambda: self.actors, agents, self.node_of)

    @property
    def store(self) -> Any:
        """The store's actor; None where there is none."""
        return self.store_process.handle if self.store_process is not None else None

    @property
    def reservation(self) -> Reservation:
        if self._reservation is None:
            raise NotStarted("No actor has its node before the fleet's `create`.")
        return self._reservation

    @property
    def capacity(self) -> Capacity:
        """The capacity of the fleet: what makes room for members that join."""
        if self._capacity is None:
            raise NotStarted("Nobody can join before the fleet's `create`.")
        return self._capacity

    def create(self, tell: Callable[[str], None] = lambda line: None) -> None:
        """Create every actor; models are on their nodes then, and not loaded yet. `tell`: called with how far nodes are
        with a model that they fetch."""
        timeout_s = self.config.cluster.wait_s or self.config.rollout.start_timeout_s
        self._reservation = Reservation.make(self.plan, self.config, self.namespace, timeout_s, self.owner)
        nodes = self._reservation.assignment.nodes
        self.agents.create([(node.id, node.address) for node in nodes])
        self.cores = dict(self._cores_of(nodes))
        maker = self._make_parts()
        self._files.tell = tell
        maker.bring_files()
        if self.store_process is not None:
            self.store_process.start(self.resumed.store if self.resumed is not None else None)
        if self.config.rollout.follows_cluster:
            self.capacity.fill()
        for actor in self.plan:
            if actor.role == "store" or (not self.with_store and actor.role in ("prompts", "compute")):
                continue
            self.add([(actor.name, self._make(actor.name))])

    def _make_parts(self) -> ActorMaker:
        """Make what makes actors, once it is known where they go."""
        self._maker = ActorMaker(
            Sources(self.config, self.flow, self.model_path, self.namespace, self.resumed),
            self, self.reservation, self._files, self._threads_of, self.agents.root,
        )  # fmt: skip
        self._capacity = Capacity(
            self, self.reservation, self.agents, self._maker, self.cores, self.config, self.namespace
        )
        if self.with_store:
            store, crosses_nodes = self.plan_of(STORE), len(self.reservation.assignment.nodes) > 1
            self.store_process = StoreProcess(
                self.config, self.flow, self.namespace, self.agents, self._node_of(STORE),
                lambda: self.reservation.options(store), crosses_nodes, self.owner,
            )  # fmt: skip
        return self._maker

    def state(self, owner: RunOwner) -> FleetState:
        """The fleet's present state, for a process that takes it over."""
        names = {name: owner.name_of(handle) for name, handle in self.actors.items()}
        store = self.store_process.state if self.store_process is not None else None
        return FleetState(
            self.lines(), names, self.reservation, self.agents.state, self._files.state, store, dict(self.cores),
            self.takes_turns,
        )  # fmt: skip

    def take_over(self, state: FleetState, handles: Mapping[str, Any]) -> None:
        """Go on with actors that are there, or have died since, instead of `create` and `start`. `handles`: by the
        names that Ray knows them by."""
        self.adopt(state.members, {name: handles[known] for name, known in state.names.items()})
        self.cores, self.takes_turns = dict(state.cores), state.takes_turns
        self._reservation = state.reservation.belong_to(self.owner)
        self.agents.adopt(state.agents, handles)
        self._files.adopt(state.places)
        self._make_parts()
        if self.store_process is not None and state.store is not None:
            self.store_process.adopt(state.store, handles)

    def start(self) -> None:
        """Load models and start engines, all at the same time but for those that share a GPU. Raises what the first
        failing actor raised, and `ResourceError` for a node that has no room for the weights."""
        timeout_s = self.config.rollout.start_timeout_s
        node_of = {name: node.id for name, node in self.reservation.assignment.node_of.items()}
        facts, size = self.agents.facts(timeout_s), bytes_published(self.config, self.model_path)
        check_room(facts, node_of, self.plan, size, self.config.num_publications)
        self._find_gpus()
        for number, teams in enumerate(start_rounds(self.teams(), self.plan, self.config)):
            if number == 1 and self.with_store and self.config.placement == "colocated":
                phase_timeout_s = self.config.weights.phase_timeout_s
                get_from_all(self.role("rollout"), "sleep", phase="rollout: sleep", timeout_s=phase_timeout_s)
            calls: list[tuple[str, Any]] = []
            for team in teams:
                members, address = [(name, self.handle_of(name)) for name in team], None
                if len(team) > 1:
                    (address,) = get_all([_address(members)], phase="start", timeout_s=timeout_s)
                calls += self._starts(members, address)
            get_all(calls, phase="start", timeout_s=[self._start_s(name) for name, _ in calls])
        if self.with_store:
            get_all(self._attaches(self.role("trainer")), phase="start", timeout_s=timeout_s)
        if self.resumed is not None:
            loads, phase = self._resumes(self.role("trainer")), f"resume {self.resumed.directory}"
            get_all(loads, phase=phase, timeout_s=self.config.checkpoint.timeout_s)

    async def end(self, actor: ActorPlan, handle: Any) -> None:
        """End the process of a member that has left, and give its reservation back."""
        if handle is not None:
            grace_s = self.config.cluster.shutdown_timeout_s
            await try_all([(actor.name, handle)], "close", phase="close", timeout_s=grace_s)
            self.owner.end(handle)
        self.capacity.vacate(actor)

    async def start_members(self, names: Sequence[str]) -> Handles:
        """Start actors of a team that joins, or in place of those that were removed, elsewhere if their node has left.
        They are in no role before they are added. Raises what one of them raised; then all are removed again."""
        await self.capacity.ensure_nodes(names)
        timeout_s = self.config.rollout.start_timeout_s
        members = await in_thread(
            lambda: [(name, self._make(name)) for name in names],
            lambda made: [*map(self.owner.end, dict(made).values())],
        )
        self.begin(members)
        try:
            address = None
            if len(names) > 1:
                (address,) = await answers([_address(members)], phase="start", timeout_s=timeout_s)
            await answers(self._starts(members, address), phase="start", timeout_s=self._start_s(names[0]))
            if self.with_store and self.plan_of(names[0]).role == "trainer":
                await answers(self._attaches(members), phase="start", timeout_s=timeout_s)
        except BaseException:
            self.remove(names)
            raise
        return members

    async def resume(self, trainers: Handles) -> None:
        """Have new ranks of the trainer start from the checkpoint that the run itself resumed from, if any."""
        if self.resumed is not None:
            phase = f"resume {self.resumed.directory}"
            await answers(self._resumes(trainers), phase=phase, timeout_s=self.config.checkpoint.timeout_s)

    async def attach_trainers(self) -> None:
        """Attach the ranks to the present store. Dead ranks are skipped: the callers that wait for them notice."""
        timeout_s = self.config.rollout.start_timeout_s
        found = await outcomes(self._attaches(self.role("trainer")), phase="attach", timeout_s=timeout_s)
        for error in found:
            if isinstance(error, Exception) and kind_of(error) is Kind.ERROR:
                raise error

    @property
    def weights_root(self) -> Path:
        """The directory of publications on every node of the run."""
        return Path(self.agents.root) / WEIGHTS

    async def places(self, directory: str) -> dict[str, str]:
        """Directory that each rank of the trainer writes to, by name, for what belongs into one of the driver's."""
        nodes = {name: self._node_of(name) for name, _ in self.role("trainer")}
        places = await self._files.places(directory, sorted(set(nodes.values())))
        return {name: places[node] for name, node in nodes.items()}

    def provided(self, directory: str, members: Handles) -> dict[str, str]:
        """Bring a directory to the nodes of members. Returns where each finds it, by name. Blocks. Raises
        `ResourceError`, `DeadlineExceeded`."""
        nodes = {name: self._node_of(name) for name, _ in members}
        self._files.provide(directory, sorted(set(nodes.values())), FileSet.of_directory)
        return {name: self._files.local(node, directory) for name, node in nodes.items()}

    async def collect(self, directory: str, places: Mapping[str, str]) -> None:
        """Bring what ranks have written to `places` to the driver's machine. Raises `ResourceError`,
        `DeadlineExceeded`."""
        await self._files.collect(directory, {self._node_of(name): place for name, place in places.items()})

    async def discard(self, directory: str, places: Mapping[str, str]) -> None:
        """Have nodes remove what ranks have written to `places` that the driver's machine does not see."""
        await self._files.discard(directory, {self._node_of(name): place for name, place in places.items()})

    @property
    def state_nodes(self) -> StateNodes:
        """The nodes that copies of the trainer's state go between."""
        node_of_rank = {actor.rank: self._node_of(actor.name) for actor in self.plan if actor.role == "trainer"}
        return self.agents.state_nodes(node_of_rank, self.config.rollout.start_timeout_s)

    @property
    def stacks_root(self) -> str:
        """The directory on every node that processes write their stacks to."""
        return f"{self.agents.root}/{STACKS}"

    @property
    def machines(self) -> list[Node]:
        """The nodes of the run, the driver's first."""
        return list(self.reservation.assignment.nodes)

    def node_of(self, name: str) -> str | None:
        """Ray's id of the node that the actor of a name is on; None: it has none, or the node has left."""
        node = self.reservation.assignment.node_of.get(name)
        return node.id if node is not None else None

    def threads_of(self, name: str) -> int:
        """Number of CPU threads of an engine or a rank."""
        return self._threads_of(self.plan_of(name))

    def _threads_of(self, actor: ActorPlan) -> int:
        chosen = {node: trial.alone(node) if self.takes_turns else trial.threads for node, trial in self.trials.items()}
        return threads_of(actor, self.plan, self.reservation.assignment, self.cores, self.config, chosen)

    def agent_of(self, name: str) -> tuple[str, Any] | None:
        """Name and handle of the agent on the node of an actor, by its name; None: the node has left."""
        node = self.node_of(name)
        return self.agents.members.get(node) if node is not None else None

    @property
    def watched(self) -> list[tuple[str, str, Any]]:
        """Role, name and handle of every actor that is there: members, agents and the store."""
        found = [("agent", name, handle) for name, handle in self.agents.members.values()]
        found += [(self.plan_of(name).role, name, handle) for name, handle in self.actors.items()]
        return found + ([("store", STORE, self.store)] if self.store is not None else [])

    @property
    def relay_nodes(self) -> RelayNodes:
        """The nodes that publications go between."""
        node_of = {name: node.id for name, node in self.reservation.assignment.node_of.items()}
        engines = [actor.name for actor in self.plan if actor.role == "rollout"]
        return self.agents.relay_nodes(node_of, engines, self.config.rollout.start_timeout_s)

    def role(self, role: str, stage: str | None = None) -> Handles:
        """Names and handles of one role, and of one stage of it if one is named; `agent`: those of the nodes that the
        run cannot do without, the driver's first."""
        if role == "agent":
            nodes = list(self.agents.members.items())
            return [member for node, member in nodes if self._capacity is None or not self._capacity.can_lose(node)]
        return super().role(role, stage)

    def close(self) -> None:
        """End every actor: ask first, kill what does not answer in time. All share the time: an actor that hangs
        takes it from the rest, which need moments. Never raises for an actor that is dead already."""
        grace_s = self.config.cluster.shutdown_timeout_s
        deadline, least_s = time.monotonic() + grace_s, min(LEAST_GRACE_S, grace_s)
        self.owner.close_all(self.all_handles(), grace_s)
        if self.store_process is not None:
            self.store_process.end(max(least_s, deadline - time.monotonic()))
        self.agents.close(max(least_s, deadline - time.monotonic()))
        if self._reservation is not None:
            self._reservation.release()
        self.owner.close()
        self.clear()

    def detach(self) -> None:
        """Give the fleet up: another process drives it now."""
        self.owner.detach()
        self.clear()

    def _make(self, name: str) -> Any:
        """Make an actor. The first of a name has it in Ray, too; names of dead actors are free late, so later ones have
        a number."""
        assert self._maker is not None
        count = self.next_incarnation(name)
        return self._maker.make(self.plan_of(name), name if count == 1 else f"{name}.{count}")

    def _starts(self, members: Handles, address: str | None) -> Handles:
        """The members' calls of `start`. `address`: where several meet."""
        return [(name, handle.start.remote(*self._start_arguments(name, address))) for name, handle in members]

    def _start_s(self, name: str) -> float:
        """Seconds for a member to load, and for an engine to compile."""
        rollout = self.config.rollout
        return rollout.engine_start_s if self.plan_of(name).role == "rollout" else rollout.start_timeout_s

    def _start_arguments(self, name: str, address: str | None) -> tuple[Any, ...]:
        """Arguments of a member's `start`: where its gang meets, or the GPUs of ranks that an engine has."""
        role = self.plan_of(name).role
        if role in GANGS:
            return (address,)
        return (self._gpus_of[name],) if name in self._gpus_of else ()

    def _find_gpus(self) -> None:
        """Ask the ranks for the GPUs that engines have with them: members that come later get the same."""
        if not has_gpus_of_ranks(self.config):
            return
        ranks = self.role("trainer")
        gpus = get_from_all(ranks, "gpus", phase="start", timeout_s=self.config.rollout.start_timeout_s)
        of_rank = {name: found for (name, _), found in zip(ranks, gpus, strict=True)}
        for engine in self.plan:
            if engine.role == "rollout":
                own = ranks_of(engine, self.plan, self.config)
                self._gpus_of[engine.name] = tuple(gpu for name in own for gpu in of_rank[name])

    def _attaches(self, trainers: Handles) -> Handles:
        return [(name, handle.attach.remote(self.store, self.owner.epoch)) for name, handle in trainers]

    def _resumes(self, trainers: Handles) -> Handles:
        assert self._maker is not None
        assert self.resumed is not None
        place, files = self.resumed.trainer, self.resumed.files
        return [(name, handle.resume.remote(self._maker.local(name, place), files)) for name, handle in trainers]

    def _node_of(self, name: str) -> str:
        if (node := self.node_of(name)) is None:
            raise WorkerDied(f"{name}: its node has left.")
        return node

    def _cores_of(self, nodes: Sequence[Node]) -> Mapping[str, int]:
        """Number of cores, by node id. If the driver's is the only one, this process knows it and waits for no
        agent."""
        if len(nodes) == 1:
            return {nodes[0].id: cores_here()}
        facts = self.agents.facts(self.config.rollout.start_timeout_s)
        return {node: fact.cores for node, fact in facts.items()}


def _address(ranks: Handles) -> tuple[str, Any]:
    """The call that says where the ranks meet: that of the first."""
    name, first = ranks[0]
    return name, first.address.remote()
