"""The benchmark's fleet serves the real controller. The seconds of two steps with eight engines are not judged."""

import asyncio
from pathlib import Path

from benchmarks.controller.clock import run_fast
from benchmarks.controller.hosts import served_members, served_store
from benchmarks.controller.run import Readings, run_here, summary
from benchmarks.controller.scale import Scale
from penstock.orchestrator.run_directory.run_directory import RunDirectory

SCALE = Scale(num_engines=8, num_ranks=2, num_rewards=1, group_size=2, num_steps=4, speed=200.0, devices=4)

HARMLESS = {"warning", "hint", "link", "link_not_measured"}
"""Kinds of events of a fleet that lives, maybe on a busy machine."""


def test_the_controller_trains_with_the_played_fleet(tmp_path: Path) -> None:
    async def run() -> Readings:
        async with served_store(SCALE, str(tmp_path)) as store, served_members(SCALE, str(tmp_path)) as members:
            return await asyncio.wait_for(run_here(SCALE, str(tmp_path), store, members, None), 3600)

    readings = run_fast(run, SCALE.speed)
    assert [one.step for one in readings.found] == [1, 2, 3, 4]
    found = summary(readings, SCALE)
    assert found["calls"]["load"] == SCALE.num_engines
    assert found["calls"]["step"] <= SCALE.num_ranks
    assert 20 < found["step_s"] < 400
    directory = RunDirectory.open(tmp_path / "run")
    assert {event["kind"] for event in directory.read_events()} <= HARMLESS, "somebody was lost"
    assert {line["rollout/num_engines"] for line in directory.read_metrics()} == {SCALE.num_engines}
