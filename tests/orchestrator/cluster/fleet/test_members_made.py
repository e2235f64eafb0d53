"""Members are made while the controller goes on with everything else."""

import asyncio
import threading
from pathlib import Path
from random import Random
from typing import Any

import pytest

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
