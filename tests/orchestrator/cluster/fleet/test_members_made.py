"""Members are made while the controller goes on with everything else, and are lent at once where that is said."""

import asyncio
import threading
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.orchestrator.cluster.fleet.member_table import MemberTable
from penstock.orchestrator.cluster.placement.actors import ActorPlan
from tests.orchestrator.scripted_cluster import Cluster, ScriptedNodesFleet
from tests.orchestrator.scripted_fleet import flow_of, scripted_config


class AtOnce(Random):
    def uniform(self, a: float, b: float) -> float:
        return a


def test_an_owner_that_answers_late_does_not_hold_up_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("cluster.cpus_per_worker=0", "reward.cpus_per_worker=0")
    config, cluster, loop_goes_on = scripted_config(tmp_path, *words), Cluster(2), threading.Event()
    cluster.patch(monkeypatch)
    fleet = ScriptedNodesFleet(cluster, config, flow_of(config), AtOnce(1))
    fleet.create()
    make = fleet.owner.make

    def made_late(*arguments: Any) -> Any:
        assert loop_goes_on.wait(30), "the event loop waits for the owner"
        return make(*arguments)

    async def main() -> None:
        monkeypatch.setattr(fleet.owner, "make", made_late)
        fleet.remove(["Reward-0"])
        starting = asyncio.ensure_future(fleet.start_members(["Reward-0"]))
        await asyncio.sleep(0.2)
        loop_goes_on.set()
        ((name, _),) = await starting
        assert name == "Reward-0"

    asyncio.run(main())


def test_what_takes_the_place_of_a_reserved_member_is_lent_from_its_start_on() -> None:
    ended, owner = list[str](), SimpleNamespace()
    owner.end = ended.append
    table = MemberTable([ActorPlan(name, "rollout") for name in ("Rollout-0", "Rollout-1")], 1.0, owner)  # type: ignore[arg-type]
    table.add([("Rollout-0", "a"), ("Rollout-1", "b")])
    table.reserve(["Rollout-1"])
    assert len(table.role("rollout")) == 2  # until it is lent
    table.lend(["Rollout-1"])
    table.remove(["Rollout-1"])
    assert table.lent() == []
    table.add([("Rollout-1", "c")])
    assert (table.role("rollout"), table.lent(), ended) == ([("Rollout-0", "a")], [("Rollout-1", "c")], ["b"])
    other = MemberTable([], 1.0, owner)  # type: ignore[arg-type]
    other.adopt(table.lines(), {"Rollout-0": "a", "Rollout-1": "d"})
    other.add([("Rollout-1", "e")])
    assert other.lent() == [("Rollout-1", "e")]
