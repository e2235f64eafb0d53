"""What many members are asked at once: by way of the agents of their nodes.

few members    controller ─▶ each of them
many           controller ─▶ the agent of each node ─▶ its members: one call and one answer a node
               controller ─▶ each that no agent has brought an answer of
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from penstock.orchestrator.cluster.nodes.agents import NodeAgents
from penstock.orchestrator.cluster.ray_calls import Handles, outcomes

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

    Lifecycle: `ask` whenever something is to be known of many. Agents are told their members whenever these change.
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
        """Actors and agents, as they were when `_neighbours` was made."""
        self._neighbours: dict[str, dict[str, Any]] = {}
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
        seen = dict(self._actors()), dict(self._agents.members)
        if seen == self._seen:
            return
        self._seen, self._neighbours = seen, {}
        self._told = {node: told for node, told in self._told.items() if node in self._agents.members}
        for name, handle in seen[0].items():
            if (node := self._node_of(name)) in self._agents.members:
                self._neighbours.setdefault(str(node), {})[name] = handle
