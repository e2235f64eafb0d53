"""Room for members that join a fleet during its run: a reservation, a node with an agent, and their files there.

    enlarge ─▶ a reservation of its own ─▶ the node's agent, where it has none ─▶ model or code ─▶ the plan has one more

The same is done for members that start again because their node has left.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from penstock.conf.errors import DeadlineExceeded, ResourceError, WorkerDied
from penstock.conf.run import RunConfig
from penstock.conf.weights import takes_newcomers
from penstock.orchestrator.cluster.fleet.actor_maker import ActorMaker
from penstock.orchestrator.cluster.fleet.member_table import MemberTable
from penstock.orchestrator.cluster.node_agents import NewAgent, NodeAgents
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.assignment import check_room, engines_to_add, next_of
from penstock.orchestrator.cluster.placement.nodes import free_nodes
from penstock.orchestrator.cluster.placement.reservation import (
    Claim,
    Reservation,
    names_of_groups,
    received,
    runs_ahead,
    withdraw,
)
from penstock.orchestrator.cluster.ray_calls import in_thread, look

CHANGING = ("rollout", "reward")
"""Roles that take any number of members."""
LOOK_S = 0.2
"""Seconds between two looks at agents that did not answer."""
WAIT_S = 1.0
"""Seconds between two looks whether a node has come that was asked for."""
_LOG = logging.getLogger("penstock")
Claims = Callable[[ActorPlan, Sequence[ActorPlan], RunConfig, str], Claim]


class Capacity:
    """Lifecycle: `enlarge` for each member that joins, `vacate` for each that left."""

    def __init__(
        self,
        table: MemberTable,
        reservation: Reservation,
        agents: NodeAgents,
        maker: ActorMaker,
        cores: dict[str, int],
        config: RunConfig,
        namespace: str,
    ) -> None:
        """`cores`: the number on each node, which `maker` reads as well."""
        self._table, self._reservation, self._agents, self._maker = table, reservation, agents, maker
        self._cores, self._config, self._namespace = cores, config, namespace
        self._may_change = takes_newcomers(config)
        self._making_room = asyncio.Lock()
        self._deadlines: dict[str, float] = {}
        """Times until which members wait for another node, by name."""
        self.on_node: Callable[[], None] = lambda: None
        """Callback for when a node may be new, or have a new agent."""

    def fill(self) -> None:
        """Plan as many engines as there is room for (`rollout.num_workers=auto`), to start with the rest of the
        fleet."""
        for _ in range(self.num_engines_more()):
            actor = replace(next_of(self._table.plan, "rollout", "rollout", []), joins=False)
            try:
                claim, agent = self._claim_room(actor, self._reservation.claim)
            except ResourceError:  # somebody else was faster
                return
            with self._on_node_of(claim, agent):
                self._maker.bring_files_of(actor, claim.node.id)
            self._accept(actor, claim)

    def num_engines_more(self) -> int:
        """Number of further engines that there is room for now, and use; 0 while Ray does not say, and while other runs
        wait for the room."""
        with contextlib.suppress(RayError):
            if (engine := self._engine) is not None and not runs_ahead(names_of_groups(), self._namespace):
                received = self._reservation.num_received(engine)
                return engines_to_add(self._table.plan, free_nodes(), self._config, received)
        return 0

    def ask_for_engines(self, count: int) -> bool:
        """Ask the cluster for room for so many further engines, unless other runs wait for room; 0: take back what no
        node has yet. Returns whether it is a new request."""
        with contextlib.suppress(RayError):
            was_asking, engine = self._reservation.is_asking, self._engine
            if engine is not None and (count or was_asking):
                is_turn = not runs_ahead(names_of_groups(), self._namespace)
                self._reservation.ask_for(count if is_turn else 0, engine, self._config, self._namespace)
            return self._reservation.is_asking and not was_asking
        return False

    @property
    def is_asking(self) -> bool:
        """True while the cluster has not brought all that was asked for."""
        return self._reservation.is_asking

    @property
    def _engine(self) -> ActorPlan | None:
        """The plan of any engine; None: the run has none."""
        return next((actor for actor in self._table.plan if actor.role == "rollout"), None)

    async def enlarge(self, role: str, stage: str | None) -> str:
        """Plan one more member like those of a role and stage, on a node that has room now and is made ready for it.
        Returns its name, for `Fleet.replace`. Raises `ResourceError`, `DeadlineExceeded`."""
        actor = next_of(self._table.plan, role, stage, self._table.names_made)
        self._accept(actor, await self._find_room(actor, self._reservation.claim))
        return actor.name

    def vacate(self, actor: ActorPlan) -> None:
        """Give back the room of a member that has ended."""
        self._reservation.vacate(actor)

    def place_of(self, name: str) -> str:
        """The name that people read of the node that a member is on."""
        return self._reservation.assignment.titles[name]

    def can_lose(self, node: str) -> bool:
        """Return whether the run can continue without a node: its members leave, or start again elsewhere. It cannot
        without the driver's, nor without one with ranks whose state no other node has a copy of."""
        is_first = node == next(iter(self._agents.members), node)
        has_ranks = any(actor.role == "trainer" for actor in self._on(node))
        keeps = self._config.faults.keep_state and self._config.faults.partner_share > 0
        return self._may_change and not is_first and (keeps or not has_ranks)

    def can_leave(self, actor: ActorPlan) -> bool:
        """Return whether a member need not start again when its node is lost: others that serve elsewhere do the
        same. Engines of evaluations' own do not sample for training, but those that do can evaluate."""
        node = self._reservation.assignment.node_of[actor.name].id
        here = {other.name for other in self._on(node)}
        others = [other for other in self._table.plan if other.name not in here and self._table.handle_of(other.name)]
        able = [other for other in others if self._is_own(actor) or not self._is_own(other)]
        alike = (actor.role, actor.stage) in {(other.role, other.stage) for other in able}
        return alike and actor.role in CHANGING

    def _is_own(self, actor: ActorPlan) -> bool:
        """Return whether a member is an engine that samples for evaluations alone."""
        return actor.role == "rollout" and self._config.rollout.least_workers <= actor.rank < self._config.num_engines

    async def ensure_nodes(self, names: Sequence[str]) -> None:
        """Make certain, before members start again, that the node of each is there, or give it another. Raises
        `WorkerDied` where no other has room, `DeadlineExceeded`."""
        deadline = time.monotonic() + self._config.rollout.start_timeout_s
        while late := await self._silent_agents(names):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{', '.join(late)} did not answer within {self._config.rollout.start_timeout_s:g} s "
                    f"(rollout.start_timeout_s): {', '.join(names)} cannot start there."
                )
            await asyncio.sleep(LOOK_S)
        for actor in [actor for actor in self._table.plan if actor.name in names]:
            if self._reservation.assignment.node_of[actor.name].id not in self._agents.members:
                await self._move(actor)

    async def _silent_agents(self, names: Sequence[str]) -> list[str]:
        """Names of agents that do not answer, and are not given up yet."""
        nodes = {self._reservation.assignment.node_of[name].id for name in names}
        agents = [member for node, member in self._agents.members.items() if node in nodes]
        silent = [agent for agent, error in zip(agents, await look(agents), strict=True) if error is not None]
        return [name for name, handle in silent if any(handle is one for _, one in self._agents.members.values())]

    async def _move(self, actor: ActorPlan) -> None:
        """Find another node for a member whose node has left."""
        try:
            claim = await self._find_room(actor, self._reservation.claim_again)
        except ResourceError as error:
            claim = await self._wait_for_room(actor, error)
        self._deadlines.pop(actor.name, None)
        self._reservation.accept(actor, claim)

    async def _wait_for_room(self, actor: ActorPlan, refusal: ResourceError) -> Claim:
        """Room for a member that no node has now, on one that comes within `cluster.wait_s` of its first `refusal`.
        Raises `WorkerDied`."""
        wait_s, lost = self._config.cluster.wait_s, f"{actor.name} is lost with its node"
        deadline = self._deadlines.setdefault(actor.name, time.monotonic() + wait_s)
        request: PlacementGroup | None = None
        claim: Claim | None = None
        try:
            if time.monotonic() < deadline:
                _LOG.warning("%s, and waits up to %g s (cluster.wait_s) for another. %s", lost, wait_s, refusal)
                request = await in_thread(
                    lambda: self._reservation.request(actor, self._config, self._namespace), withdraw
                )
            while request is not None and time.monotonic() < deadline:
                if (room := await asyncio.to_thread(received, request)) is not None:
                    claim = await self._find_room(actor, lambda *_: room)
                    return claim
                await asyncio.sleep(WAIT_S)
        except (ResourceError, RayError) as error:
            refusal = ResourceError(str(error))
        finally:
            if request is not None and claim is None:
                withdraw(request)
        within = f", and no other came within {wait_s:g} s (cluster.wait_s)" if wait_s else ""
        raise WorkerDied(f"{lost}{within}. {refusal}")

    async def _find_room(self, actor: ActorPlan, claims: Claims) -> Claim:
        """Room for a member, by one of the ways to claim it, on a node that has its files. It is given back if the
        caller is cancelled."""
        async with self._making_room:
            claim, agent = await in_thread(lambda: self._claim_room(actor, claims), self._give_back)
            with self._on_node_of(claim, agent):
                await asyncio.to_thread(self._maker.bring_files_of, actor, claim.node.id)
        self.on_node()
        return claim

    def _on(self, node: str) -> list[ActorPlan]:
        node_of = self._reservation.assignment.node_of
        return [actor for actor in self._table.plan if node_of[actor.name].id == node]

    @property
    def nodes(self) -> list[tuple[str, str, Any]]:
        """The nodes of the run: Ray's id, name and handle of the agent."""
        return [(node, *member) for node, member in list(self._agents.members.items())]

    def names_on(self, node: str) -> list[str]:
        """Names of the members on a node."""
        return [actor.name for actor in self._on(node)]

    def forget_node(self, node: str) -> None:
        """Forget a node that has left, and its members with it."""
        self._agents.forget(node)
        self._cores.pop(node, None)

    def _claim_room(self, actor: ActorPlan, claims: Claims) -> tuple[Claim, NewAgent | None]:
        """Claim room, and start an agent on its node where it has none. Blocks, in any thread. Raises `ResourceError`,
        also where the node cannot hold the weights."""
        try:
            claim = claims(actor, self._table.plan, self._config, self._namespace)
        except RayError as error:
            raise ResourceError(f"Ray has not reserved room for {actor.name}: {error}") from error
        node = claim.node
        if node.id in self._agents.members:
            return claim, None
        agent = None
        try:
            agent = self._agents.started(node.id, node.address, self._config.rollout.start_timeout_s)
            plan = {one.name: one for one in (*self._table.plan, actor)}
            check_room(
                {node.id: agent.facts}, {actor.name: node.id}, list(plan.values()),
                self._maker.sources.published_bytes, self._config.num_publications,
            )  # fmt: skip
        except BaseException:
            claim.release()
            if agent is not None:
                self._agents.owner.end(agent.handle)
            raise
        return claim, agent

    @contextlib.contextmanager
    def _on_node_of(self, claim: Claim, agent: NewAgent | None) -> Iterator[None]:
        """Take a node with its agent, where that is new, into the run. If the block fails, room and node are given
        back."""
        node = claim.node.id
        if agent is not None:
            self._agents.enter(node, agent)
            self._cores[node] = agent.facts.cores
        try:
            yield
        except BaseException:
            claim.release()
            if agent is not None and node in self._agents.members:
                self.forget_node(node)
            raise

    def _give_back(self, found: tuple[Claim, NewAgent | None]) -> None:
        """Give back room that no caller waits for any more."""
        claim, agent = found
        claim.release()
        if agent is not None:
            self._agents.owner.end(agent.handle)

    def _accept(self, actor: ActorPlan, claim: Claim) -> None:
        self._reservation.accept(actor, claim)
        self._table.enter(actor)
