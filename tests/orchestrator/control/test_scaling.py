"""Engines that follow the cluster: as soon as there is room, and seldom where they do not start, on a virtual clock.
More and fewer engines of a session: between two calls, all or none."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conf.errors import CannotScale, ResourceError, WeightError
from penstock.conf.run import RunConfig
from penstock.orchestrator.configuration.compose import load_config
from penstock.orchestrator.control.scaling import (
    FOLLOW_S,
    LONGEST_S,
    AutoscalerFollower,
    ScalableRole,
    engines_lacking,
    next_look_s,
)
from penstock.orchestrator.control.scaling_requests import ScalingRequest, ScalingResult
from penstock.orchestrator.recovery.restart import nothing_to_catch_up
from tests.orchestrator.scripted_fleet import ScriptedFleet, flow_of, scripted_config, store_of
from tests.virtual_time import run_virtually


class Cluster:
    """Has room for so many more at each look, of which so many start."""

    def __init__(self, *looks: tuple[int, int]) -> None:
        self._looks = list(looks)
        self.requests: list[tuple[float, ScalingRequest]] = []
        self.asked: list[int] = [0]
        """Numbers of engines that it was asked for, each once."""

    @property
    def is_asking(self) -> bool:
        return self.asked[-1] > 0

    def num_present(self, role: str) -> int:
        return 1

    def ask_for_engines(self, count: int) -> bool:
        was_asking = self.is_asking
        self.asked += [count] if count != self.asked[-1] else []
        return self.is_asking and not was_asking

    def num_engines_more(self) -> int:
        self._present = self._looks.pop(0) if self._looks else (0, 0)
        return self._present[0]

    async def change(self, requests: list[ScalingRequest]) -> list[ScalingResult]:
        self.requests += [(asyncio.get_running_loop().time(), request) for request in requests]
        return [ScalingResult("rollout", 1, joined=["Rollout-1 on node"] * self._present[1])]


def test_room_is_taken_when_there_and_asked_for_less_often_while_nothing_starts() -> None:
    cluster: Any = Cluster((0, 0), (2, 2), (1, 0), (1, 0), (1, 1), (1, 1))
    follow(cluster, load_config(["rollout.num_workers=auto"]), dict, [])
    assert cluster.asked == [0]
    one, two = ScalingRequest("rollout", 1, is_change=True), ScalingRequest("rollout", 2, is_change=True)
    assert cluster.requests == [(10.0, two), (15.0, one), (25.0, one), (45.0, one), (50.0, one)]


def follow(cluster: Any, config: RunConfig, metrics: Callable[[], Mapping[str, Any]], notes: list[str]) -> None:
    """A hundred seconds of a follower."""

    async def main() -> None:
        follower = AutoscalerFollower(cluster, cluster, config, metrics, notes.append)
        following = asyncio.ensure_future(follower.run())
        await asyncio.sleep(100)
        following.cancel()

    run_virtually(main())


def test_nodes_are_asked_for_under_load_and_the_request_is_taken_back() -> None:
    cluster, notes = Cluster(), list[str]()
    config = load_config(["rollout.num_workers=auto", "rollout.max_workers=3", "trainer.groups_per_step=8"])
    waits = iter([0.4, 0.6, 0.4, 0.6, 0.2, 0.4, 0.9])
    follow(cluster, config, lambda: {"idle/train": next(waits, 0.9)}, notes)
    assert cluster.asked == [0, 2, 0, 2, 0]  # the last one at the end of the run
    assert notes == ["ranks wait for samples: asks the cluster for room for 2 more engine(s)"] * 2


def test_engines_lack_while_they_are_busy_and_ranks_wait() -> None:
    words = ["rollout.num_workers=auto", "trainer.groups_per_step=8", "max_staleness=1"]
    config, without = load_config([*words, "rollout.max_workers=3"]), load_config(words)
    busy, idle = {"idle/train": 0.6, "idle/rollout": 0.1}, {"idle/train": 0.6, "idle/rollout": 0.6}
    assert engines_lacking(busy, 1, config, is_asking=False) == 2
    assert engines_lacking(busy, 3, config, is_asking=True) == 0
    assert engines_lacking(idle, 1, config, is_asking=False) == 0
    assert engines_lacking({}, 1, config, is_asking=False) == 0
    assert engines_lacking(busy, 1, without, is_asking=False) == 0
    in_turns = load_config([*words, "rollout.max_workers=30", "max_staleness=0"])
    assert engines_lacking(idle, 1, in_turns, is_asking=False) == 7  # one for each group


@given(st.lists(st.booleans(), max_size=20))
def test_looks_are_never_too_often_nor_too_seldom(came: list[bool]) -> None:
    pause_s = FOLLOW_S
    for one in came:
        pause_s = next_look_s(pause_s, 1, int(one))
        assert FOLLOW_S <= pause_s <= LONGEST_S
        assert not one or pause_s == FOLLOW_S
    assert next_look_s(pause_s, 0, 0) == FOLLOW_S


class Full(ScriptedFleet):
    """There is room for one more."""

    async def enlarge(self, role: str, stage: str | None) -> str:
        if len(self.role(role)) + self._joined >= 2:
            raise ResourceError("no node has room")
        return await super().enlarge(role, stage)


def over(
    make: type[ScriptedFleet], tmp_path: Path, catch_up: Any = nothing_to_catch_up
) -> tuple[ScriptedFleet, ScalableRole]:
    config = scripted_config(tmp_path)
    flow = flow_of(config)
    fleet = make(store_of(config, flow), config, flow, Random(1))
    return fleet, ScalableRole("rollout", fleet, config, catch_up)  # type: ignore[arg-type]


def test_engines_are_added_and_the_last_ones_removed(tmp_path: Path) -> None:
    async def main() -> None:
        fleet, engines = over(ScriptedFleet, tmp_path)
        names = await engines.add_members(2)
        assert [name for name, _ in fleet.role("rollout")] == ["Rollout-0", *names]
        assert await engines.remove_members(1, None) == names[1:]
        assert len(engines) == len(fleet.role("rollout")) == 2
        with pytest.raises(CannotScale, match="one has to stay"):
            await engines.remove_members(2, 1.0)
        with pytest.raises(CannotScale, match="no number of members"):
            await engines.add_members(0)
        assert len(engines) == 2

    run_virtually(main())


def test_where_not_all_can_come_none_does(tmp_path: Path) -> None:
    async def fail(_: Any) -> None:
        await asyncio.sleep(1)
        raise WeightError("no version")

    async def main() -> None:
        fleet, engines = over(Full, tmp_path)
        with pytest.raises(ResourceError):
            await engines.add_members(2)
        assert len(engines) == len(fleet.role("rollout")) == 1
        fleet, engines = over(ScriptedFleet, tmp_path, fail)
        with pytest.raises(WeightError):
            await engines.add_members(1)
        assert len(engines) == len(fleet.role("rollout")) == 1
        _, engines = over(ScriptedFleet, tmp_path, None)
        with pytest.raises(CannotScale, match="met at the start"):
            await engines.add_members(1)

    run_virtually(main())
