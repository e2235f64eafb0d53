"""Actors that belong to an owner: who may have more of them, and when they end. Over a real Ray."""

import asyncio
import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from penstock.conf.errors import DeadlineExceeded, TakenOver
from penstock.orchestrator.cluster import owners
from penstock.orchestrator.cluster.owners import Owner, RunOwner
from penstock.orchestrator.cluster.ray_cluster import has_owner
from penstock.orchestrator.recovery.takeover import find_orphan

pytestmark = pytest.mark.real


START_S = 900.0


class Actor:
    def __init__(self, *words: str) -> None:
        self._words = words

    def words(self) -> tuple[str, ...]:
        return self._words


@pytest.fixture
def namespace(cluster: str) -> Iterator[str]:
    name = f"owners-{uuid.uuid4().hex[:8]}"
    yield name
    if (found := RunOwner.take(name, 60.0)) is not None:
        found[0].close()


def options(namespace: str, name: str) -> dict[str, object]:
    return {"name": name, "namespace": namespace, "num_cpus": 0}


def is_there(namespace: str, name: str) -> bool:
    try:
        ray.get_actor(name, namespace=namespace)
    except ValueError:
        return False
    return True


def wait_until_gone(namespace: str, *names: str) -> None:
    deadline = time.monotonic() + 300
    while any(is_there(namespace, name) for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def state_of(group: PlacementGroup) -> str:
    return str(placement_group_table(group)["state"])


def test_an_owner_that_does_not_start_in_time_is_told_and_ends(namespace: str) -> None:
    with pytest.raises(DeadlineExceeded, match=r"start: Owner did not .* within 0 s\. Raise rollout\.start_timeout_s"):
        RunOwner.start(namespace, 60.0, 0.0)
    wait_until_gone(namespace, owners.OWNER)


def test_what_one_has_left_is_the_next_ones_and_the_first_is_refused(namespace: str) -> None:
    first = RunOwner.start(namespace, 60.0, START_S)
    kept = first.make(Actor, options(namespace, "HandoverState"), "by", "value")
    late = first.make(Actor, options(namespace, "Late"))
    groups = [first.reserve([{"CPU": 0.01}], [{}], f"{namespace}/{number}") for number in range(2)]
    assert all(group.wait(20) for group in groups)
    assert ray.get(kept.words.remote()) == ("by", "value")
    assert [first.name_of(kept), first.name_of(late)] == ["HandoverState", "Late"]
    asyncio.run(first.keep(b"the run"))
    asyncio.run(first.note({3: ["reports"]}))

    found = RunOwner.take(namespace, 60.0)
    assert found is not None
    second, left = found
    assert (second.epoch, left.state) == (2, b"the run")
    assert left.steps is not None
    handles = second.keep_only(["HandoverState", "Never"], groups[:1])
    assert handles == {"HandoverState": kept}
    assert ray.get(handles["HandoverState"].words.remote()) == ("by", "value")
    assert second.name_of(kept) == "HandoverState"
    wait_until_gone(namespace, "Late")
    assert [state_of(group) for group in groups] == ["CREATED", "REMOVED"]
    first.end(kept)  # the command before has not yet heard that it is another's
    for refused in (
        lambda: first.confirm(),
        lambda: first.make(Actor, options(namespace, "More")),
        lambda: asyncio.run(first.keep(b"mine")),
        lambda: asyncio.run(first.note({})),
        lambda: asyncio.run(first.leave()),
    ):
        with pytest.raises(TakenOver):
            refused()
    first.end(kept)  # by now it has
    second.confirm()
    assert ray.get(kept.words.remote()) == ("by", "value")
    more = second.make(Actor, options(namespace, "More"))
    second.end(more)
    wait_until_gone(namespace, "More")
    assert second.keep_only(["HandoverState", "More"], groups[:1]) == {"HandoverState": kept, "More": more}
    second.close()
    wait_until_gone(namespace, "HandoverState", "Owner")
    assert state_of(groups[0]) == "REMOVED"
    second.confirm()  # a dead one is nobody's


def test_an_owner_is_seen_by_a_command_that_is_not_connected(
    namespace: str, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = RunOwner.start(namespace, 60.0, START_S)
    asyncio.run(owner.keep(b"the run"))
    assert has_owner(namespace)
    with monkeypatch.context() as before:
        before.setattr("ray.is_initialized", lambda: False)
        before.setenv("RAY_ADDRESS", cluster)
        assert has_owner(namespace)
        assert not has_owner(f"{namespace}-other")
        before.delenv("RAY_ADDRESS")
        assert not has_owner(namespace), "a local Ray ends with its command"
    owner.close()
    wait_until_gone(namespace, "Owner")
    assert not has_owner(namespace)


def test_all_of_it_ends_when_nobody_is_heard_of_for_the_lease(namespace: str) -> None:
    owner = RunOwner.start(namespace, 1.0, START_S)
    owner.make(Actor, options(namespace, "Alone"))
    asyncio.run(owner.keep(b"the run"))
    time.sleep(2.0)
    assert is_there(namespace, "Alone")  # the lease is renewed, whatever this process does
    owner.detach()
    wait_until_gone(namespace, "Alone", "Owner")
    assert RunOwner.take(namespace, 60.0) is None


@pytest.mark.parametrize("has_left", [True, False])
def test_what_has_nothing_to_go_on_with_ends_when_it_is_asked_for(namespace: str, has_left: bool) -> None:
    """It was over, or had not begun to serve."""
    owner = RunOwner.start(namespace, 60.0, START_S)
    owner.make(Actor, options(namespace, "Alone"))
    if has_left:
        asyncio.run(owner.keep(b"the run"))
        asyncio.run(owner.leave())
    assert RunOwner.take(namespace, 60.0) is None
    wait_until_gone(namespace, "Alone", "Owner")
    owner.close()  # of one that is gone


@ray.remote(num_cpus=0)
class Hanging:
    """An owner whose process is stopped, or whose node swaps."""

    async def take(self) -> None:
        await asyncio.sleep(3600)


def test_one_that_does_not_answer_ends_too_and_takes_no_place_of_the_next_fleet(
    namespace: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hanging = Hanging.options(name=owners.OWNER, namespace=namespace, lifetime="detached").remote()
    monkeypatch.setattr(owners, "ANSWER_S", 0.5)
    connection = {"address": ray.get_runtime_context().gcs_address, "namespace": namespace}
    (tmp_path / "cluster.json").write_text(json.dumps(connection))
    told: list[str] = []
    directory = SimpleNamespace(cluster_file=tmp_path / "cluster.json", path=tmp_path / "words")
    assert find_orphan(cast(Any, directory), cast(Any, None), 60.0, told.append) is None
    assert "words: its actors are there, but their owner does not answer" in told[0]
    with pytest.raises(RayError):
        ray.get(hanging.take.remote(), timeout=900)
    wait_until_gone(namespace, owners.OWNER)


def test_without_one_actors_are_this_processes(cluster: str) -> None:
    owner, namespace = Owner(), f"owners-{uuid.uuid4().hex[:8]}"
    handle = owner.make(Actor, options(namespace, "Own"), "word")
    assert ray.get(handle.words.remote()) == ("word",)
    group = owner.reserve([{"CPU": 0.01}], [{}], namespace)
    assert group.wait(20)
    remove_placement_group(group)
    ray.kill(handle)
