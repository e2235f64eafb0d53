"""Agents of nodes that join while others serve."""

from concurrent.futures import Future
from typing import Any

import pytest

from penstock.conf.cluster import ClusterConfig
from penstock.conf.errors import DeadlineExceeded, WorkerDied
from penstock.orchestrator.cluster import node_agents as agents_of
from penstock.orchestrator.cluster.node_agents import NodeAgents
from tests.fakes.actors import FakeHandle

A, B = "a" * 56, "b" * 56
"""Ids of nodes, as Ray writes them."""


class Owner:
    """Makes agents that answer when they are told to."""

    epoch = 0

    def __init__(self) -> None:
        self.asked: list[Future[Any]] = []
        self.ended: list[str] = []

    def end(self, handle: Any) -> None:
        self.ended.append(handle.name)

    def make(self, cls: type, options: dict[str, Any], *arguments: Any) -> Any:
        answer: Future[Any] = Future()
        self.asked.append(answer)
        return FakeHandle(None, options["name"], facts=lambda: answer)


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def agents(owner: Owner) -> NodeAgents:
    """Agents of a run on one node, whose agent is there."""
    made = NodeAgents("run", "run", ClusterConfig(), None, owner)  # type: ignore[arg-type]
    made.create([(A, "10.0.0.1")])
    owner.asked[0].set_result("facts of a")
    made.facts(1.0)
    return made


def test_an_agent_that_joins_is_not_listed_before_its_facts_are_known(
    agents: NodeAgents, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller asks for the facts of all that it sees, on its event loop."""
    seen: list[dict[str, Any]] = []

    def answered(*arguments: Any, **keywords: Any) -> list[Any]:
        seen.append(agents.facts(0.0))
        return ["facts of b"]

    with monkeypatch.context() as patched:
        patched.setattr(agents_of, "get_from_all", answered)
        started = agents.started(B, "10.0.0.2", 1.0)
    assert seen == [{A: "facts of a"}]
    agents.enter(B, started)
    assert list(agents.members) == [A, B]
    assert agents.facts(0.0) == {A: "facts of a", B: "facts of b"}


def test_an_agent_that_does_not_start_is_ended_and_never_listed(agents: NodeAgents, owner: Owner) -> None:
    with pytest.raises(DeadlineExceeded, match=r"Agent-10\.0\.0\.2"):
        agents.started(B, "10.0.0.2", 0.01)
    assert owner.ended == ["Agent-10.0.0.2"]
    assert list(agents.members) == [A]
    assert agents.facts(0.0) == {A: "facts of a"}


def test_an_agent_that_comes_when_the_run_has_ended_is_ended(
    agents: NodeAgents, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*arguments: Any, **keywords: Any) -> list[Any]:
        agents.is_closed = True
        return ["facts of b"]

    monkeypatch.setattr(agents_of, "get_from_all", ends)
    with pytest.raises(WorkerDied, match="the run has ended"):
        agents.started(B, "10.0.0.2", 1.0)
    assert owner.ended == ["Agent-10.0.0.2"]
    assert list(agents.members) == [A]
