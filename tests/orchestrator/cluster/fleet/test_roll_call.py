"""Asked through agents or not, a member is what its own answers make of it."""

import asyncio
from typing import Any

import pytest

from penstock.conf.cluster import ClusterConfig
from penstock.conf.errors import DeadlineExceeded, WorkerDied
from penstock.orchestrator.cluster.fleet.fleet import RollCall
from penstock.orchestrator.cluster.node_agents import NodeAgents
from penstock.workers.node.node_actor import ActorDirectory
from tests.fakes.actors import FakeHandle, never

NODES = {"A": "left", "B": "left", "C": "right"}


class Agent:
    """Asks members as an agent does."""

    def __init__(self) -> None:
        self._node_actors = ActorDirectory()
        self.calls: list[tuple[list[str], list[str] | None]] = []
        """Whom it was to ask, and whom it was told of."""

    async def ask_members(
        self, method: str, names: list[str], timeout_s: float, members: dict[str, Any] | None
    ) -> dict[str, Any]:
        self.calls.append((sorted(names), sorted(members) if members is not None else None))
        if members is not None:
            self._node_actors.set(members)
        return await self._node_actors.ask(method, names, timeout_s)


class Scene:
    """Three members on two nodes."""

    def __init__(self, many: int = 1) -> None:
        self.members = {name: FakeHandle(progress=name.lower()) for name in NODES}
        self.agents = {node: Agent() for node in ("left", "right")}
        of_run = NodeAgents("run", "run", ClusterConfig())
        self.handles = {node: FakeHandle(agent, f"Agent-{node}") for node, agent in self.agents.items()}
        of_run.members = {node: (handle.name, handle) for node, handle in self.handles.items()}
        self.of_run = of_run
        self.roll_call = RollCall(lambda: self.members, of_run, NODES.get, many)

    def ask(self, timeout_s: float = 5.0) -> list[Any]:
        return asyncio.run(
            self.roll_call.ask(list(self.members.items()), "progress", phase="look", timeout_s=timeout_s)
        )

    @property
    def asked(self) -> list[int]:
        """How often each member was, by whomever."""
        return [len(member.calls) for member in self.members.values()]


def test_many_are_asked_once_each_by_their_nodes_agents() -> None:
    scene = Scene()
    assert scene.ask() == ["a", "b", "c"]
    assert scene.asked == [1, 1, 1]
    assert scene.agents["left"].calls == [(["A", "B"], ["A", "B"])]
    assert scene.agents["right"].calls == [(["C"], ["C"])]


def test_few_are_asked_without_agents() -> None:
    scene = Scene(many=4)
    assert scene.ask() == ["a", "b", "c"]
    assert not any(agent.calls for agent in scene.agents.values())


def test_an_agent_hears_of_its_members_when_they_change() -> None:
    scene = Scene()
    scene.ask()
    scene.ask()
    scene.members["B"] = FakeHandle(progress="another")
    assert scene.ask() == ["a", "another", "c"]
    assert [told for _, told in scene.agents["left"].calls] == [["A", "B"], None, ["A", "B"]]
    assert [told for _, told in scene.agents["right"].calls] == [["C"], None, None]
    scene.of_run.members["left"] = "Agent-left-2", FakeHandle(Agent())  # it has taken the place of one that died
    assert scene.ask() == ["a", "another", "c"]


@pytest.mark.parametrize("trouble", ["dead", "silent", "gone"])
def test_an_agent_in_trouble_makes_nobody_seem_so(trouble: str) -> None:
    scene = Scene()
    if trouble == "gone":
        del scene.of_run.members["left"]
    elif trouble == "silent":
        scene.handles["left"].answers["ask_members"] = never
    else:
        scene.handles["left"].kill()
    assert scene.ask() == ["a", "b", "c"]


def test_a_silent_member_is_late_by_the_same_deadline_at_no_cost_to_neighbours() -> None:
    scene = Scene()
    scene.members["A"].answers["progress"] = never
    late, *others = scene.ask(timeout_s=1.0)
    assert isinstance(late, DeadlineExceeded)
    assert "A did not answer" in str(late)
    assert others == ["b", "c"]
    assert len(scene.members["A"].calls) == 2, "by the agent, and itself"


def test_a_members_error_is_its_own_word() -> None:
    scene = Scene()
    scene.members["C"].answers["progress"] = error = WorkerDied("C has died")
    assert scene.ask() == ["a", "b", error]
    assert scene.asked == [1, 1, 2]
