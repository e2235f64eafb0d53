import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import DeadlineExceeded, ResourceError, WorkerDied
from penstock.orchestrator.cluster import node_agents
from penstock.orchestrator.cluster.node_agents import NodeFiles, waves
from tests.fakes.actors import Call, FakeHandle


def test_sources_double() -> None:
    assert waves(["a"], ["b", "c", "d"]) == [[("a", "b")], [("a", "c"), ("b", "d")]]
    assert waves(["a"], ["a"]) == []


@given(st.integers(1, 200))
def test_every_node_is_served_once_by_one_that_has_it(count: int) -> None:
    has = {"0"}
    planned = waves(["0"], [str(node) for node in range(count + 1)])
    for wave in planned:
        assert len({source for source, _ in wave}) == len(wave)  # one at a time each
        assert {source for source, _ in wave} <= has
        targets = {target for _, target in wave}
        assert not targets & has
        has |= targets
    assert len(has) == count + 1
    assert len(planned) == count.bit_length()  # 1, 2, 4, ... have it


@pytest.mark.parametrize(
    "use",
    [
        lambda files, place: asyncio.run(files.places(place, ["gone"])),
        lambda files, place: asyncio.run(files.discard(place, {"gone": "/tmp/elsewhere"})),
        lambda files, place: files.provide(place, ["gone"]),
    ],
)
def test_a_node_that_has_left_is_a_loss_that_others_make_up_for(
    use: Callable[[NodeFiles, str], Any], tmp_path: Path
) -> None:
    """Not an error of the run's own, which would end it."""
    agents = SimpleNamespace(facts=lambda timeout_s: {}, members={})
    with pytest.raises(WorkerDied, match="Node gone has left"):
        use(NodeFiles(agents, 1.0), str(tmp_path))  # type: ignore[arg-type]


@pytest.fixture
def hub_files(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[NodeFiles, list[Call]]]:
    """Files of nodes a and b, whose agents answer as they are told, and the agents' calls. No network is asked."""
    monkeypatch.setattr(node_agents, "cached_revision", lambda name: "commit")
    monkeypatch.setattr(node_agents, "LOOK_S", 0.01)

    def make(timeout_s: float = 60.0, **answers: Any) -> tuple[NodeFiles, list[Call]]:
        handle = FakeHandle(**{"fetched": lambda: (1_000_000_000, 4_000_000_000), **answers})
        agents: Any = SimpleNamespace(members={node: (f"Agent-{node}", handle) for node in "ab"})
        return NodeFiles(agents, timeout_s), handle.calls

    return make


def test_each_node_fetches_a_hubs_model_once_and_its_actors_read_a_directory(
    hub_files: Callable[..., tuple[NodeFiles, list[Call]]],
) -> None:
    come, told = Future[str](), []
    threading.Timer(0.1, come.set_result, ("/cache/snapshots/commit",)).start()
    files, calls = hub_files(fetch_model=come)
    files.tell = told.append
    files.provide("people/model", ["a", "b"])
    files.provide("people/model", ["a", "b"])
    asked = [call.arguments for call in calls if call.method == "fetch_model"]
    assert asked == [("people/model", "commit")] * 2
    assert files.local("a", "people/model") == files.local("b", "people/model") == "/cache/snapshots/commit"
    assert set(told) == {"fetching people/model: 2.0 of 8.0 GB"}


def test_a_model_that_does_not_come_in_time_names_its_own_key(hub_files: Callable[..., Any]) -> None:
    files, _ = hub_files(timeout_s=0.1, fetch_model=Future[str]())
    with pytest.raises(DeadlineExceeded, match=r"cluster\.files_timeout_s=0\.1 s: Agent-a, Agent-b still fetches"):
        files.provide("people/model", ["a", "b"])


def test_a_node_that_cannot_fetch_ends_the_wait(hub_files: Callable[..., Any]) -> None:
    files, _ = hub_files(timeout_s=900.0, fetch_model=ResourceError("b: no way to the hub"))
    with pytest.raises(ResourceError, match="no way to the hub"):
        files.provide("people/model", ["a", "b"])


def test_a_directory_that_is_gone_is_not_asked_of_the_hub(hub_files: Callable[..., Any]) -> None:
    files, calls = hub_files(fetch_model=ResourceError("asked"))
    files.provide("/gone/model", ["a"])
    assert not calls
