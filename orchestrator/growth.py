"""Room for members that join a fleet while its run goes on: a reservation, a node with an agent, and their files there.

    enlarge ─▶ a reservation of its own ─▶ the node's agent, where it has none ─▶ model or code ─▶ the plan has one more

Nodes that are there for such members alone are no part of what the run stands on: it goes on when they leave. Made by
`fleet.py`, called by `elastic/` and `session.py`.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from penstock.conf.errors import ResourceError
from penstock.conf.run import RunConfig
from penstock.conf.transports import choose_transport
from penstock.conf.weights import STREAMS
from penstock.orchestrator.actor_maker import ActorMaker
from penstock.orchestrator.node_agents import NodeAgents
from penstock.orchestrator.placement.actors import ActorPlan
from penstock.orchestrator.placement.nodes import free_nodes
from penstock.orchestrator.placement.one_more import engines_to_add, next_of
from penstock.orchestrator.placement.reservation import Claim, Reservation

CHANGING = ("rollout", "reward")
"""Roles that take any number of members."""


class Growth:
    """Lifecycle: `enlarge` for each that joins, `vacate` for each that has left. `plan` is the fleet's, and changes."""

    def __init__(
        self,
        plan: list[ActorPlan],
        reservation: Reservation,
        agents: NodeAgents,
        maker: ActorMaker,
        cores: dict[str, int],
        config: RunConfig,
        namespace: str,
        names: Iterable[str],
    ) -> None:
        """`cores`: of each node, which `maker` reads as well. `names`: that members ever had."""
        self._plan, self._reservation, self._agents, self._maker = plan, reservation, agents, maker
        self._cores, self._config, self._namespace, self._names = cores, config, namespace, names
        self._may_change = config.placement != "colocated" and choose_transport(config) not in STREAMS
        """Engines may come and go: they have not met the trainer's ranks at the start."""
        self._later: set[str] = set()
        """Nodes that are there for members that joined."""

    def fill(self) -> None:
        """As many engines as there is room for (`rollout.num_workers=auto`), to start with the others."""
        for _ in range(self.num_engines_more()):
            actor = replace(next_of(self._plan, "rollout", "rollout", []), joins=False)
            try:
                self._accept(actor, self._room_for(actor))
            except ResourceError:  # somebody else was faster
                return

    def num_engines_more(self) -> int:
        """How many more there is room for now, and use. None while Ray does not say."""
        try:
            return engines_to_add(self._plan, free_nodes(), self._config)
        except RayError:
            return 0

    async def enlarge(self, role: str, stage: str | None) -> str:
        """Plan one more member like those of a role and stage, on a node that has room now and is made ready for it.
        Its name, for `Fleet.replace`. One call at a time. Raises `ResourceError`, `DeadlineExceeded`."""
        actor = next_of(self._plan, role, stage, list(self._names))
        finding = asyncio.ensure_future(asyncio.to_thread(self._room_for, actor))
        try:
            claim = await asyncio.shield(finding)
        except asyncio.CancelledError:
            finding.add_done_callback(_give_back)
            raise
        self._accept(actor, claim)
        return actor.name

    def vacate(self, actor: ActorPlan) -> None:
        """It has ended."""
        self._reservation.vacate(actor)

    def place_of(self, name: str) -> str:
        """The node that a member is on, for people."""
        return self._reservation.assignment.titles[name]

    def can_lose(self, node: str) -> bool:
        """The run goes on without that node: it is there for members that joined, or others do elsewhere what is done
        there. Never the driver's."""
        if node in self._later:
            return True
        node_of = self._reservation.assignment.node_of
        here = [actor for actor in self._plan if node_of[actor.name].id == node]
        others = {(actor.role, actor.stage) for actor in self._plan if node_of[actor.name].id != node}
        is_first = node == next(iter(self._agents.members), node)
        return self._may_change and not is_first and all(
            actor.role in CHANGING and (actor.role, actor.stage) in others for actor in here
        )  # fmt: skip

    @property
    def nodes(self) -> list[tuple[str, str, Any]]:
        """All of the run: Ray's id, name and handle of the agent."""
        return [(node, *member) for node, member in list(self._agents.members.items())]

    def names_on(self, node: str) -> list[str]:
        """Members on a node."""
        node_of = self._reservation.assignment.node_of
        return [actor.name for actor in self._plan if node_of[actor.name].id == node]

    def forget_node(self, node: str) -> None:
        """It has left, and so have its members."""
        self._later.discard(node)
        self._agents.forget(node)
        self._cores.pop(node, None)

    def _room_for(self, actor: ActorPlan) -> Claim:
        """Blocks: a node's agent starts and fetches files."""
        try:
            claim = self._reservation.claim(actor, self._plan, self._config, self._namespace)
        except RayError as error:
            raise ResourceError(f"Ray has not reserved room for {actor.name}: {error}") from error
        node, is_new = claim.node, claim.node.id not in self._agents.members
        try:
            if is_new:
                self._later.add(node.id)
                self._agents.create([(node.id, node.address)])
            facts = self._agents.facts(self._config.rollout.start_timeout_s)
            self._cores[node.id] = facts[node.id].cores
            self._maker.bring_files_of(actor.role, node.id)
        except BaseException:
            claim.release()
            if is_new and node.id in self._agents.members:
                self.forget_node(node.id)
            raise
        return claim

    def _accept(self, actor: ActorPlan, claim: Claim) -> None:
        self._reservation.accept(actor, claim)
        self._plan.append(actor)


def _give_back(finding: "asyncio.Future[Claim]") -> None:
    """Nobody waits for the room any more."""
    if not finding.cancelled() and finding.exception() is None:
        finding.result().release()
