"""The members of a fleet: by role and stage, those that start in place of others, and those that are gone; what many
are asked at once, and what the next process is told of them.

    few members    controller ─▶ each of them
    many           controller ─▶ the agent of each node ─▶ its members: one call and one answer a node
                   controller ─▶ each that no agent has brought an answer of
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.conf.errors import DeadlineExceeded
from penstock.orchestrator.cluster.fleet.store_process import StoreState
from penstock.orchestrator.cluster.nodes.agents import AgentsState, NodeAgents
from penstock.orchestrator.cluster.owners import Owner
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from penstock.orchestrator.cluster.placement.reservation import Reservation
from penstock.orchestrator.cluster.ray_calls import outcomes

Members = list[tuple[str, Any]]
"""Names and handles of actors."""
GANGS = ("trainer", "scorer")
"""Roles whose ranks meet: they start together, and one of them is worth nothing without the others."""
LOOK_S = 0.1
"""Seconds between two looks for a role that is empty."""
MANY = 100
"""Least number of members for which agents are asked. Fewer are asked themselves."""
AGENT_S = 5.0
"""Deadline for an agent to answer, even if members have longer."""
SHARE = 0.25
"""Largest share of the members' time that is for agents: the rest is for members that are asked themselves."""
MEMBERS_SHARE = 0.5
"""Share of the agent's time that is for its members."""


class Roster:
    """Members by the plan's names, which stay when another takes a member's place. Lifecycle: `starting` has members
    that begin; once they serve, `add` puts them into their role; `remove` ends them.
    """

    def __init__(self, plan: Collection[ActorPlan], patience_s: float, owner: Owner) -> None:
        """`patience_s`: longest wait for a role that is empty. `owner`: that of the actors."""
        self.owner = owner
        self.plan = list(plan)  # it changes, and a fleet after this one begins as this one did
        self.actors: dict[str, Any] = {}
        """Handles by name."""
        self.starting: dict[str, Any] = {}
        """Handles of actors that replace others and are not added yet, by name."""
        self.made: Counter[str] = Counter()
        """Number of actors made so far, by name."""
        self._patience_s = patience_s

    def teams(self, *roles: str) -> list[list[str]]:
        """Names of actors that start together: all ranks of a model, or one actor. All roles if none is named."""
        teams: dict[tuple[str, str], list[str]] = {}
        for actor in self.plan:
            if actor.name in self.made and (not roles or actor.role in roles):
                key = str(actor.stage) if actor.role in GANGS else actor.name
                teams.setdefault((actor.role, key), []).append(actor.name)
        return list(teams.values())

    def kill(self, names: Collection[str]) -> None:
        """End actors that are dead, or of no use. Their callers hear that they are gone."""
        for name in names:
            for members in (self.actors, self.starting):
                if name in members:
                    self.owner.end(members[name])

    def remove(self, names: Collection[str]) -> None:
        """End actors, and take them out of their role."""
        self.kill(names)
        for name in names:
            for members in (self.actors, self.starting):
                members.pop(name, None)

    def add(self, members: Members) -> None:
        """Put members into their role, in place of those before them."""
        for name, handle in members:
            self.actors[name] = handle
            self.starting.pop(name, None)

    def first_stage(self, role: str) -> str | None:
        """The first stage that has members of a role."""
        return next((actor.stage for actor in self.plan if actor.role == role), None)

    def role(self, role: str, stage: str | None = None) -> Members:
        """Names and handles of one role, and of one stage of it if one is named."""
        return [
            (actor.name, self.actors[actor.name])
            for actor in self.plan
            if actor.role == role and actor.name in self.actors and stage in (None, actor.stage)
        ]

    async def present(self, role: str, stage: str | None = None) -> Members:
        """Members of a role that is never empty for long: where all have died, waits for the first replacement. Raises
        `DeadlineExceeded`."""
        deadline = time.monotonic() + self._patience_s
        while not (members := self.role(role, stage)):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"no {role} was there within {self._patience_s:g} s (rollout.start_timeout_s).")
            await asyncio.sleep(LOOK_S)
        return members

    def plan_of(self, name: str) -> ActorPlan:
        return next(actor for actor in self.plan if actor.name == name)


class RollCall:
    """Asks many members the same, such as a heartbeat: by way of their nodes' agents where there are many.

    An agent brings answers and nothing else: a member's own call says whether it is silent, failed or dead. So an agent
    that is slow, cut off or dead makes no member seem so. The reason for the detour: a call of an actor costs its
    caller 0.3 ms of CPU, and a thousand engines are on a hundred nodes.

    Lifecycle: `ask` whenever something is to be known of many. Agents are told their members whenever these change.
    """

    def __init__(
        self, actors: Mapping[str, Any], agents: NodeAgents, node_of: Callable[[str], str | None], many: int = MANY
    ) -> None:
        """`actors`: present handles by name. `node_of`: the node of an actor, by its name."""
        self._actors, self._agents, self._node_of, self._many = actors, agents, node_of, many
        self._seen: tuple[dict[str, Any], dict[str, tuple[str, Any]]] = {}, {}
        """Actors and agents, as they were when `_neighbours` was made."""
        self._neighbours: dict[str, dict[str, Any]] = {}
        """Handles of the actors on each node, by node and name."""
        self._told: dict[str, tuple[Any, dict[str, Any]]] = {}
        """Agent of each node, and the actors there that it knows, by node."""

    async def ask(self, members: Members, method: str, *, phase: str, timeout_s: float) -> list[Any]:
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

    async def _by_agents(self, members: Members, method: str, phase: str, timeout_s: float) -> dict[str, Any]:
        """Answers that agents have brought, by the member's name."""
        self._look_around()
        wanted = dict(members)
        asked: dict[str, tuple[Any, dict[str, Any]]] = {}
        calls = []
        for node, handles in self._neighbours.items():
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

    def _look_around(self) -> None:
        seen = dict(self._actors), dict(self._agents.members)
        if seen == self._seen:
            return
        self._seen, self._neighbours = seen, {}
        self._told = {node: told for node, told in self._told.items() if node in self._agents.members}
        for name, handle in self._actors.items():
            if (node := self._node_of(name)) in self._agents.members:
                self._neighbours.setdefault(str(node), {})[name] = handle


@dataclass(frozen=True)
class FleetState:
    """The fleet at one moment: what a process needs to go on with a fleet that another one has started, as plain data
    without handles. Members that start or join at that moment are not in it."""

    plan: list[ActorPlan]
    names: dict[str, str]
    """Names in Ray of the members that are there, by the plan's name."""
    made: Counter[str]
    """Number of actors made so far, by the plan's name."""
    reservation: Reservation
    agents: AgentsState
    places: dict[tuple[str, str], str]
    """Places of the driver's files on other nodes, by node and the driver's path."""
    store: StoreState | None
    cores: dict[str, int]
    """Number of cores, by node."""

    @property
    def all_names(self) -> list[str]:
        """Names of all actors in Ray."""
        stores = [self.store.name] if self.store is not None else []
        return [*self.names.values(), *self.agents.members.values(), *stores]
